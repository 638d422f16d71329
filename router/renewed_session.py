"""A session with a decode worker that moves to a new connection when certificates change, lease by lease.

A stream stays with the connection it began on, and with it the certificates of then: the session of a router would
keep them for as long as both processes live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from serving.errors import MillraceError
from serving.grpc_tls import Identity
from serving.links import DecodeSession
from serving.messages import LeaseGrant, LeaseOrder, Prefilled
from serving.rpc import Caller

log = logging.getLogger(__name__)

Prefills = dict[str, asyncio.Future[Prefilled]]


class StreamedSession(DecodeSession, Protocol):
    """A session over one stream, which is there once `welcome` is set. `prefills` are asked for with leases."""

    prefills: Prefills
    welcome: asyncio.Future[None]


Begin = Callable[[Callable[[MillraceError], None]], StreamedSession]
"""Begins a session on the caller's channel of now, given what is called at its loss."""


class RenewedSession:
    """One session (DecodeSession) over one stream after the other. `lost` is called once.

    New leases go to the latest stream, those of an older one stay there, and it ends with the last of them.
    """

    def __init__(self, caller: Caller, begin: Begin, lost: Callable[[MillraceError], None]):
        self.caller = caller
        self.begin = begin
        self.lost = lost
        self._identity = self._identity_now()
        self._latest: StreamedSession = self._begun()
        self._leases: dict[str, StreamedSession] = {}  # by which stream each is held
        self._older: list[StreamedSession] = []
        self._renewing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._over = False

    @property
    def welcome(self) -> asyncio.Future[None]:
        return self._latest.welcome

    def prefill_of(self, lease: str) -> asyncio.Future[Prefilled] | None:
        """What was asked for with this lease."""
        return self._leases.get(lease, self._latest).prefills.get(lease)

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        if self._renewing is None and not self._over and self._identity_now() is not self._identity:
            self._renewing = asyncio.create_task(self._renew(), name=f"renew-{self.caller.address}")
        session = self._leases[order.lease.lease] = self._latest  # nobody waits for the next one
        try:
            return await session.open(order)
        except BaseException:
            self._forget(order.lease.lease)
            raise

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        return await self._leases.get(order.lease.lease, self._latest).advance(order)

    def cancel(self, lease: str) -> None:
        self._leases.get(lease, self._latest).cancel(lease)
        self._forget(lease)

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._latest.close()  # which is its loss, and so that of the others
        await asyncio.gather(*self._closing, return_exceptions=True)

    # ---- within ------------------------------------------------------------------------------------------------

    def _identity_now(self) -> Identity | None:
        _ = self.caller.channel  # which looks whether certificates have changed
        return self.caller.identity

    def _begun(self) -> StreamedSession:
        session = self.begin(lambda error: self._ended(session, error))
        return session

    async def _renew(self) -> None:
        """If the worker does not take the new certificates, the session that there is goes on; the next lease asks."""
        try:
            identity = self._identity_now()
            session = self._begun()
            try:
                await session.welcome
            except MillraceError as error:
                log.warning("no session by the new certificates yet: %s", error.message)
                return
            except asyncio.CancelledError:
                await session.close()
                raise
            self._older.append(self._latest)
            self._latest, self._identity = session, identity
            self._end_idle()
        finally:
            self._renewing = None

    def _forget(self, lease: str) -> None:
        self._leases.pop(lease, None)
        self._end_idle()

    def _end_idle(self) -> None:
        """Older streams that hold no lease any more."""
        for session in [each for each in self._older if each not in self._leases.values()]:
            self._older.remove(session)
            self._close_later(session)

    def _close_later(self, session: StreamedSession) -> None:
        task = asyncio.get_running_loop().create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _ended(self, session: StreamedSession, error: MillraceError) -> None:
        """The loss of a stream with leases, or of the latest one, is the loss of all: the worker is the same."""
        if self._over or (session is not self._latest and session not in self._older):
            return
        self._over = True
        for other in (self._latest, *self._older):
            if other is not session:
                self._close_later(other)
        self.lost(error)
