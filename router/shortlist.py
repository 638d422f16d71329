"""The few workers of hundreds whose placements are worth predicting, by rough estimates in one pass over each.

Pure. This is what a choice costs for each worker there is: a few operations, on what candidates have computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.candidate import Candidate
from router.policy import Demand


def quickest_prompts(demand: Demand, workers: Sequence[Candidate], now: float, most: int) -> list[Candidate]:
    """Where the prompt is likely computed first. All need a step cost."""
    return _least(workers, _first_seconds(demand, workers, now), most)


def quickest_steps(workers: Sequence[Candidate], most: int) -> list[Candidate]:
    """Where a decode step is the shortest. All need a step cost."""
    return _least(workers, [worker.step_seconds for worker in workers], most)


def quickest_texts(demand: Demand, workers: Sequence[Candidate], now: float, most: int) -> list[Candidate]:
    """Where prompt and output together are likely computed first. All need a step cost."""
    firsts, output = _first_seconds(demand, workers, now), demand.output
    seconds = [first + output * worker.step_seconds for first, worker in zip(firsts, workers, strict=True)]
    return _least(workers, seconds, most)


def roomy(demand: Demand, workers: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those whose device holds the whole text, and of these those with room for it; all, where there are none."""
    tokens = demand.tokens
    fitting = [worker for worker in workers if tokens < worker.device_tokens] or workers
    return [worker for worker in fitting if worker.load < 1.0] or fitting


def _first_seconds(demand: Demand, workers: Sequence[Candidate], now: float) -> list[float]:
    """Seconds to the first token at each worker, roughly: what waits there, and the tokens it has not cached."""
    tokens, cached = demand.tokens, demand.cached.get
    found = []
    for worker in workers:
        cost, waits = worker.status.step_cost, worker.prompts_left_at - now
        assert cost is not None
        compute = cost.token * (tokens - cached(worker.status.instance, 0))
        found.append(waits + compute if waits > 0.0 else compute)
    return found


def _least(workers: Sequence[Candidate], seconds: Sequence[float], most: int) -> list[Candidate]:
    """Of equal ones the first."""
    return [workers[number] for number in sorted(range(len(workers)), key=seconds.__getitem__)[:most]]
