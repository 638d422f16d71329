"""Settings: a file, then the environment, then flags; what cannot be meant is refused by name; secrets stay secret."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import (
    ClusterConfig,
    EngineConfig,
    HttpConfig,
    KvCacheConfig,
    ModelConfig,
    PlacementConfig,
    PoolConfig,
)
from serving.log_config import LogConfig
from serving.options import ConfigError, add_flags, build, load_file, names, parse_bytes

CONFIGS = (
    *(ModelConfig, EngineConfig, HttpConfig, PlacementConfig, ClusterConfig, PoolConfig, KvCacheConfig, LogConfig),
)
FIELDS = [(config, field) for config in CONFIGS for field in dataclasses.fields(config)]
IDS = [field.name for _, field in FIELDS]
SECRETS = [(config, field) for config, field in FIELDS if field.metadata["secret"]]
SECRET_IDS = [field.name for _, field in SECRETS]


def flags(config: type, *arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, config)
    return vars(parser.parse_args(arguments))


def values(field: dataclasses.Field[Any]) -> list[tuple[str, Any]]:
    """Three settings of a field, as text and as they are meant."""
    if field.metadata["choices"]:
        return [(choice, choice) for choice in 3 * list(field.metadata["choices"])][:3]
    if field.name == "speculative_config":
        return [(text, text) for text in ('{"method": "mtp"}', '{"method": "ngram"}', '{"model": "small"}')]
    kind = str(field.type)
    if kind.startswith("bool"):
        return [("true", True), ("off", False), ("1", True)]
    if kind.startswith("int"):
        least = int(field.metadata["least"] or 0)
        return [(str(least + 3), least + 3), ("2KiB", 2048), (str(least + 7), least + 7)]
    if kind.startswith("float"):
        scale = 0.25 if field.metadata["most"] == 1 else 1.0
        return [(str(scale * value), scale * value) for value in (1.5, 2.0, 0.25)]
    if kind.startswith("tuple"):
        return [("one", ("one",)), ("two,three", ("two", "three")), ('["four"]', ("four",))]
    return [("one", "one"), ("two", "two"), ("three", "three")]


@pytest.mark.parametrize(("config", "field"), FIELDS, ids=IDS)
def test_flags_win_over_the_environment_and_that_over_the_file(config: type, field: dataclasses.Field[Any]) -> None:
    name = field.name
    (in_file, filed), (in_environment, environed), (in_flag, flagged) = values(field)
    file, environ = {name: in_file}, {f"MILLRACE_{name.upper()}": in_environment}
    given = {name: in_flag}
    assert getattr(build(config, {}, {}, {}), name) == field.default
    assert getattr(build(config, file, {}, {}), name) == filed
    assert getattr(build(config, file, environ, {}), name) == environed
    assert getattr(build(config, file, environ, given), name) == flagged
    assert getattr(build(config, {}, environ, given), name) == flagged


@pytest.mark.parametrize(("config", "field"), FIELDS, ids=IDS)
def test_every_field_is_a_flag(config: type, field: dataclasses.Field[Any]) -> None:
    flag = "--" + field.name.replace("_", "-")
    if str(field.type).startswith("bool"):
        assert build(config, {}, {}, flags(config, flag)) == config(**{field.name: True})
        assert build(config, {}, {}, flags(config, flag.replace("--", "--no-"))) == config(**{field.name: False})
        return
    for text, meant in values(field):
        assert build(config, {}, {}, flags(config, flag, text)) == config(**{field.name: meant})
    assert flags(config) == {}, "a flag not given stays out"


def test_no_name_means_two_things() -> None:
    everything = names(*CONFIGS)
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_does_not_change(config: type) -> None:
    made = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, names(config)[0], "x")


# ---- sizes and words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("4GiB", 4 << 30),
        ("4G", 4_000_000_000),
        ("4GB", 4_000_000_000),
        ("512 MiB", 512 << 20),
        (" 512mib ", 512 << 20),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        ("2t", 2_000_000_000_000),
        ("0.5k", 500),
        ("10B", 10),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 Gi B", "4PiB", "1e9", "4GiBs", "0x10", "nan", "1,5k", "4i"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@given(st.integers(0, 2**53))
def test_a_plain_number_is_itself(number: int) -> None:
    assert parse_bytes(str(number)) == number


def test_half_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError):
        build(EngineConfig, {}, {}, {"max_num_seqs": "1.5"})


@pytest.mark.parametrize(
    ("word", "meant"), [("1", True), ("TRUE", True), ("yes", True), ("on", True), ("0", False), ("No", False)]
)
def test_words_for_yes_and_no(word: str, meant: bool) -> None:
    assert build(EngineConfig, {}, {"MILLRACE_ENABLE_PREFIX_CACHING": word}, {}).enable_prefix_caching is meant


# ---- what cannot be meant ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (EngineConfig, "block_size", "many"),
        (EngineConfig, "block_size", 2.5),
        (EngineConfig, "block_size", True),
        (EngineConfig, "block_size", [16]),
        (EngineConfig, "enable_prefix_caching", "maybe"),
        (EngineConfig, "enable_prefix_caching", 2),
        (PlacementConfig, "queue_patience", "soon"),
        (PlacementConfig, "queue_patience", [1]),
        (HttpConfig, "host", 5),
        (LogConfig, "log_level", "loud"),
        (ModelConfig, "dtype", "float8"),
        (ClusterConfig, "grpc_port", ""),
    ],
)
@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_nonsense_is_refused_by_the_name_it_was_given_under(config: type, name: str, value: Any, source: str) -> None:
    label = {"file": name, "environment": f"MILLRACE_{name.upper()}", "flag": "--" + name.replace("_", "-")}[source]
    sources: list[dict[str, Any]] = [{}, {}, {}]
    sources[("file", "environment", "flag").index(source)] = {name if source != "environment" else label: value}
    with pytest.raises(ConfigError) as refused:
        build(config, *sources)
    assert refused.value.message.startswith(f"{label}: ") and refused.value.param == label


def test_yes_is_no_number_of_seconds() -> None:
    with pytest.raises(ConfigError):
        build(PlacementConfig, {"queue_patience": True}, {}, {})


IMPOSSIBLE: list[tuple[type, str, Any]] = [
    (EngineConfig, "block_size", 0),
    (EngineConfig, "max_num_batched_tokens", 0),
    (EngineConfig, "max_num_seqs", 0),
    (EngineConfig, "num_kv_blocks", -4),
    (EngineConfig, "threads", -1),
    (ModelConfig, "max_model_len", 0),
    (HttpConfig, "port", 70_000),
    (HttpConfig, "port", -1),
    (HttpConfig, "shutdown_timeout", -1.0),
    (PlacementConfig, "queue_patience", "nan"),
    (PlacementConfig, "heartbeat_interval", 0.0),
    (PlacementConfig, "heartbeat_timeout", -1.0),
]


def test_numbers_that_could_never_serve_are_refused() -> None:
    taken: list[object] = []
    for config, name, value in IMPOSSIBLE:
        try:
            taken.append(build(config, {name: value}, {}, {}))
        except ConfigError:
            continue
    assert taken == []


# ---- the file ------------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "millrace.toml"
    path.write_text(text)
    return path


def test_a_file_may_write_names_with_dashes_or_underscores(tmp_path: Path) -> None:
    path = write(tmp_path, 'max-num-seqs = 3\nkv_cache_memory = "1GiB"\nenable-prefix-caching = false\n')
    file = load_file(path, names(EngineConfig))
    made = build(EngineConfig, file, {}, {})
    assert (made.max_num_seqs, made.kv_cache_memory, made.enable_prefix_caching) == (3, 1 << 30, False)


def test_no_file_sets_nothing() -> None:
    assert load_file(None, ["a"]) == {}


@pytest.mark.parametrize("text", ["max_num_seq = 3", "[engine]\nmax_num_seqs = 3", "a-b = 1"])
def test_an_unknown_setting_is_named_with_the_known_ones(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="unknown setting") as refused:
        load_file(write(tmp_path, text), names(EngineConfig))
    assert "max_num_seqs" in refused.value.message and refused.value.param in ("max_num_seq", "engine", "a_b")


@pytest.mark.parametrize("text", ["max_num_seqs = ", "= 3", "max_num_seqs 3", "a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--config") as refused:
        load_file(write(tmp_path, text), names(EngineConfig))
    assert refused.value.param == "config"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(ConfigError, match="--config"):
            load_file(path, [])


# ---- secrets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "field"), SECRETS, ids=SECRET_IDS)
def test_a_secret_does_not_appear_in_the_help(config: type, field: dataclasses.Field[Any]) -> None:
    fresh = dataclasses.make_dataclass(
        "Fresh", [(field.name, str, dataclasses.field(default="hunter2", metadata=field.metadata))]
    )
    fresh.__doc__ = "One secret."  # or it would be the signature, default and all
    parser = argparse.ArgumentParser()
    add_flags(parser, fresh)
    assert "hunter2" not in parser.format_help() and field.name.replace("_", "-") in parser.format_help()


def test_other_defaults_do_appear() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, HttpConfig)
    assert "(default: 8000)" in parser.format_help()


@pytest.mark.parametrize(("config", "field"), SECRETS, ids=SECRET_IDS)
def test_a_secret_does_not_appear_in_a_configs_repr(config: type, field: dataclasses.Field[Any]) -> None:
    assert "hunter2" not in repr(config(**{field.name: "hunter2"}))


@pytest.mark.parametrize(("config", "field"), SECRETS, ids=SECRET_IDS)
def test_a_secret_does_not_appear_in_an_error(config: type, field: dataclasses.Field[Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        build(config, {field.name: 424242}, {}, {})
    assert "424242" not in refused.value.message
