"""How services call each other, as protocols: each has an in-process and a gRPC implementation.

The router calls workers through these, and a prefill worker the decode worker it hands KV to. Calls raise errors of
`serving.errors`; a broken connection is WorkerLost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serving.errors import MillraceError
from serving.messages import Audit, Delta, LeaseGrant, LeaseOrder, Prefilled, PrefillOrder


@dataclass(slots=True)  # not frozen: one for every token, and frozen ones take three times as long to make
class LeaseEvent:
    """New tokens of a lease, or the error that ended it. By `epoch`, late ones of an earlier attempt are told apart."""

    lease: str
    epoch: int
    delta: Delta | None = None
    error: MillraceError | None = None


Deliver = Callable[[Sequence[LeaseEvent]], None]
"""Takes all events of one step of a worker for one router."""


class DecodeSession(Protocol):
    """A router's long-lived session with a decode worker; all its leases end with it."""

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        """Raises NoRoom, Draining, StaleLease, WorkerLost, InvalidRequest, Unauthorized."""
        ...

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        """Same lease, next epoch, with the tokens known by now. Raises as `open`; the lease is gone if it does."""
        ...

    def cancel(self, lease: str) -> None:
        """End the lease. Never fails, returns at once; the worker frees everything within a step."""
        ...

    async def close(self) -> None: ...


class DecodeWorkerLink(Protocol):
    """How to reach a decode worker."""

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> DecodeSession: ...


class PrefillLink(Protocol):
    """How to reach a prefill worker."""

    def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        """Yields once the first token is sampled, ends when the KV has been handed over and accepted.

        Leaving the iterator early cancels the prefill. Raises Retryable errors and InternalError.
        """
        ...


class AuditLink(Protocol):
    async def audit(self) -> list[Audit]: ...


class HandoffLink(Protocol):
    """How a prefill worker reaches the decode worker that holds a lease. One per handoff; close it.

    `room` is where on the sender's device chunks may lie that it takes from there (kvcache.memory.device_room), once
    the handoff has begun; None: they come in host memory.
    """

    @property
    def room(self) -> Any: ...

    async def begin(self) -> int:
        """The position of the first token to hand over; the decode worker has those before it, or fetches them itself.

        Raises as `push`, and StaleLease of the code "generation" where the decode worker is of another generation.
        """
        ...

    async def push(self, chunk: Any) -> None:
        """Send a Chunk (kvcache.handoff). Raises CorruptChunk, StaleLease or WorkerLost, also of an earlier chunk."""
        ...

    async def commit(self, commit: Any) -> range | None:
        """Say that all is sent (a Commit of kvcache.handoff); the decode worker checks that nothing is missing.

        Returns positions it failed to fetch from the KV pool: send them, and commit again. Raises as `push`.
        """
        ...

    async def close(self) -> None: ...


class HandoffDialer(Protocol):
    """Opens a handoff to the decode worker of a grant, over the best transport both ends have.

    `generation` is the caller's, which the other end wants to be its own.
    """

    def dial(self, grant: LeaseGrant, generation: str = "") -> HandoffLink: ...
