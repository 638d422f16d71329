"""Prefills that a router asks for together with their leases: a mixed worker computes what it will decode.

Asked for in one message and told in the same session, they cost no call of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

from serving.errors import InvalidRequest, MillraceError, WorkerLost
from serving.links import DecodeSession, PrefillLink
from serving.logs import request_context
from serving.messages import LeaseGrant, LeaseId, LeaseOrder, Prefilled, PrefillOrder

log = logging.getLogger(__name__)

Told = Callable[[LeaseId, Prefilled | MillraceError], None]


class PrefillingSession:
    """A router's session whose leases may be opened with a prefill (serving.links.DecodeSession).

    `prefill` is the same worker's, None where it computes no prompts. `told` takes what comes of each prefill, once;
    nothing comes of one whose lease ends or begins anew before.
    """

    def __init__(self, session: DecodeSession, prefill: PrefillLink | None, told: Told):
        self.session = session
        self.prefill = prefill
        self.told = told
        self._running: dict[str, asyncio.Task[None]] = {}  # by lease

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        if order.prefill and self.prefill is None:
            raise InvalidRequest("this worker computes no prompts", param="prefill")
        grant = await self.session.open(order)
        if order.prefill and self.prefill is not None:
            self._begin(self.prefill, PrefillOrder(order=order, grant=grant))
        return grant

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        self._end(order.lease.lease)
        return await self.session.advance(order)

    def cancel(self, lease: str) -> None:
        self._end(lease)
        self.session.cancel(lease)

    async def close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        try:
            await asyncio.gather(*running, return_exceptions=True)
        finally:
            await self.session.close()

    def _begin(self, prefill: PrefillLink, order: PrefillOrder) -> None:
        lease = order.order.lease
        task = self._running[lease.lease] = asyncio.create_task(
            self._run(prefill, order), name=f"prefill-{lease.lease}"
        )
        task.add_done_callback(partial(self._over, lease))

    def _over(self, lease: LeaseId, task: asyncio.Task[None]) -> None:
        if self._running.get(lease.lease) is task:
            del self._running[lease.lease]
        mistake = None if task.cancelled() else task.exception()
        if mistake is not None:  # the router waits for what comes of the prefill
            log.error("the prefill of lease %s broke", lease.lease, exc_info=mistake)
            self.told(lease, WorkerLost(f"the worker could not compute the prompt: {mistake!r}"))

    def _end(self, lease: str) -> None:
        running = self._running.pop(lease, None)
        if running is not None:
            running.cancel()

    async def _run(self, prefill: PrefillLink, order: PrefillOrder) -> None:
        with request_context(order.order.request):
            try:
                outcome: Prefilled | MillraceError = await _first(prefill, order)
            except MillraceError as error:
                outcome = error
            self.told(order.order.lease, outcome)


async def _first(prefill: PrefillLink, order: PrefillOrder) -> Prefilled:
    """The first token, once the prefill is over. Raises what it raises, WorkerLost where it ends without one."""
    async with aclosing(prefill.run(order)) as results:  # type: ignore[type-var]
        found = [prefilled async for prefilled in results]
    if not found:
        raise WorkerLost("the prefill ended without a token")
    return found[0]
