"""What a text that decodes at a worker costs the prompts that are computed there, where it could decode elsewhere.

Pure arithmetic over candidates. It knows neither the prompt of the text itself nor other workers.
"""

from __future__ import annotations

from router.calibration import Drift
from router.candidate import Candidate
from router.chances import less_likely
from router.predict import backlog_seconds, rows_seconds
from serving.step_cost import GAP, LEAST_CHUNK, StepCost

PRICE = 8.0  # requests that a late prompt counts as: it stands for those that are then sent elsewhere as well


def slowdown(cost: StepCost, rows: int, context: float, tpot: float | None, most: int) -> float:
    """How many times as long prompts take, while some always wait, beside so many sequences of `context` tokens.

    A step of at most `most` tokens then has as many of theirs as the tightest objective, `tpot` seconds, leaves: nobody
    is early.
    """
    alone = (cost.fixed + cost.chunk_seconds(0, most) - cost.fixed) / most
    beside, chunk = rows_seconds(cost, rows, context), max(1, most - rows)
    if tpot is not None:
        chunk = max(min(LEAST_CHUNK, chunk), cost.chunk_beside(cost.pause_seconds(tpot) / GAP, 0, beside, chunk))
    return (beside + cost.chunk_seconds(0, chunk) - cost.fixed) / chunk / alone


def prompts_slowed(
    worker: Candidate, cost: StepCost, context: float, lasts: float, tpot: float | None, drift: Drift, now: float
) -> float:
    """A text's share of the prompts, like those that come in time from this worker, that decodes there will make late.

    It decodes for `lasts` seconds, of `context` tokens in the mean; `tpot` is its objective, `drift` that of the
    worker's TTFT.
    All that decodes there is charged alike, though the first text slows prompts down the most: so one among few is
    charged more than one among many, and texts gather where prompts are slow already.
    """
    if not worker.arrivals:
        return 0.0
    decodes, tightest = worker.decode_load, worker.tightest_tpot
    if tightest is None or (tpot is not None and tpot < tightest):
        tightest = tpot
    rows, most = decodes.sequences + 1, worker.status.max_batched_tokens or 512
    slower = slowdown(cost, rows, decodes.context_tokens + context, tightest, most)
    if slower <= 1.0:
        return 0.0
    factor, error, late = drift.factor, drift.error, 0.0
    waits, sure = backlog_seconds(worker, cost, now), drift.sure
    for _, limit, seconds, rate in worker.arrivals:
        before = (waits + seconds) * factor
        late += rate * lasts * less_likely(limit, before, before * slower, error, sure)
    return PRICE * late / rows
