"""What a text that decodes at a worker costs the prompts that are computed there, where it could decode elsewhere.

Pure arithmetic over candidates. It knows neither the prompt of the text itself nor other workers.
"""

from __future__ import annotations

from router.calibration import Drift
from router.candidate import Candidate
from router.chances import less_likely
from router.predict import backlog_seconds
from serving.step_cost import GAP, LEAST_CHUNK, StepCost, StepLoad

PRICE = 8.0  # requests that a late prompt counts as: it stands for those that are then sent elsewhere as well


def prompt_token_seconds(worker: Candidate, cost: StepCost, rows: StepLoad, tpot: float | None) -> float:
    """Seconds of the worker for each prompt token while prompts always wait there, beside `rows` that decode.

    A step then has as many of their tokens as the tightest objective, `tpot` seconds, leaves: nobody is early.
    """
    most = worker.status.max_batched_tokens or 512
    if rows.sequences:
        most = max(1, most - rows.new_tokens)
        if tpot is not None:
            most = max(min(LEAST_CHUNK, most), cost.chunk_within(cost.pause_seconds(tpot) / GAP, 0, rows, most))
    return (cost.seconds(rows) + cost.chunk_seconds(0, most) - cost.fixed) / most


def prompts_slowed(
    worker: Candidate, cost: StepCost, text: StepLoad, lasts: float, tpot: float | None, drift: Drift, now: float
) -> float:
    """A text's share of the prompts, like those that come in time from this worker, that decodes there will make late.

    `text` is what it adds to a step for `lasts` seconds, `tpot` its objective; `drift` is that of the worker's TTFT.
    All that decodes there is charged alike, though the first text slows prompts down the most: so one among few is
    charged more than one among many, and texts gather where prompts are slow already.
    """
    if not worker.arrivals:
        return 0.0
    rows, tightest = worker.decode_load + text, worker.tightest_tpot
    if tightest is None or (tpot is not None and tpot < tightest):
        tightest = tpot
    slower = prompt_token_seconds(worker, cost, rows, tightest) / prompt_token_seconds(worker, cost, StepLoad(), None)
    if slower <= 1.0:
        return 0.0
    factor, error, late = drift.factor, drift.error, 0.0
    waits, sure = backlog_seconds(worker, cost, now), drift.sure
    for _, limit, seconds, rate in worker.arrivals:
        before = (waits + seconds) * factor
        late += rate * lasts * less_likely(limit, before, before * slower, error, sure)
    return PRICE * late / rows.sequences
