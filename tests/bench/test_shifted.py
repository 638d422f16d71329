"""Traffic that shifts: what its loads ask of a fleet, when it shows a recovery, and what is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.shifted import (
    ANSWERS,
    AUTOSCALED,
    FIXED,
    KINDS,
    PACE,
    PROMPTS,
    RIGHT,
    ShiftedTraffic,
    answers_a_second,
    drawing,
    markdown,
    phases,
    prompts_a_second,
    verdict,
)
from bench.sse import Outcome
from bench.surge import Arrived

FLEET = {"prefill": 2, "decode": 1}
SPANS = phases(100.0, FLEET, 0.65)


def test_each_phase_fits_the_fleet_it_is_for_and_is_too_much_for_one_worker_fewer() -> None:
    first, second = SPANS
    prompts = first.rates[PROMPTS.name] / prompts_a_second(PROMPTS)
    answers = second.rates[ANSWERS.name] / answers_a_second(ANSWERS)
    assert 1.2 < prompts < 1.5 and 1.2 < answers < 1.5
    also = second.rates[PROMPTS.name] / prompts_a_second(PROMPTS) + second.rates[ANSWERS.name] / prompts_a_second(
        ANSWERS
    )
    assert also < 0.6, "one prefill worker is enough for the second phase"
    assert first.rates[ANSWERS.name] / answers_a_second(ANSWERS) < 0.3
    step = PACE.chunk_seconds(0, 512)
    assert all(kind.slo.ttft_ms is not None and kind.slo.ttft_ms > 3e3 * step for kind in KINDS), "a step is waited for"


def one(at: float, *, met: bool = True, error: str | None = None) -> Arrived:
    last = 1.0 if met else 100.0
    outcome = Outcome(prompt_tokens=48, max_tokens=160, kind=ANSWERS.name, scheduled=at, error=error)
    if error is None:
        outcome.first, outcome.last, outcome.chunks = 0.5, last, 160
    return Arrived(at, outcome)


def traffic(name: str, before: float, end: float, *, flips: int = 0, error: str | None = None) -> ShiftedTraffic:
    """A run of which these shares attained, and one request that ended so."""
    spans = SPANS if name != RIGHT else SPANS[-1:]
    shift = 30.0 if name != RIGHT else 0.0
    run = ShiftedTraffic(name=name, spans=spans, flips=flips, roles=[(1.0, {"prefill": 2, "decode": 1, "mixed": 0})])
    run.arrived = [one(shift * number / 20, met=number < 20 * before) for number in range(20) if shift]
    run.arrived += [one(shift + 69.0 - number, met=number < 20 * end) for number in range(20)]
    run.arrived += [one(0.0, error=error)] if error else []
    return run


def runs(before: float = 1.0, end: float = 1.0, fixed: float = 0.2, right: float = 1.0) -> list[ShiftedTraffic]:
    return [traffic(AUTOSCALED, before, end, flips=1), traffic(FIXED, before, fixed), traffic(RIGHT, before, right)]


def test_runs_that_show_a_recovery_leave_nothing_to_say() -> None:
    found = verdict(runs())
    assert found.complaints == [] and found.flips == 1 and found.before[RIGHT] is None
    assert verdict(runs(end=0.95, right=1.0)).complaints == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (runs(before=0.8), "80% attained before the shift: the load is too high"),
        (runs(right=0.7), "70% attained with the right roles from the start: the load is too high"),
        (runs(fixed=0.95), "95% attained without a flip: the load is too low to need one"),
        (runs(end=0.5), "50% attained at the end, after the flip"),
        ([traffic(AUTOSCALED, 1.0, 1.0)], "no worker flipped"),
        ([traffic(AUTOSCALED, 1.0, 1.0, flips=1, error="cut short")], "1 requests failed"),
    ],
)
def test_what_they_do_not_show_is_said(wrong: Sequence[ShiftedTraffic], why: str) -> None:
    assert why in verdict(wrong).complaints
    assert why in markdown(wrong, "Title.")


def test_what_was_refused_has_not_failed_and_both_have_missed() -> None:
    run = traffic(AUTOSCALED, 1.0, 1.0, flips=1, error="HTTP 429")
    assert (run.refused, run.failed) == (1, 0)
    assert run.attained(0.0, 1.0) == pytest.approx(1 / 2)


def test_the_picture_has_a_curve_for_each_run_and_the_reference_begins_at_the_shift() -> None:
    found = runs()
    found[2].begins = 30.0
    text = drawing(found, "A shift")
    assert text.count("<polyline") == 5 and all(f"{run.name}: " in text for run in found)
    first = next(line for line in text.split("<title>") if line.startswith(RIGHT))
    assert float(first.split(" at ")[1].split("<")[0]) > 30.0
