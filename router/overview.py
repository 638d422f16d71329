"""What a router shows of itself to people: its workers, what waits, and what became of requests, as plain data.

It decides nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from router.generations import ready_workers
from router.registry import RegisteredWorker
from router.router import Router
from serving.messages import WorkerStatus

BREAKER = ("closed", "half-open", "open")  # as router.breaker counts its states


class RouterOverview:
    """What the HTTP API asks of a router beside serving requests (serving.api.settings.PlacementLog)."""

    def __init__(self, router: Router):
        self.router = router

    def placement(self, request_id: str) -> Mapping[str, str] | None:
        return self.router.explained.placement(request_id)

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        return self.router.explained.explain(request_id)

    def workers(self) -> Mapping[str, Any]:
        """Totals are since the router began; `at` is on its clock, so that two answers give rates."""
        router, now = self.router, self.router.clock()
        waiting = router.placer.admission.waiting_by_class()
        counts = router.explained.counts
        return {
            "at": now,
            "policy": router.fleet.config.policy,
            "requests_running": router.running,
            "requests_waiting": router.placer.admission.waiting,
            "waiting_tokens": router.placer.admission.waiting_tokens,
            "tokens": router.tokens,
            "classes": {
                name: {
                    "waiting": waiting.get(name, 0),
                    "within_slo": held.within_slo,
                    "offered": sum(held.outcomes.values()) - held.outcomes["invalid"],
                    **held.outcomes,
                    "work": asdict(held.work),
                }
                for name, held in counts.items()
                if any(held.outcomes.values())
                or held.work.arrived
                or waiting.get(name)
                or name in router.fleet.config.classes
            },
            "generations": [
                {"generation": name, "prefill": each.prefills, "decode": each.decodes, "share": each.share}
                for name, each in ready_workers(router.fleet.candidates(), router.fleet.trust, now).items()
            ],
            "workers": [
                {
                    **describe(worker, now),
                    "breaker": BREAKER[router.fleet.breakers.state(worker.status.instance)],
                    "slowdown": router.fleet.trust.slowness.factor(worker.status.instance),
                }
                for worker in router.fleet.registry.workers.values()
            ],
        }


def describe(worker: RegisteredWorker, now: float) -> dict[str, Any]:
    """One worker: its state, its load with what was sent since its heartbeat, and how long a decode step takes."""
    status, seen = worker.status, worker.candidate
    step = seen.cost.seconds(seen.decode_load) if seen.cost is not None and seen.decode_load.sequences else None
    return {
        "name": status.name,
        "role": status.role.value,
        "generation": seen.generation,
        "address": status.address,
        "ranks": max(1, status.ranks),
        "state": "suspect" if worker.suspect else "draining" if status.draining else "live",
        "slow": worker.slow,
        "heard_seconds": now - worker.seen,
        "running": status.running,
        "leases": seen.held_leases,
        "max_seqs": status.max_seqs,
        "context_tokens": status.context_tokens,
        "queued_tokens": seen.queued_tokens,
        "queue_seconds": max(0.0, seen.prompts_left_at - now),
        "kv_usage": 1.0 - status.free_blocks / max(1, status.total_blocks),
        "step_seconds": step,
        "measured": measured(status),
        "steps": status.counters.get("engine_steps", 0.0),
        "steps_seconds": status.counters.get("engine_step_seconds", 0.0),
        "stalled_seconds": status.stalled_seconds,
    }


def measured(status: WorkerStatus) -> dict[str, Any] | None:
    """What the worker has learned of its steps, and its limits: the simulator takes it. None before any step."""
    cost = status.step_cost
    if cost is None or not cost.samples:
        return None
    return {
        "model": status.model,
        "cost": asdict(cost),
        "kv_tokens": status.total_blocks * status.block_size,
        "max_model_len": status.max_model_len,
        "max_num_seqs": status.max_seqs,
        "max_num_batched_tokens": status.max_batched_tokens,
    }
