"""Service classes from a file: what is given changes or adds a class, and what cannot be meant is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.options import ConfigError
from serving.service_class import SERVICE_CLASSES, ServiceClass
from serving.service_config import (
    DAY,
    DAY_MS,
    MOST_CLASSES,
    check_default,
    parse_service_classes,
    read_service_classes,
)


def test_without_a_file_there_are_the_built_in_classes() -> None:
    assert read_service_classes(None) == SERVICE_CLASSES


def test_a_file_changes_fields_and_adds_classes(tmp_path: Path) -> None:
    path = tmp_path / "classes.toml"
    path.write_text(
        "[interactive]\nttft_slo_ms = 500\ntpot_slo_ms = 'none'\n"
        "[gold]\nttft_slo_ms = 300\ntpot_slo_ms = 25.5\nweight = 5\npriority = -200\nshed = true\nbacklog = 0.5\n"
    )
    classes = read_service_classes(str(path))
    built_in = SERVICE_CLASSES["interactive"]
    assert classes["interactive"] == ServiceClass(
        name="interactive", ttft_slo_ms=500.0, weight=built_in.weight, priority=built_in.priority, shed=True
    )
    assert classes["gold"] == ServiceClass(
        name="gold", ttft_slo_ms=300.0, tpot_slo_ms=25.5, weight=5.0, priority=-200, shed=True, backlog=0.5
    )
    assert classes["batch"] == SERVICE_CLASSES["batch"]
    assert "gold" not in SERVICE_CLASSES, "the built-in ones stay as they are"


def test_the_readmes_example_is_a_class() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    block = readme[readme.index("    [gold]") :].split("\n\n")[0]
    gold = parse_service_classes(dedent(block), "README.md")["gold"]
    assert (gold.ttft_slo_ms, gold.shed, gold.backlog) == (300.0, True, 0.5)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[gold]\nttft_slo_ms = 0", ["[gold] ttft_slo_ms", "more than 0"]),
        ("[gold]\nttft_slo_ms = inf", ["[gold] ttft_slo_ms"]),
        ("[gold]\ntpot_slo_ms = nan", ["[gold] tpot_slo_ms"]),
        ("[gold]\ntpot_slo_ms = 86400001", ["[gold] tpot_slo_ms", "at most"]),
        ("[gold]\ntpot_slo_ms = 'fast'", ["[gold] tpot_slo_ms", "'fast'"]),
        ("[gold]\nweight = 0", ["[gold] weight"]),
        ("[gold]\nweight = 'none'", ["[gold] weight"]),
        ("[gold]\npriority = 1.5", ["[gold] priority", "whole number"]),
        ("[gold]\npriority = true", ["[gold] priority"]),
        ("[gold]\npatience = -1", ["[gold] patience"]),
        ("[gold]\nshed = 1", ["[gold] shed", "true or false"]),
        ("[gold]\ndeadline = 1", ["[gold] deadline", "unknown", "backlog"]),
        ("[gold]\nname = 'silver'", ["[gold] name", "unknown"]),
        ("gold = 1", ["gold", "table"]),
        ("['a b']\n", ["'a b'", "name"]),
        ("[gold", ["classes.toml"]),
    ],
)
def test_errors_name_file_class_and_field(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_service_classes(text, "classes.toml")
    assert all(part in caught.value.message for part in ["classes.toml", *parts]), caught.value.message


def test_a_file_that_is_not_there_or_no_text_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--service-classes"):
        read_service_classes(str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="--service-classes"):
        read_service_classes(str(tmp_path / "bytes.toml"))


def test_there_are_not_too_many_classes() -> None:
    text = "".join(f"[c{number}]\n" for number in range(MOST_CLASSES))
    with pytest.raises(ConfigError, match=f"more than {MOST_CLASSES}"):
        parse_service_classes(text, "f")


def test_a_class_is_shed_or_degraded_and_not_both() -> None:
    assert parse_service_classes("[gold]\ndegrade = true", "f")["gold"].degrade
    interactive = parse_service_classes("[interactive]\ndegrade = true", "f")["interactive"]
    assert interactive.degrade and not interactive.shed, "the built-in class is shed unless told otherwise"
    for name in ("gold", "interactive"):
        with pytest.raises(ConfigError, match="to shed and to degrade") as refused:
            parse_service_classes(f"[{name}]\nshed = true\ndegrade = true", "f")
        assert refused.value.param == f"{name}.degrade"


def test_the_default_class_is_one_of_them() -> None:
    assert check_default("batch", SERVICE_CLASSES) == "batch"
    with pytest.raises(ConfigError, match="'gold' is none of interactive, standard, batch"):
        check_default("gold", SERVICE_CLASSES)


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(10**9), 10**9), st.floats(), st.booleans(), st.sampled_from(["none", "text"])
)
FIELDS = ("ttft_slo_ms", "tpot_slo_ms", "weight", "priority", "patience", "backlog", "shed", "degrade", "other")


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else repr(value)


@given(table=st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_a_class_that_is_taken_is_within_all_bounds(table: dict[str, Any]) -> None:
    """Any table gives a class that can be worked with, or a ConfigError: nothing else, and no field is dropped."""
    text = "[gold]\n" + "".join(f"{name} = {written(value)}\n" for name, value in table.items())
    try:
        gold = parse_service_classes(text, "f")["gold"]
    except ConfigError:
        return
    for objective in (gold.ttft_slo_ms, gold.tpot_slo_ms):
        assert objective is None or 0 < objective <= DAY_MS
    for seconds in (gold.patience, gold.backlog):
        assert seconds is None or 0 <= seconds <= DAY
    assert 0 < gold.weight < math.inf and isinstance(gold.priority, int)
    assert (gold.shed, gold.degrade) in ((False, False), (True, False), (False, True))
    for name, value in table.items():
        assert getattr(gold, name) == (None if value == "none" else value)


@given(text=st.text(max_size=80))
def test_any_text_is_classes_or_a_config_error(text: str) -> None:
    try:
        assert set(parse_service_classes(text, "f")) >= set(SERVICE_CLASSES)
    except ConfigError as error:
        assert error.message.startswith("f")
