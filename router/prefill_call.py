"""One prefill try as the router sees it: its first token, then silence until the KV is over, or an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType

from router.leases import RouterLease
from router.policy import Decision
from router.registry import Reservation
from serving.errors import MillraceError, Preempted, WorkerLost
from serving.first_done import first_done
from serving.links import PrefillLink
from serving.messages import Prefilled, PrefillOrder

log = logging.getLogger(__name__)

BROKEN_CALL = "broken_call"  # an order or a reply that cannot be read: no worker may be held to be dead for that


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision whose prefill has not been sent yet, unless with its lease. Release it if it never is."""

    decision: Decision
    reserved: Reservation | None  # for the prefill; None where no worker was there to take it
    asked_at: float | None = None  # when it was asked for with its lease

    def release(self) -> None:
        if self.reserved is not None:
            self.reserved.release()


class PrefillCall:
    """A prefill into `lease`. A context manager: leaving it cancels the prefill. `ended` is called with it, at its end.

    Nothing that it refers to refers to it once it has ended: else prompts would lie about until a collection.
    """

    def __init__(
        self, link: PrefillLink, order: PrefillOrder, lease: RouterLease, ended: Callable[[PrefillCall], None]
    ):
        self.link = link
        self.order = order
        self.lease = lease
        self.ended = ended
        self._leaving = False
        self._first: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> PrefillCall:
        self._task = asyncio.create_task(self._run(), name=f"prefill-{self.order.order.lease.lease}")
        self._task.add_done_callback(self._over)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leaving = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._first.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        """The call has ended, in whatever way: nothing may wait for it any more."""
        self.ended(self)
        error = task.exception() if not task.cancelled() else None if self._leaving else asyncio.CancelledError()
        if error is not None:
            log.error("a prefill call broke", exc_info=error)
            ours = not isinstance(error, asyncio.CancelledError)  # a closed channel cancels its calls
            self.lose(WorkerLost(f"the prefill call broke: {error!r}", code=BROKEN_CALL if ours else None))

    @property
    def computed(self) -> bool:
        """True once the first token is here."""
        return self._first.done() and not self._first.cancelled() and self._first.exception() is None

    @property
    def handing_over(self) -> bool:
        """True while the first token is here and the KV is not known to have arrived."""
        return self._first.done() and not self._task.done()

    def lose(self, error: MillraceError) -> None:
        """The worker is out of reach: waits for its first token, or for its KV, end with this error."""
        if not self._first.done():
            self._first.set_exception(error)
        elif not self._task.done() or self._task.cancelled() or self._task.exception() is not None:
            self.lease.interrupt(error)

    async def first(self) -> Prefilled:
        """The first token. Raises what the prefill raised, or what ended the lease meanwhile."""
        await first_done(self._first, self.lease.failed)
        failed = self.lease.failed.result() if self.lease.failed.done() else None
        if isinstance(failed, Preempted) and self._first.done() and self._first.exception() is not None:
            raise failed  # the prefill can only say that its lease has ended
        if self._first.done():
            return self._first.result()
        assert failed is not None
        raise failed

    async def _run(self) -> None:
        try:
            async with aclosing(self.link.run(self.order)) as results:  # type: ignore[type-var]
                async for prefilled in results:
                    if not self._first.done():
                        self._first.set_result(prefilled)
            if not self._first.done():
                raise WorkerLost("the prefill ended without a token")
        except MillraceError as error:
            if not self._first.done():
                self._first.set_exception(error)
            else:
                self.lease.interrupt(error)
