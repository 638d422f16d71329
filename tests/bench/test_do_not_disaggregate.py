"""The plan is asked for the workload that is measured, and both answers are held against each other."""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson
import pytest

from bench.do_not_disaggregate import (
    FLEETS,
    check,
    comparison_options,
    judgement,
    make_parser,
    measured_goodput,
    mixture_of,
    planned_goodput,
    question,
    report,
)
from deploy import cli
from deploy.planner.asking import read_question
from deploy.planner.machines import AS_PROFILED
from deploy.planner.placements import InstanceShape
from tests.bench.test_simulated import PROFILE


def asked(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args(flags)


def test_the_plan_is_asked_for_what_is_measured(tmp_path: Path) -> None:
    mixture, profile, file = mixture_of(asked("--tpot-ms", "35")), tmp_path / "worker.json", tmp_path / "question.toml"
    profile.write_bytes(orjson.dumps(PROFILE))
    file.write_text(question(mixture, profile))
    found = read_question(cli.make_parser().parse_args(["plan", str(file)]))
    (kind,), (measured,) = found.load.traffic.classes, mixture.kinds
    assert kind.prompt is not None and kind.output is not None
    assert (kind.prompt.mean, kind.prompt.spread) == (measured.prompt_tokens, measured.spread)
    assert (kind.output.mean, kind.output.spread) == (measured.output_tokens, measured.spread)
    assert (kind.ttft_ms, kind.tpot_ms) == (measured.slo.ttft_ms, 35.0) and found.goal.share == 0.9
    assert found.machines.devices == 2 and found.machines.name == AS_PROFILED.name
    assert found.space.tp == (1,) and found.space.budgets == (512,)
    assert found.model.profile(found.machines, InstanceShape()).kv_tokens == PROFILE["kv_tokens"]


def test_both_fleets_have_two_workers() -> None:
    assert {name: sorted(fleet.workers()) for name, fleet in FLEETS.items()} == {
        "aggregated": ["mixed-0", "mixed-1"],
        "split": ["decode-0", "prefill-0"],
    }


def test_figures_are_held_against_each_other() -> None:
    planned = {
        "verdict": "Do not disaggregate: …",
        "ranked": [
            {"workers": {"mixed": 1}, "goodput": 3.0},
            {"workers": {"mixed": 2}, "goodput": 6.0},
            {"workers": {"prefill": 1, "decode": 1}, "goodput": 4.5},
        ],
    }
    ours = [
        {"name": "2 mixed", "crossing": 5.0, "goodput": 4.8, "failing": 6.0},
        {"name": "1 prefill + 1 decode", "crossing": None, "goodput": 4.0, "failing": 4.5},
    ]
    told = {"cases": [{"contenders": ours}]}
    assert planned_goodput(planned["ranked"], {"mixed": 2}) == 6.0  # type: ignore[arg-type]
    assert measured_goodput(told) == {"2 mixed": (5.0, True), "1 prefill + 1 decode": (4.0, True)}
    text = " ".join(report(planned, told, "Here.").split())
    assert "| split ÷ aggregated | 0.75 | 0.80 |" in text and "Both say that splitting does not pay here." in text
    ours[1]["failing"] = None
    text = report(planned, told, "Here.")
    assert measured_goodput({"cases": []}) == {} and "goes on" in report(planned, {"cases": []}, "Here.")
    assert "≥ 4" in text and "the same command goes on" in text and "Both say" not in text


@pytest.mark.parametrize(
    ("planned", "measured", "words"),
    [
        (0.8, 0.7, "Both say that splitting does not pay"),
        (1.3, 1.1, "Both say that splitting pays"),
        (0.8, 1.1, "They differ: planned, splitting does not pay; measured, it pays."),
        (0.8, 1.01, "They differ: planned, splitting does not pay; measured, it makes no difference."),
        (None, 0.9, "One side is missing"),
        (0.9, None, "One side is missing"),
    ],
)
def test_answers_agree_or_differ(planned: float | None, measured: float | None, words: str) -> None:
    assert words in judgement(planned, measured)


def test_flags_are_read_and_refused() -> None:
    assert comparison_options(asked(), 2.5, 5.0).start == 2.5
    options = comparison_options(asked("--rate", "3", "--seconds", "7"), 2.5, 5.0)
    assert (options.start, options.seconds, options.until) == (3.0, 7.0, 5.0) and "int8" in options.base
    for wrong in (("--tpot-ms", "0"), ("--spread", "2"), ("--minutes", "inf")):
        with pytest.raises(ValueError, match=wrong[0]):
            check(asked(*wrong))
