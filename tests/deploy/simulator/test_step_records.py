"""Steps that vary as a worker's did: read from its trace, repeated in spells, and nearer to it than its fit alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deploy.simulator import cluster as simulated_cluster
from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.profiles import Fitted, Profile
from deploy.simulator.run import simulate
from deploy.simulator.step_records import (
    FEWEST_BESIDE,
    FEWEST_STEPS,
    Noise,
    RecordedNoise,
    VariedStep,
    beside_each_other,
    read_steps,
)
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass, arriving
from serving.engine.plan import StepRecord
from serving.engine.step_meter import StepMeter
from serving.engine.tracing import TraceWriter
from serving.messages import Role
from serving.step_cost import StepCost, StepLoad

COST = StepCost(fixed=11e-3, token=9e-4, pair=3e-7, sequence=2.5e-4, context=1e-6, error=0.1, samples=500)
PROFILE = Profile(name="irregular", model="irregular", steps=Fitted(COST), kv_tokens=16_384, kv_bytes=23_040, layers=30)
CHATS = Traffic(
    name="chats",
    classes=(TrafficClass(prompt=Lengths(256, 0.3), output=Lengths(64, 0.3)),),
)


def record(load: StepLoad, seconds: float, prompt_tokens: int) -> StepRecord:
    return StepRecord(
        began=1.0,
        load=load,
        prompt_tokens=prompt_tokens,
        schedule_seconds=0.0,
        batch_seconds=0.0,
        forward_seconds=seconds,
        sample_seconds=0.0,
        step_seconds=seconds,
        cadence_seconds=seconds,
    )


def traced(path: Path, steps: list[StepRecord]) -> Path:
    trace = TraceWriter(path, "mixed-0")
    for step in steps:
        trace.step(step)
    trace.close()
    return path


def test_what_a_worker_traces_is_read_as_multiples_of_its_cost(tmp_path: Path) -> None:
    loads = [StepLoad.of(0, 200 + n) if n % 3 == 0 else StepLoad(2, 600.0, 2, 600.0) for n in range(FEWEST_STEPS)]
    steps = [
        record(load, (1 + n % 5) * COST.seconds(load), load.new_tokens if n % 3 == 0 else 0)
        for n, load in enumerate(loads)
    ]
    found = read_steps(traced(tmp_path / "steps.json", steps), COST)
    assert [step.ratio for step in found] == pytest.approx([1 + n % 5 for n in range(FEWEST_STEPS)], rel=1e-3)
    assert [step.prompts for step in found] == [n % 3 == 0 for n in range(FEWEST_STEPS)]
    assert all(step.began == pytest.approx(1.0) for step in found)
    lasted = [step.ended - step.began for step in found]
    assert lasted == pytest.approx([each.step_seconds for each in steps], rel=1e-3)


def told(**args: object) -> str:
    known: dict[str, object] = dict.fromkeys(
        ("new_tokens", "sequences", "prompt_tokens", "context_tokens", "pairs", "cadence_us"), 1
    )
    return json.dumps({"name": "step", "args": known | args}) + ","


def timed(**times: object) -> str:
    return json.dumps({**json.loads(told()[:-1]), **times}) + ","


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["not a trace"] * 100,
        ['{"name": "step", "args": {"new_tokens": 1}},'] * 100,
        ['{"name": "step", "args": 3},'] * 100,
        *([told(**args)] * 100 for args in ({"cadence_us": -1}, {"cadence_us": 1e200}, {"cadence_us": math.nan})),
        *([told(**args)] * 100 for args in ({"new_tokens": -100}, {"sequences": 0}, {"prompt_tokens": "many"})),
        *([told(**args)] * 100 for args in ({"pairs": math.nan}, {"pairs": -1e9}, {"context_tokens": math.inf})),
        *([timed(**at)] * 100 for at in ({"ts": math.nan}, {"ts": "now"}, {"ts": None}, {"dur": -1}, {"dur": 1e300})),
    ],
)
def test_what_is_no_trace_of_steps_is_refused(lines: list[str], tmp_path: Path) -> None:
    """Before: one step of 1e200 s, or of NaN pairs, and the simulation never came to its end."""
    (tmp_path / "steps.json").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"steps\.json"):
        read_steps(tmp_path / "steps.json", COST)


def test_a_cost_that_says_next_to_nothing_of_a_step_is_not_that_workers(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text("\n".join([told(cadence_us=6000)] * 100))
    with pytest.raises(ValueError, match=r"steps\.json"):
        read_steps(tmp_path / "steps.json", StepCost(fixed=0.0, token=1e-11))


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 6000, "\x00", told(new_tokens=0)], ids=lambda line: line[:9])
def test_lines_that_are_no_step_are_passed_over(line: str, tmp_path: Path) -> None:
    """A step that only left the barrier computed nothing; before, without a fixed time, it lasted 1e9 times as long."""
    (tmp_path / "steps.json").write_text("\n".join([line] + [told()] * FEWEST_STEPS))
    assert len(read_steps(tmp_path / "steps.json", COST)) == FEWEST_STEPS


def test_workers_with_the_same_steps_keep_them_once() -> None:
    """Before: 300 workers with 100,000 steps each took 1.5 GB for where which steps are."""
    steps = tuple(VariedStep(1.0 + n, n % 3 == 0) for n in range(20_000))
    plan = ClusterPlan.of(PROFILE, (Role.MIXED,) * 20, "least_loaded", steps_of={Role.MIXED: steps})

    async def kept() -> int:
        cluster = SimulatedCluster(plan, ScriptedTexts({}), 0)
        tracemalloc.start()
        try:
            noises = [cluster._noise(Role.MIXED, seed, str(seed)) for seed in range(20)]
            return tracemalloc.get_traced_memory()[0] // len(noises)
        finally:
            tracemalloc.stop()

    assert asyncio.run(kept()) < 10_000


@given(
    ratios=st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=300),
    asked=st.lists(st.booleans(), max_size=300),
    seed=st.integers(0, 1 << 16),
)
def test_every_draw_is_a_recorded_step_of_its_kind(
    ratios: list[tuple[int, bool]], asked: list[bool], seed: int
) -> None:
    steps = [VariedStep(float(ratio), prompts) for ratio, prompts in ratios]
    one, other = RecordedNoise(steps, seed), RecordedNoise(steps, 0).again(seed)
    for prompts in asked:
        drawn = one(prompts)
        assert drawn == other(prompts), "one seed gives one run"
        assert drawn in ({step.ratio for step in steps if step.prompts is prompts} or {1.0})


def test_in_the_long_run_each_recorded_step_comes_as_often_as_any_other() -> None:
    noise = RecordedNoise([VariedStep(float(n), False) for n in range(50)], 3)
    drawn = np.bincount([int(noise(False)) for _ in range(50_000)], minlength=50)
    assert drawn.min() > 800 and drawn.max() < 1200


def test_a_slow_spell_stays_one() -> None:
    """Steps 0 to 199 are quick and 200 to 399 slow: what follows a slow step is nearly always slow."""
    noise = RecordedNoise([VariedStep(3.0 if n >= 200 else 1.0, n % 4 == 0) for n in range(400)], 5)
    drawn = [noise(n % 4 == 0) for n in range(8000)]
    followed = [after for before, after in pairwise(drawn) if before == 3.0]
    assert np.mean([after == 3.0 for after in followed]) > 0.95
    assert 0.3 < np.mean([each == 3.0 for each in drawn]) < 0.7


# ---- workers on the same cores ------------------------------------------------------------------------------------

RUNS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8)), max_size=40)


@given(prefill=RUNS, decode=RUNS)
def test_a_step_is_beside_another_workers_that_had_not_ended_when_it_began(
    prefill: list[tuple[int, int]], decode: list[tuple[int, int]]
) -> None:
    recorded = {
        role: [VariedStep(1.0, True, float(at), float(at + lasted)) for at, lasted in runs]
        for role, runs in ((Role.PREFILL, prefill), (Role.DECODE, decode))
    }
    found = beside_each_other(recorded)
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        assert [step.ratio for step in found[role]] == [1.0] * len(recorded[role])
        for step in found[role]:
            among = [each for each in recorded[other] if each.began <= step.began < each.ended]
            at_once = [each for each in recorded[other] if each.began == step.began]  # either may be called the first
            assert step.beside == bool(among) or at_once
    (alone,) = beside_each_other({Role.MIXED: recorded[Role.PREFILL]}).values()
    assert not any(step.beside for step in alone)


def test_a_step_beside_another_worker_takes_as_long_as_such_steps_took() -> None:
    steps = [VariedStep(2.0 if n % 4 else 1.0, True, beside=n % 4 > 0) for n in range(100)]
    others = True
    noise = RecordedNoise(steps, 1).again(2, lambda: others)
    assert {noise(True) for _ in range(200)} == {2.0}
    others = False
    assert {noise(True) for _ in range(200)} == {1.0}
    assert noise(False) == 1.0, "a kind that was not recorded"


@pytest.mark.parametrize("others", [True, False])
def test_too_few_steps_beside_another_worker_say_nothing_of_their_own(others: bool) -> None:
    steps = [VariedStep(2.0 if n < FEWEST_BESIDE - 1 else 1.0, True, beside=n < FEWEST_BESIDE - 1) for n in range(100)]
    noise = RecordedNoise(steps, 1).again(2, lambda: others)
    assert {noise(True) for _ in range(2000)} == {1.0, 2.0}


def test_simulated_workers_slow_each_other_down_as_recorded_ones_did() -> None:
    """A prompt that comes while another worker decodes takes twice as long as one that comes alone."""
    steps = tuple(
        VariedStep(2.0 if beside else 1.0, kind, beside=beside) for kind in (True, False) for beside in (True, False)
    )
    steps_of = dict.fromkeys((Role.PREFILL, Role.DECODE), steps * FEWEST_BESIDE)
    plan = ClusterPlan.of(PROFILE, (Role.PREFILL, Role.DECODE), "least_loaded", noise=0.0)
    lone = Traffic(name="lone", classes=(TrafficClass(prompt=Lengths(256, 0.0), output=Lengths(64, 0.0)),))

    def ttfts(plan: ClusterPlan, rate: float) -> list[float]:
        return [each.ttft for each in simulate(plan, arriving(lone, PROFILE, 12, 3), rate, seed=1).outcomes]

    apart, busy = 0.02, 1.5
    recorded = dataclasses.replace(plan, steps_of=steps_of)
    assert ttfts(recorded, apart) == pytest.approx(ttfts(plan, apart), rel=1e-6)
    slower = np.array(ttfts(recorded, busy)) / np.array(ttfts(plan, busy))
    assert slower.min() > 1 - 1e-6 and slower[0] == pytest.approx(1.0), "the first comes alone"
    assert (slower > 1.7).sum() >= 4, "these came while a text was decoded"


# ---- a machine whose cores are taken now and then ---------------------------------------------------------------


def slow_spells(seed: int) -> Noise:
    """Of four virtual seconds one in the mean, in which steps last three times as long."""
    chance, clock = random.Random(seed), asyncio.get_running_loop().time
    slow, until = False, chance.expovariate(1 / 3.0)

    def draw(prompts: bool) -> float:
        nonlocal slow, until
        while clock() > until:
            slow = not slow
            until += chance.expovariate(1.0 if slow else 1 / 3.0)
        return chance.lognormvariate(0.0, 0.08) * (3.0 if slow else 1.0)

    return draw


def slow_steps(seed: int) -> Noise:
    """Of five steps one in the mean lasts three times as long."""
    chance = random.Random(seed)
    return lambda prompts: chance.lognormvariate(0.0, 0.08) * (3.0 if chance.random() < 0.2 else 1.0)


def play(plan: ClusterPlan, seed: int, looks: list[StepCost] | None = None) -> list[RequestOutcome]:
    """The same requests in each run, with the same objectives: these do not depend on what the worker's fit says."""

    async def look(cluster: SimulatedCluster) -> None:
        (worker,) = cluster.workers.values()
        while looks is not None:
            await asyncio.sleep(2.0)
            looks.append(worker.status().step_cost or COST)

    return simulate(plan, arriving(CHATS, PROFILE, 80, 3), 0.6, seed=seed, watch=look).outcomes


def serve(
    plan: ClusterPlan, machine: Callable[[int], Noise], seed: int, trace: Path
) -> tuple[list[RequestOutcome], StepCost]:
    """A run on such a machine, which writes a trace; and what its worker has fitted, in the mean."""
    looks, steps, stepped = list[StepCost](), list[StepRecord](), StepMeter.stepped

    def recording(meter: StepMeter, record: StepRecord) -> None:
        steps.append(record)
        stepped(meter, record)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepMeter, "stepped", recording)
        patched.setattr(simulated_cluster, "lognormal", lambda sigma, seed: machine(seed))
        outcomes = play(plan, seed, looks)
    traced(trace, steps)
    fields = {
        each.name: float(np.mean([getattr(look, each.name) for look in looks])) for each in dataclasses.fields(COST)
    }
    return outcomes, StepCost(**{**fields, "samples": 500})


def p90s(outcomes: list[RequestOutcome]) -> NDArray[np.float64]:
    """Seconds: of TTFT and of TPOT."""
    latencies = [[each.ttft for each in outcomes], [each.tpot for each in outcomes if each.tpot is not None]]
    return np.array([np.quantile(each, 0.9) for each in latencies])


@pytest.mark.slow
@pytest.mark.parametrize("machine", [slow_spells, slow_steps])
def test_recorded_steps_tell_more_of_an_irregular_machine_than_its_fit(
    machine: Callable[[int], Noise], tmp_path: Path
) -> None:
    """p90 of TTFT and TPOT on a worker whose steps now and then take thrice as long, and as simulated from its fit.

    Of twelve runs together, each simulated from its own trace: p90 of TTFT is between 0.8 and 2.8 s in single ones,
    as slow steps happen to meet prompts, so that two runs of the machine itself tell as little of each other.
    """
    plan = ClusterPlan.of(PROFILE, (Role.MIXED,), "least_loaded", noise=0.0, heartbeat_interval=1.0, learned=True)
    served, by_fit, by_steps = (list[RequestOutcome]() for _ in range(3))
    for seed in range(12):
        trace = tmp_path / f"steps-{seed}.json"
        outcomes, cost = serve(plan, machine, seed, trace)
        fitted = dataclasses.replace(plan, profile=dataclasses.replace(PROFILE, steps=Fitted(cost)))
        steps_of = {Role.MIXED: read_steps(trace, cost)}
        served += outcomes
        by_fit += play(dataclasses.replace(fitted, noise=cost.error), seed)
        by_steps += play(dataclasses.replace(fitted, steps_of=steps_of), seed)
    told = p90s(served)
    assert p90s(by_fit)[0] < 0.75 * told[0], "this machine tells them not apart"
    off = abs(p90s(by_steps) / told - 1)
    assert off[0] < 0.25 and off[1] < 0.1
