"""Replays of recorded systems: real traces where they are present, and what may be said of any of them."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy.simulator.outcomes import OutcomeColumns, RateFigures, figures
from deploy.simulator.profiles import PROFILES
from deploy.simulator.recorded_replay import replay
from deploy.simulator.recorded_systems import SYSTEMS, ColocatedSystem, RecordedSystem, SplitSystem
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.trace_files import TracedRequest, as_arrivals, natural_rate, read_trace
from deploy.simulator.traffic import Arrival, Lengths, Traffic, TrafficClass, trace
from serving.messages import Slo
from tests.house.source import ROOT

SHARED = Path(os.environ.get("MILLRACE_SHARED", ROOT.parent / "shared"))
TRACES = SHARED / "data" / "a100-opt13b-sharegpt"
SLO = Slo(ttft_ms=250.0, tpot_ms=100.0)
WITHIN = {"distserve-c21d11": 3.0, "distserve-c21d12": 6.0, "vllm-tp1": 6.0}  # points of attainment, on average
PLAIN = replace(PROFILES["a100-opt13b"], max_num_batched_tokens=8192)
TIGHT = replace(PLAIN, kv_tokens=2400)
BUSY = Traffic(
    name="busy", classes=(TrafficClass(prompt=Lengths(200, 0.8, most=600), output=Lengths(60, 0.8, most=99)),)
)
SMALL = {
    "split": SplitSystem(PLAIN, TIGHT, handling=1e-4, move_seconds=1e-3, waiting_share=0.1),
    "split in two stages": SplitSystem(PLAIN, TIGHT, stages=2, handling=1e-3, move_seconds=1e-3),
    "colocated": ColocatedSystem(TIGHT, spare=0.01),
}


def recorded(pattern: str) -> list[Path]:
    return sorted(TRACES.glob(pattern))


def system_of(path: Path) -> str:
    return next((name for name in SYSTEMS if path.name.startswith(name)), "vllm-tp1")


def compared(path: Path) -> tuple[float, list[float]]:
    """By how many points the simulated attainment differs, and the ratios of the p90s of TTFT and TPOT."""
    traced = read_trace(path)
    found = replayed(SYSTEMS[system_of(path)], traced)
    ttft, tpot = (np.array([getattr(each, name) for each in traced]) for name in ("ttft_ms", "tpot_ms"))
    attained = float(np.mean((ttft <= 250.0) & (tpot <= 100.0)))
    ratios = [found.ttft_p90 / float(np.quantile(ttft, 0.9)), found.tpot_p90 / float(np.quantile(tpot, 0.9))]
    return 100 * (found.attainment - attained), ratios


def replayed(system: RecordedSystem, traced: list[TracedRequest]) -> RateFigures:
    rate = natural_rate(traced)
    return figures(rate, [OutcomeColumns(replay(system, as_arrivals(traced, SLO), rate).outcomes)])


@pytest.mark.skipif(not recorded("*.csv"), reason="the recorded traces are not here (MILLRACE_SHARED)")
@pytest.mark.parametrize("name", ["distserve-c21d11-300-9", "distserve-c21d12-400-4", "vllm-300-3"])
def test_a_recorded_run_is_met(name: str) -> None:
    """Two of them with tails that come from full KV."""
    points, ratios = compared(TRACES / f"{name}.csv")
    assert abs(points) <= WITHIN[system_of(TRACES / name)]
    assert ratios == pytest.approx([1.0, 1.0], rel=0.25)


@pytest.mark.slow
@pytest.mark.skipif(not recorded("*.csv"), reason="the recorded traces are not here (MILLRACE_SHARED)")
@pytest.mark.parametrize("system", SYSTEMS)
def test_all_recorded_runs_of_a_system_are_met(system: str) -> None:
    found = [compared(path) for path in recorded("*.csv") if system_of(path) == system]
    assert sum(abs(points) for points, _ in found) / len(found) <= WITHIN[system]
    assert all(ratios == pytest.approx([1.0, 1.0], rel=0.25) for _, ratios in found)


def busy(requests: int = 40) -> tuple[Arrival, ...]:
    return trace(BUSY, PLAIN, requests, 1)


@pytest.mark.parametrize("name", SMALL)
def test_every_request_gets_its_text_though_kv_runs_out(name: str) -> None:
    """Some give way and come back: their texts are those of undisturbed runs."""
    arrivals = busy()
    outcomes = replay(SMALL[name], arrivals, 20.0).outcomes
    texts = ScriptedTexts({each.request.request_id: each.output_tokens for each in arrivals})
    assert [outcome.tokens for outcome in outcomes] == [texts.written_out(each.request) for each in arrivals]


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_times(name: str) -> None:
    def times(seed: int) -> list[float | None]:
        return [each.last_token for each in replay(SMALL[name], busy(), 20.0, seed=seed, noise=0.05).outcomes]

    assert times(3) == times(3) != times(4)


def test_a_finished_prompt_waits_where_it_is() -> None:
    """First tokens do not wait for room to decode; the tokens after them do."""
    tight, roomy = (replay(replace(SMALL["split"], decode=each), busy(), 20.0).outcomes for each in (TIGHT, PLAIN))  # type: ignore[type-var]
    assert [each.first_token for each in tight] == [each.first_token for each in roomy]
    waited = [(a.tpot or 0.0) / (b.tpot or math.inf) for a, b in zip(tight, roomy, strict=True)]
    assert max(waited) > 3


def test_prompts_wait_where_nothing_can_be_handed_over() -> None:
    """A prefill engine full of finished prompts begins no other."""
    full = replace(SMALL["split"], prefill=replace(PLAIN, kv_tokens=2400))  # type: ignore[type-var]
    roomy = replay(SMALL["split"], busy(), 20.0).outcomes
    assert max(each.ttft or 0.0 for each in replay(full, busy(), 20.0).outcomes) > 2 * max(
        each.ttft or 0.0 for each in roomy
    )


def test_colocated_steps_never_mix() -> None:
    """A prompt that comes while another request decodes makes that wait for just the prompt's step."""
    long, short = (
        trace(Traffic(name="one", classes=(TrafficClass(prompt=Lengths(500), output=Lengths(count)),)), PLAIN, 1, count)
        for count in (40, 1)
    )
    outcomes = replay(ColocatedSystem(PLAIN), [long[0], replace(short[0], at=0.5)]).outcomes
    took = (outcomes[0].last_token or 0.0) - (outcomes[0].first_token or 0.0)
    alone = sum(PLAIN.decode_seconds(1, 501 + number) for number in range(39))
    assert took == pytest.approx(alone + PLAIN.prompt_seconds(500), abs=1e-6)
