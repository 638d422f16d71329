"""Service classes: what requests of a kind are promised, how much they count, and what happens when it cannot be kept.

Plain data. A request names its class; its own objectives go before those of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceClass:
    """`ttft_slo_ms` and `tpot_slo_ms` are the objectives of requests that bring none; None: there is none.

    `weight` is what one request within its objectives counts against one of another class. `priority`: smaller goes
    first, in the router's queue, in prefill queues, and at last among those that give way when KV runs out.
    `patience` is how many seconds a request may wait for a place, None: as long as --queue-patience says. With `shed` a
    request that can meet its objectives nowhere is refused at once, with the time after which it may try again; with
    `degrade` it goes on without them, behind all others; either comes as well of one whose first token is late while
    none of it is computed. With neither it is queued as any other. `shed` goes first.
    `backlog` is how many seconds of prompts may wait at a worker for it still to be sent there; None: any.
    """

    name: str
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    weight: float = 1.0
    priority: int = 0
    patience: float | None = None
    shed: bool = False
    degrade: bool = False
    backlog: float | None = None


STANDARD = "standard"
DEGRADED_PRIORITY = 1000  # of requests that go on without their objectives; waiting raises it like any other
SERVICE_CLASSES: Mapping[str, ServiceClass] = {
    known.name: known
    for known in (
        ServiceClass(name="interactive", ttft_slo_ms=1000.0, tpot_slo_ms=100.0, weight=2.0, priority=-100, shed=True),
        ServiceClass(name=STANDARD),
        ServiceClass(name="batch", weight=0.25, priority=100, backlog=1.0),
    )
}
