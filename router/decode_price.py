"""What a text that decodes at a worker costs the prompts that are computed there, where it could decode elsewhere.

Pure arithmetic over candidates. It knows neither the prompt of the text itself nor other workers.
"""

from __future__ import annotations

from router.calibration import Drift
from router.candidate import Candidate
from router.chances import less_likely
from router.predict import backlog_seconds, rows_seconds
from router.prompt_steps import PromptSteps

PRICE = 8.0  # requests that a late prompt counts as: it stands for those that are then sent elsewhere as well


def prompts_slowed(
    worker: Candidate, steps: PromptSteps, context: float, lasts: float, drift: Drift, now: float
) -> float:
    """A text's share of the prompts, like those that come in time from this worker, that decodes there will make late.

    It decodes for `lasts` seconds, of `context` tokens in the mean; `steps` are the worker's by its objective, `drift`
    is that of the worker's TTFT.
    All that decodes there is charged alike, though the first text slows prompts down the most: so one among few is
    charged more than one among many, and texts gather where prompts are slow already.
    """
    if not worker.arrivals:
        return 0.0
    decodes, cost = worker.decode_load, steps.cost
    rows = decodes.sequences + 1
    slower = steps.slowdown(rows, rows_seconds(cost, rows, decodes.context_tokens + context))
    if slower <= 1.0:
        return 0.0
    factor, error, late = drift.factor, drift.error, 0.0
    waits, sure = backlog_seconds(worker, cost, now), drift.sure
    for _, limit, seconds, rate in worker.arrivals:
        before = (waits + seconds) * factor
        late += rate * lasts * less_likely(limit, before, before * slower, error, sure)
    return PRICE * late / rows
