"""Workers that report what their steps cost, and requests with objectives, for what is predicted and chosen."""

from __future__ import annotations

from typing import Any

from router.calibration import Drift
from router.candidate import Candidate, Dispatched, QueuedPrompt
from router.goodput import Goodput
from router.policy import Decision, Demand
from router.predict import QueuePlace
from serving.messages import TPOT_BINS_MS, Role, Slo
from serving.step_cost import StepCost
from tests.router.scripted import lease_view, make_status

COST = StepCost(fixed=0.004, token=0.0005, pair=1e-8, sequence=0.0005, context=1e-7, error=0.2, samples=100)


def worker(name: str, role: Role = Role.MIXED, **fields: Any) -> Candidate:
    """One with costs. `rows` decode there, of 300 tokens each and an objective of 100 ms."""
    rows = fields.pop("rows", 0)
    counts = [0] * (len(TPOT_BINS_MS) + 1)
    counts[TPOT_BINS_MS.index(112.0)] = rows
    plain = {
        "step_cost": COST,
        "running": rows,
        "leases": rows,
        "context_tokens": 300 * rows,
        "tpot_counts": tuple(counts),
        "total_blocks": 10_000,
        "free_blocks": 10_000 - 20 * rows,
        "max_seqs": 64,
        "max_model_len": 32_768,
        "max_batched_tokens": 512,
    }
    newer, queued = fields.pop("newer", Dispatched()), tuple(fields.pop("queued", ()))
    return Candidate(make_status(name, role, **{**plain, **fields}), newer, queued=queued)


def choose(demand: Demand, *workers: Candidate, policy: Goodput | None = None, now: float = 0.0) -> Decision:
    decision = (policy or Goodput()).choose(demand, lease_view(demand, workers), now)
    assert decision is not None
    return decision


def wanting(tokens: int = 256, ttft: float | None = 1.0, tpot_ms: float | None = 100.0, **fields: Any) -> Demand:
    slo = Slo(ttft_ms=ttft * 1e3 if ttft is not None else None, tpot_ms=tpot_ms)
    return Demand(**{"tokens": tokens, "output": 64, "slo": slo, "first_token_in": ttft, **fields})


def place_of(prompt: QueuedPrompt, worker: Candidate, now: float = 0.0, drift: Drift | None = None) -> QueuePlace:
    """The prompt's in the worker's queue."""
    return QueuePlace(worker, COST, prompt.priority, prompt.due, drift or Drift(), now)


def queue_seconds(prompt: QueuedPrompt, worker: Candidate, now: float = 0.0) -> float:
    return place_of(prompt, worker, now).queue_seconds(prompt.seconds)


def queued_lost(prompt: QueuedPrompt, worker: Candidate, drift: Drift | None = None) -> float:
    return place_of(prompt, worker, drift=drift).queued_lost(prompt.seconds)
