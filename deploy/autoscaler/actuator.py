"""What the autoscaler asks of a place where workers run: who is there, one more, one fewer, or one in another role.

It knows no place: local processes, Ray and Kubernetes each implement Actuator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from serving.errors import Unavailable
from serving.messages import Role

KEPT = "kept"  # the code of an ActuatorError: workers of this place keep their role, so that none can flip
WorkerState = Literal["starting", "ready", "draining"]


class ActuatorError(Unavailable):
    """The place did not do it; the message says what to do."""


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """`worker_id` is what the router calls the worker (WorkerStatus.name).

    A worker that flips is `draining`, then `starting` in its new role, then `ready`.
    """

    worker_id: str
    role: Role
    state: WorkerState


class Actuator(Protocol):
    """Every method raises ActuatorError."""

    async def workers(self) -> Sequence[FleetWorker]:
        """Those that are wanted and those that still leave."""
        ...

    async def add(self, role: Role) -> None:
        """One more worker of this role. Returns once it is asked for, not once it is ready."""
        ...

    async def drain(self, worker_id: str) -> None:
        """It gets no new work, and stops when its KV has drained. May return before it has stopped."""
        ...

    async def flip(self, worker_id: str, role: Role) -> None:
        """It drains as in `drain`, and then serves in the other role. May return before it does."""
        ...
