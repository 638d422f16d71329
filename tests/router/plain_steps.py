"""Steps with prompts once more, as their formulas say them: computed anew each time, nothing kept.

What router.prompt_steps is held against, number by number.
"""

from __future__ import annotations

from math import inf

from router.candidate import Candidate
from serving.step_cost import GAP, StepCost


def tightest(worker: Candidate, tpot: float | None) -> float | None:
    """Seconds: the least of its running sequences' objectives and this one; None where there are none."""
    objectives = [each for each in (worker.tightest_tpot, tpot) if each is not None]
    return min(objectives) if objectives else None


def chunk_tokens(worker: Candidate, cost: StepCost, start: int, tpot: float | None) -> int:
    """Prompt tokens of a step beside what the worker decodes."""
    most, rows, limit = worker.status.max_batched_tokens or 512, worker.decode_load, tightest(worker, tpot)
    chunk = max(1, most - rows.new_tokens)
    if not rows.sequences or limit is None:
        return chunk if rows.sequences else most
    return cost.paced_chunk(limit, start, cost.seconds(rows), chunk)


def pause_seconds(worker: Candidate, cost: StepCost, step: float, tpot: float | None) -> float:
    """A step of a decode batch, `step` seconds by itself, that computes as much of long prompts as it may."""
    full, limit = step + cost.added_seconds(0, worker.status.max_batched_tokens or 512), tightest(worker, tpot)
    return full if limit is None else min(full, max(step, cost.pause_seconds(limit)))


def held_seconds(cost: StepCost, alone: float, tpot: float | None) -> float:
    """The most that a worker's prompts let a token take in the mean, which takes `alone` seconds without them."""
    return inf if tpot is None else max(alone, cost.pause_seconds(tpot) / GAP)
