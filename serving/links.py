"""The seams between services, as protocols: each has an in-process form and a gRPC form behind the same calls.

The router talks to workers through these, a prefill worker to the decode worker it hands KV to. Calls raise errors
of `serving.errors`; a broken connection is WorkerLost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serving.errors import MillraceError
from serving.messages import Audit, Delta, LeaseGrant, LeaseOrder, Prefilled, PrefillOrder


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """New tokens of a lease, or the error that ended it. `epoch` tells late ones of an earlier try apart."""

    lease: str
    epoch: int
    delta: Delta | None = None
    error: MillraceError | None = None


Deliver = Callable[[Sequence[LeaseEvent]], None]
"""Takes all events of one step of a worker for one router."""


class DecodeSession(Protocol):
    """A router's long-lived session with a decode worker; its end, from either side, ends all its leases."""

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        """Raises NoRoom, Draining, StaleLease, WorkerLost, InvalidRequest."""
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
        """Yields once the first token is drawn, ends when the KV has been handed over and accepted.

        Leaving the iterator early cancels the prefill. Raises Retryable errors and InternalError.
        """
        ...


class AuditLink(Protocol):
    async def audit(self) -> list[Audit]: ...


class HandoffLink(Protocol):
    """How a prefill worker reaches the decode worker that holds a lease. One per handoff; use as a context manager."""

    async def begin(self) -> int:
        """The first token to hand over: those before it the decode worker has, or brings from the KV pool itself.

        0 where it brings none. Raises as `push`.
        """
        ...

    async def push(self, chunk: Any) -> None:
        """Send a Chunk (kvcache.handoff). Raises CorruptChunk, StaleLease or WorkerLost, also of an earlier chunk."""
        ...

    async def commit(self, commit: Any) -> range | None:
        """All is sent (a Commit of kvcache.handoff): the decode worker checks that nothing is missing and takes over.

        Tokens that it did not get from the KV pool are returned: send them, and commit again. Raises as `push`.
        """
        ...

    async def close(self) -> None: ...


class HandoffDialer(Protocol):
    """Opens handoffs by what a lease was granted with: where its worker is, and over what it can be reached."""

    def dial(self, grant: LeaseGrant) -> HandoffLink: ...
