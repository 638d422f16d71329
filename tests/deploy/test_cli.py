"""The command line: what parses to what, what a child is told, and how a mistake is answered: one line, exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import cli
from deploy.children import alike, child_specs, node_flags, node_specs, worker_flags
from deploy.cli import COMMANDS, check_counts, children_of, main, make_parser
from deploy.runtime.settings import CONFIGS, NODE_CONFIGS, Settings, check_heartbeats
from deploy.serve import router_config
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
from serving.messages import Role
from serving.options import build, names
from tests.deploy.conftest import Started

WORKERS = ("prefill", "decode", "mixed")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_model_and_all_settings(command: str, started: Started) -> None:
    assert main([command, "some/model", "--max-num-seqs", "3", "--port", "9000", "--queue-patience", "7"]) == 0
    made = started.settings
    assert (started.given["command"], made.model) == (command, "some/model")
    assert (made.engine.max_num_seqs, made.http.port, made.placement.queue_patience) == (3, 9000, 7.0)


def test_without_arguments_there_is_a_default_for_everything(started: Started) -> None:
    assert main(["serve"]) == 0
    made = started.settings
    assert made.model is None and made.engine == EngineConfig() and made.http == HttpConfig()
    assert made.model_config == ModelConfig() and made.placement == PlacementConfig()
    assert made.cluster == ClusterConfig() and made.pool == PoolConfig() and made.kvcache == KvCacheConfig()


def test_a_pool_node_reads_its_own_settings_and_a_file_of_everyones(started: Started, tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text("block-size = 8\ndisk-write = 'back'\nram = '1GiB'\n")
    assert main(["kvcache", "--config", str(path), "--ram", "4GiB", "--quota", "a=1MiB", "--parent", "7"]) == 0
    assert started.given["command"] == "kvcache" and started.given["parent"] == 7
    made = started.settings.kvcache
    assert (made.ram, made.disk_write, made.quota, made.disk) == (4 << 30, "back", "a=1MiB", None)


def test_the_environment_and_a_file_are_read(started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text("block-size = 8\nmax-num-seqs = 5\nport = 1\n")
    monkeypatch.setenv("MILLRACE_MAX_NUM_SEQS", "6")
    monkeypatch.setenv("MILLRACE_API_KEY", "secret")
    assert main(["serve", "--config", str(path), "--port", "2"]) == 0
    made = started.settings
    assert (made.engine.block_size, made.engine.max_num_seqs, made.http.port) == (8, 6, 2)
    assert made.http.api_key == "secret"


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"VLLM_API_KEY": "sk-1"}, "sk-1"),
        ({"VLLM_API_KEY": ""}, None),
        ({"VLLM_API_KEY": "a", "MILLRACE_API_KEY": "b"}, "b"),
    ],
)
def test_a_key_set_for_vllm_is_required(
    started: Started, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], key: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["serve"]) == 0
    assert started.settings.http.api_key == key


def test_a_list_is_words_after_a_flag_or_a_text_with_commas_or_an_array(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text("served-model-name = ['filed', 'twice']\nallowed-origins = 'http://a,http://b'\n")
    assert main(["serve", "--config", str(path)]) == 0
    assert started.settings.model_config.served_model_name == ("filed", "twice")
    assert started.settings.http.allowed_origins == ("http://a", "http://b")
    monkeypatch.setenv("MILLRACE_SERVED_MODEL_NAME", "environed, too")
    assert main(["serve", "--config", str(path), "--allowed-origins", '["*"]']) == 0
    assert started.settings.model_config.served_model_name == ("environed", "too")
    assert started.settings.http.allowed_origins == ("*",)
    assert main(["serve", "--served-model-name", "one", "two", "--api-key", "sk-1", "sk-2,sk-3"]) == 0
    assert started.settings.model_config.served_model_name == ("one", "two")
    assert started.settings.http.api_key == "sk-1,sk-2,sk-3"


MISTAKES = {
    "--allowed-origins": ["serve", "--allowed-origins", "[1]"],
    "--metrics-prefix": ["serve", "--metrics-prefix", "my app:"],
    "VLLM_API_KEY": ["serve"],
    "--block-size": ["serve", "--block-size", "many"],
    "MILLRACE_PORT": ["serve"],
    "--config": ["router", "--config", "/nowhere.toml"],
    "negative": ["serve", "--prefill", "-1"],
    "--decode": ["serve", "--prefill", "2"],
    "--prefill": ["serve", "--decode", "1"],
    "--kvcache": ["serve", "--kvcache", "-1"],
    "--disk-size": ["kvcache", "--disk-size", "plenty"],
    "--ram 0": ["kvcache", "--ram", "0"],
    "--quota": ["kvcache", "--quota", "1GiB"],
    "--nodes": ["cache", "stat"],
}


@pytest.mark.parametrize("named", MISTAKES)
def test_a_mistake_is_one_clear_line(
    named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda *_: None)
    if named == "VLLM_API_KEY":
        monkeypatch.setenv("VLLM_API_KEY", "sk-1,2")
    if named == "MILLRACE_PORT":
        monkeypatch.setenv("MILLRACE_PORT", "tcp://10.0.0.1:8000")  # what Kubernetes says of a service of this name
    assert main(MISTAKES[named]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("millrace: ") and err.count("\n") == 1 and named in err
    assert "Traceback" not in err


def test_an_unknown_setting_in_the_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text("max-num-sequences = 5\n")
    assert main(["serve", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert "unknown setting 'max_num_sequences'" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["serve", "--no-such-flag"], ["serve", "--dtype", "float8"], ["prefill", "--prefill", "1"]],
    ids=str,
)
def test_what_does_not_parse_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and "usage: millrace" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_names_every_setting_and_no_key(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_API_KEY", "hunter2")
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and "hunter2" not in text and "--parent" not in text
    assert [name for name in names(*CONFIGS) if "--" + name.replace("_", "-") not in text] == []


# ---- numbers of workers --------------------------------------------------------------------------------------------

COUNT = st.integers(-1, 3)


@given(st.dictionaries(st.sampled_from(Role), COUNT.filter(bool)))
def test_only_numbers_that_could_serve_pass(counts: dict[Role, int]) -> None:
    mixed, prefill, decode = (counts.get(role, 0) for role in (Role.MIXED, Role.PREFILL, Role.DECODE))
    serves = min([0, *counts.values()]) == 0 and (not counts or bool(mixed) or (prefill > 0 and decode > 0))
    if serves:
        check_counts(counts)
    else:
        with pytest.raises(ValueError, match=r"needs --|negative"):
            check_counts(counts)


def counts(**given: int) -> dict[str, int]:
    return {**dict.fromkeys((*Role, "kvcache"), 0), **given}


def test_a_pool_without_workers_brings_a_mixed_one() -> None:
    assert children_of(counts()) == {}
    assert children_of(counts(kvcache=2)) == {Role.MIXED: 1}
    assert children_of(counts(kvcache=1, prefill=1, decode=2)) == {Role.PREFILL: 1, Role.DECODE: 2}


# ---- what a child is told ------------------------------------------------------------------------------------------

WORD = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=8).filter(str.strip)
DRAFTS = st.none() | WORD.map(lambda word: json.dumps({"model": word, "num_speculative_tokens": 3}))


def drawn(config: type, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any config of this class, by the types of its fields."""
    strategies: dict[str, st.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(config):
        kind = str(field.type)
        least, most = field.metadata["least"] or 0, field.metadata["most"]
        base: st.SearchStrategy[Any] = st.booleans()
        if kind.startswith("int"):
            base = st.integers(int(least), int(most or 2**40))
        if kind.startswith("float"):
            base = st.floats(least, most or 1e6)
        if kind.startswith("tuple"):
            base = st.lists(WORD.filter(lambda word: not set(word) & {",", "["} and word == word.strip())).map(tuple)
        if kind.startswith("str"):
            base = st.sampled_from(field.metadata["choices"]) if field.metadata["choices"] else WORD
        strategies[field.name] = base | st.none() if "None" in kind else base
    return st.builds(config, **{**strategies, **special})


def settings_of(**groups: Any) -> Settings:
    """These groups of settings; the others as they are by default."""
    defaults = {
        "model_config": ModelConfig(),
        "engine": EngineConfig(),
        "http": HttpConfig(),
        "placement": PlacementConfig(),
        "cluster": ClusterConfig(),
        "pool": PoolConfig(),
        "kvcache": KvCacheConfig(),
    }
    return Settings(model=None, **{**defaults, **groups})


PARSER = make_parser()


def as_a_child(flags: list[str], config: type, command: tuple[str, ...] = ("decode", "model")) -> Any:
    given, known = vars(PARSER.parse_args([*command, *flags])), names(config)
    return build(config, {}, {}, {key: value for key, value in given.items() if key in known})


@settings(max_examples=40)
@given(
    drawn(ModelConfig),
    drawn(EngineConfig, profile=st.none() | WORD.filter(lambda word: word[0] != "-"), speculative_config=DRAFTS),
    drawn(HttpConfig, metrics_prefix=st.sampled_from(("millrace", "vllm"))),
    drawn(PlacementConfig),
    drawn(PoolConfig),
    drawn(KvCacheConfig),
    drawn(LogConfig),
)
def test_a_childs_flags_say_what_its_parent_was_told(
    model: ModelConfig,
    engine: EngineConfig,
    http: HttpConfig,
    placement: PlacementConfig,
    pool: PoolConfig,
    kvcache: KvCacheConfig,
    logs: LogConfig,
) -> None:
    model = dataclasses.replace(model, device="cpu")
    groups = {"engine": engine, "http": http, "placement": placement, "pool": pool, "kvcache": kvcache, "logs": logs}
    made = settings_of(model_config=model, **groups)
    flags = worker_flags(made)
    assert as_a_child(flags, LogConfig) == as_a_child(node_flags(made), LogConfig, ("kvcache",)) == logs
    assert as_a_child(flags, PoolConfig) == pool
    own_folder = dataclasses.replace(kvcache, disk=None)
    assert as_a_child(node_flags(made), KvCacheConfig, ("kvcache",)) == own_folder
    assert as_a_child(flags, ModelConfig) == model
    own = dataclasses.replace(engine, threads=None, cpus=None)  # each child is given its share
    assert as_a_child(flags, EngineConfig) == own
    assert as_a_child(flags, HttpConfig).shutdown_timeout == http.shutdown_timeout
    beats = as_a_child(flags, PlacementConfig)
    assert beats.heartbeat_interval == placement.heartbeat_interval
    assert beats.heartbeat_timeout == placement.heartbeat_timeout


@pytest.mark.parametrize(("interval", "timeout"), [("3", "5"), ("1", "2"), ("5", "5")])
def test_intervals_that_one_late_heartbeat_would_break_are_refused_with_what_to_do(
    interval: str, timeout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", "model", "--heartbeat-interval", interval, "--heartbeat-timeout", timeout]) == 2
    told = capsys.readouterr().err
    assert "--heartbeat-timeout" in told and f"above {2 * float(interval):g} s" in told
    check_heartbeats(PlacementConfig(heartbeat_interval=3.0, heartbeat_timeout=10.0))


def test_a_childs_flags_hold_no_secret() -> None:
    made = settings_of(http=HttpConfig(api_key="hunter2"), cluster=ClusterConfig(cluster_key="hunter2"))
    assert "hunter2" not in " ".join(worker_flags(made)), "a command line can be read by everyone on the host"


def test_a_name_may_begin_with_a_dash() -> None:
    made = settings_of(model_config=ModelConfig(served_model_name=("-tiny", "small")))
    try:
        assert as_a_child(worker_flags(made), ModelConfig).served_model_name == ("-tiny", "small")
    except SystemExit:
        pytest.fail("the child cannot read its flags")


def test_every_child_is_named_told_its_router_and_given_its_share() -> None:
    made = settings_of(model_config=ModelConfig(dtype="float32"), engine=EngineConfig(threads=3))
    specs = child_specs(Path("model"), alike({Role.PREFILL: 2, Role.DECODE: 1}, 0, made).workers, "127.0.0.1:7")
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0"]
    for spec in specs:
        given = make_parser().parse_args(spec.arguments)
        assert given.command == spec.name.partition("-")[0] and given.model == "model"
        assert (given.routers, given.worker_name, given.parent) == ("127.0.0.1:7", spec.name, os.getpid())
        assert (given.threads, given.dtype) == ("3", "float32")


def test_every_pool_node_has_a_name_and_a_folder_of_its_own() -> None:
    made = settings_of(kvcache=KvCacheConfig(ram=7, disk="/blocks"))
    specs = node_specs(2, "127.0.0.1:7", made)
    assert [spec.name for spec in specs] == ["kvcache-0", "kvcache-1"]
    for spec in specs:
        given = make_parser().parse_args(spec.arguments)
        assert (given.command, given.ram, given.disk) == ("kvcache", "7", f"/blocks/{spec.name}")
        assert (given.routers, given.worker_name, given.parent) == ("127.0.0.1:7", spec.name, os.getpid())


def test_the_help_of_a_pool_node_names_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kvcache", "--help"])
    text = capsys.readouterr().out
    assert [name for name in names(*NODE_CONFIGS) if "--" + name.replace("_", "-") not in text] == []


def test_a_pool_node_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from deploy.cli import main; main(['kvcache', '--ram', '0']); sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "--ram 0" in ended.stderr


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    """As in `millrace cache ls | head`, where the output may break while it is written or when it is flushed."""
    command = "import sys; from deploy import cache, cli; cache.run = {}; sys.exit(cli.main(['cache', 'ls']))"
    for work in ("lambda _: print(1)", "lambda _: print('x' * 1000000)"):
        reader, writer = os.pipe()
        os.close(reader)
        ended = subprocess.run(
            [sys.executable, "-c", command.format(work)], stdout=writer, stderr=subprocess.PIPE, check=False
        )
        os.close(writer)
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_service_classes_and_limits_reach_router_and_api(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text("[gold]\nttft_slo_ms = 300\n")
    flags = ["--service-classes", str(file), "--default-service-class", "gold", "--strict-disaggregation"]
    assert main(["router", *flags, "--rate-limit-requests", "60", "--api-key", "a,b"]) == 0
    settings = started.settings
    config = router_config(settings)
    assert config.classes["gold"].ttft_slo_ms == 300.0 and "standard" in config.classes
    assert (config.default_class, config.strict_disaggregation) == ("gold", True)
    assert (settings.service.rate_limit_requests, settings.service.rate_limit_tokens) == (60, None)


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("[gold]\nttft_slo_ms = -1", [], "[gold] ttft_slo_ms"),
        ("[gold]\n", ["--default-service-class", "silver"], "'silver' is none of"),
    ],
)
def test_a_mistake_in_classes_is_one_line(
    text: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(text)
    assert main(["serve", "--service-classes", str(file), *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_one_process_cannot_be_strictly_disaggregated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda *_: None)
    assert main(["serve", "--strict-disaggregation"]) == 2
    assert "--strict-disaggregation needs workers apart" in capsys.readouterr().err


def test_a_pipe_of_another_kind_is_told_of() -> None:
    """Before: a server whose child could not begin left without a word, as if nobody read its output."""
    code = (
        "import sys\nfrom deploy import cli, explain\n"
        "def broken(parsed): raise BrokenPipeError(32, 'Broken pipe')\n"
        "explain.run = broken\nsys.exit(cli.main(['explain', 'a']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, b"millrace: [Errno 32] Broken pipe\n")
