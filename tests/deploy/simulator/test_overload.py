"""Two classes beyond what the workers can do: what matters more is served as if the other were not there."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.profiles import Fitted, Profile
from deploy.simulator.run import simulate
from deploy.simulator.texts import VOCABULARY
from deploy.simulator.traffic import Arrival
from serving.messages import Request, Role, SamplingParams, Slo
from serving.service_class import SERVICE_CLASSES
from serving.step_cost import StepCost

TPOT_MS = 60.0
COST = StepCost(fixed=0.01, token=0.001, pair=2e-7, sequence=1e-4, context=1e-6)
PROFILE = Profile(name="one thread", model="small", steps=Fitted(COST), kv_tokens=26_000, kv_bytes=23_040, layers=30)
SECONDS = 16.0


def requests(name: str, rate: float, slo: Slo, seed: int) -> list[Arrival]:
    """Of one service class, Poisson, about 256 tokens in and 64 out."""
    generator, known = np.random.default_rng(seed), SERVICE_CLASSES[name]
    at = np.cumsum(generator.exponential(1 / rate, round(rate * SECONDS))).tolist()
    made = []
    for number, (prompt, output) in enumerate(generator.lognormal(-0.045, 0.3, (len(at), 2)).tolist()):
        request = Request(
            request_id=f"{name}-{number}",
            prompt=tuple(generator.integers(1, VOCABULARY, size=round(256 * prompt)).tolist()),
            sampling=SamplingParams(max_tokens=round(64 * output), temperature=0.0),
            slo=slo,
            service_class=name,
            priority=known.priority,
        )
        made.append(Arrival(at[number], request, round(64 * output)))
    return made


def of(outcomes: list[RequestOutcome], name: str) -> list[RequestOutcome]:
    return [outcome for outcome in outcomes if outcome.request.service_class == name]


@pytest.mark.thorough
def test_interactive_requests_keep_their_pace_while_batch_waits() -> None:
    """Two workers do about 4.4 of these a second: 2.6 interactive ones and twice the capacity of batch come."""
    interactive = requests("interactive", 2.6, Slo(ttft_ms=1000.0, tpot_ms=TPOT_MS), seed=1)
    arrivals = sorted([*interactive, *requests("batch", 8.8, Slo(), seed=2)], key=lambda each: each.at)
    plan = ClusterPlan.of(PROFILE, (Role.MIXED, Role.MIXED), "goodput", noise=0.2)
    run = simulate(plan, arrivals, 1.0)
    quick, slow = (of(run.outcomes, name) for name in ("interactive", "batch"))
    assert sum(outcome.met for outcome in quick) >= 0.93 * len(quick)
    paces = [outcome.tpot for outcome in quick if outcome.tpot is not None]
    assert 1e3 * median(paces) < 0.8 * TPOT_MS, "batch leaves something of TPOT for prompts that come"
    assert len({outcome.placed[0][0] for outcome in quick}) == 2
    waited = [outcome.ttft for outcome in slow if outcome.ttft is not None]
    assert len(waited) == len(slow) and max(waited) > 10.0, "the load was beyond what they can do"


def test_prompts_are_in_time_beside_texts_that_nobody_waits_for() -> None:
    """One worker: six batch texts and one with objectives decode when a prompt comes that takes half a second alone.

    Beside all of them it takes 1.6 s.
    """

    def asked(name: str, at: float, prompt: int, output: int, slo: Slo) -> Arrival:
        request = Request(
            request_id=f"{name}-{at}",
            prompt=tuple(range(1, prompt + 1)),
            sampling=SamplingParams(max_tokens=output, temperature=0.0),
            slo=slo,
            service_class=name,
            priority=SERVICE_CLASSES[name].priority,
        )
        return Arrival(at, request, output)

    objectives = Slo(ttft_ms=1000.0, tpot_ms=TPOT_MS)
    batch = [asked("batch", 0.01 * number, 16, 400, Slo()) for number in range(6)]
    quick = [asked("interactive", at, prompt, 60, objectives) for at, prompt in ((2.0, 20), (2.08, 400))]
    cost = StepCost(fixed=0.005, token=0.00125, pair=0.0, sequence=0.0035, context=0.0)
    profile = Profile(name="slow", model="small", steps=Fitted(cost), kv_tokens=26_000, kv_bytes=23_040, layers=30)
    plan = ClusterPlan.of(profile, (Role.MIXED,), "goodput", noise=0.0, learned=True)
    run = simulate(plan, [*batch, *quick], 1.0)
    assert [outcome.met for outcome in of(run.outcomes, "interactive")] == [True, True]
    assert all(len(outcome.tokens) == 400 for outcome in of(run.outcomes, "batch"))
