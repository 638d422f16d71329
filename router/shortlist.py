"""The few workers of hundreds whose placements are worth predicting, by rough estimates in one pass over each.

Pure. This is what a choice costs for each worker there is: a few operations, on what candidates have computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.candidate import Candidate
from router.policy import Demand
from router.predict import KnownCosts, backlog_seconds
from serving.step_cost import StepCost


def quickest_prompts(
    demand: Demand, workers: Sequence[Candidate], costs: KnownCosts, now: float, most: int
) -> list[Candidate]:
    """Where the prompt is likely computed first, if it passes nobody."""
    tokens, cached = demand.tokens, demand.cached.get
    seconds = [
        (left_at - now if (left_at := worker.prompts_left_at) > now else 0.0)
        + worker.token_seconds * (tokens - cached(worker.instance, 0))
        if worker.cost is not None
        else _guessed_seconds(demand, worker, costs.of(worker), now)
        for worker in workers
    ]
    return _least(workers, seconds, most)


def quickest_steps(workers: Sequence[Candidate], costs: KnownCosts, most: int) -> list[Candidate]:
    """Where a decode step is the shortest."""
    seconds = [worker.step_seconds if worker.cost is not None else costs.step_seconds(worker) for worker in workers]
    return _least(workers, seconds, most)


def quickest_texts(
    demand: Demand, workers: Sequence[Candidate], costs: KnownCosts, now: float, most: int
) -> list[Candidate]:
    """Where prompt and output together are likely computed first."""
    tokens, output, cached = demand.tokens, demand.output, demand.cached.get
    seconds = [
        (left_at - now if (left_at := worker.prompts_left_at) > now else 0.0)
        + worker.token_seconds * (tokens - cached(worker.instance, 0))
        + output * worker.step_seconds
        if worker.cost is not None
        else _guessed_seconds(demand, worker, costs.of(worker), now) + output * costs.step_seconds(worker)
        for worker in workers
    ]
    return _least(workers, seconds, most)


def roomy(demand: Demand, workers: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those whose device holds the whole text, and of these those with room for it; all, where there are none."""
    tokens = demand.tokens
    found = [worker for worker in workers if worker.load < 1.0 and tokens < worker.device_tokens]
    if found:
        return found
    fitting = [worker for worker in workers if tokens < worker.device_tokens] or workers
    return [worker for worker in fitting if worker.load < 1.0] or fitting


def _guessed_seconds(demand: Demand, worker: Candidate, cost: StepCost, now: float) -> float:
    """To the first token, roughly, at one that predicts nothing itself."""
    return backlog_seconds(worker, cost, now) + cost.token * demand.uncached(worker)


def _least(workers: Sequence[Candidate], seconds: Sequence[float], most: int) -> list[Candidate]:
    """Of equal ones the first."""
    return [workers[number] for number in sorted(range(len(workers)), key=seconds.__getitem__)[:most]]
