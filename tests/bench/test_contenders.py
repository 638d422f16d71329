"""Contenders: their flags, their workers, and comparisons by name."""

from __future__ import annotations

import pytest

from bench.contenders import PRESETS, Contender, of_policies, parse_contender, parse_fleet, parse_peer
from serving.config import EngineConfig, PlacementConfig
from serving.options import names


def test_a_fleet_is_a_name_and_flags() -> None:
    assert parse_fleet("mixed=2") == ("mixed=2", ("--mixed", "2"))
    assert parse_fleet("auto:mixed=1,prefill=1,decode=1") == (
        "auto",
        ("--mixed", "1", "--prefill", "1", "--decode", "1"),
    )


@pytest.mark.parametrize("text", ["", "mixed", "mixed=0", "mixed=x", "auto=mixed=1", "kvcache=1"])
def test_a_fleet_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--fleet"):
        parse_fleet(text)


def test_a_contender_has_flags_or_an_address() -> None:
    ours, peer = parse_contender("a=--mixed 2 --decode 1 --x 'y z'"), parse_peer("vllm=http://127.0.0.1:8811")
    assert ours.flags == ("--mixed", "2", "--decode", "1", "--x", "y z")
    assert ours.workers() == ["mixed-0", "mixed-1", "decode-0"]
    assert (ours.ours, peer.ours, peer.url, peer.workers()) == (True, False, "http://127.0.0.1:8811", [])
    assert ours.identity == "a=--mixed 2 --decode 1 --x 'y z'" and peer.identity == "vllm=http://127.0.0.1:8811"
    for text in ("--mixed 2", "=--mixed 2", "-x=1"):
        with pytest.raises(ValueError, match="--contender"):
            parse_contender(text)
    with pytest.raises(ValueError, match="--url"):
        parse_peer("http://127.0.0.1/?x=1")


def test_every_policy_goes_with_every_fleet() -> None:
    fleets = [parse_fleet("mixed=2"), parse_fleet("auto:mixed=1,decode=1")]
    assert [one.name for one in of_policies(["goodput", "round_robin"], fleets)] == [
        "goodput@mixed=2",
        "round_robin@mixed=2",
        "goodput@auto",
        "round_robin@auto",
    ]
    assert [one.name for one in of_policies(["goodput"], fleets)] == ["mixed=2", "auto"]
    assert of_policies(["goodput"], fleets[:1]) == [
        Contender(name="goodput", flags=("--mixed", "2", "--routing-policy", "goodput"))
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_use_flags_that_there_are(preset: str) -> None:
    known = {"--" + name.replace("_", "-") for config in (EngineConfig, PlacementConfig) for name in names(config)}
    known |= {"--mixed", "--prefill", "--decode", "--service-classes"}
    contenders = PRESETS[preset]
    assert len({one.name for one in contenders}) == len(contenders) == len({one.flags for one in contenders})
    assert {flag for one in contenders for flag in one.flags if flag.startswith("--")} <= known
