"""Observations as a router's figures would come to, made up from rates and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.autoscaler.actuator import FleetWorker
from deploy.autoscaler.fleet_load import ScaledFleet
from deploy.autoscaler.observation import Observation, WorkerSeen
from router.offered import OfferedWork
from serving.messages import Role
from serving.step_cost import StepCost, pairs

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
COST = StepCost(fixed=0.1, token=0.004, pair=1e-6, sequence=0.02, context=1e-5, error=0.1, samples=100)
INTERVAL = 15.0


def ready(prefill: int = 0, decode: int = 0, mixed: int = 0, changed_at: float | None = None) -> ScaledFleet:
    named = [(P, prefill), (D, decode), (M, mixed)]
    workers = [FleetWorker(f"{role}-{number}", role, "ready") for role, count in named for number in range(count)]
    return ScaledFleet(tuple(workers), changed_at)


def seen(name: str, role: Role, **fields: Any) -> WorkerSeen:
    plain: dict[str, Any] = {
        "state": "live",
        "heard_seconds": 0.5,
        "running": 0,
        "leases": 0,
        "max_seqs": 64,
        "queued_tokens": 0,
        "kv_usage": 0.0,
        "steps_seconds": 0.0,
        "cost": COST,
        "kv_tokens": 16384,
        "max_batched_tokens": 512,
        "busy": 0.0,
    }
    return WorkerSeen(name=name, role=role, **{**plain, **fields})


def offered(arrived: float, prompt: int = 500, output: int = 32, met: float = 1.0, **fields: Any) -> OfferedWork:
    """So many requests that came, were answered and judged, `met` of them within both objectives."""
    count = round(arrived)
    plain = {
        "arrived": count,
        "prompt_tokens": count * prompt,
        "prompt_pairs": count * pairs(0, prompt),
        "with_ttft": count,
        "ttft_seconds": 8.0 * count,
        "with_tpot": count,
        "tpot_seconds": 0.4 * count,
        "answered": count,
        "answered_prompt_tokens": count * prompt,
        "output_tokens": count * output,
        "decoded_context": count * output * (prompt + output / 2),
        "ttft_judged": count,
        "ttft_met": round(met * count),
        "tpot_judged": count,
        "tpot_met": round(met * count),
    }
    return OfferedWork(**{**plain, **fields})


def observation(at: float, fleet: ScaledFleet, rate: float, *, busy: float = 0.0, **lengths: Any) -> Observation:
    """`rate` requests a second over one interval; `busy` the share of their time that workers were in steps."""
    work = offered(rate * INTERVAL, **lengths)
    return Observation(
        at=at,
        seconds=INTERVAL,
        tokens=work.output_tokens,
        waiting=0,
        waiting_tokens=0,
        work={"standard": work},
        workers=tuple(seen(each.worker_id, each.role, busy=busy) for each in fleet.workers),
    )


def series(fleet: ScaledFleet, rates: Sequence[float], **fields: Any) -> list[Observation]:
    """One observation for each rate, the last at 0 seconds."""
    return [
        observation(-INTERVAL * (len(rates) - 1 - number), fleet, rate, **fields) for number, rate in enumerate(rates)
    ]
