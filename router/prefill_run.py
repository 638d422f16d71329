"""One prefill try as the router sees it: its first token, then silence until the KV is over, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Protocol

from serving.errors import MillraceError, WorkerLost
from serving.links import PrefillLink
from serving.messages import Prefilled, PrefillOrder


class Watched(Protocol):
    """The lease the prefill works for."""

    failed: asyncio.Future[MillraceError]

    def interrupt(self, error: MillraceError) -> None: ...


class PrefillRun:
    """Use as a context manager: leaving it cancels the prefill wherever it is. `ended` is called once, when it ends."""

    def __init__(self, link: PrefillLink, order: PrefillOrder, lease: Watched, ended: Callable[[], None]):
        self.link = link
        self.order = order
        self.lease = lease
        self.ended = ended
        self._first: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> PrefillRun:
        self._task = asyncio.create_task(self._run(), name=f"prefill-{self.order.order.lease.lease}")
        self._task.add_done_callback(lambda _: self.ended())
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._first.cancel()

    async def first(self) -> Prefilled:
        """The first token. Raises what the prefill raised, or what ended the lease meanwhile."""
        waiting: list[asyncio.Future[Any]] = [self._first, self.lease.failed]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._first.done():
            return self._first.result()
        raise self.lease.failed.result()

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
