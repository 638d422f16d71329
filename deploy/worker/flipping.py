"""Has a running worker serve in another role, with the model that it has loaded: drain, end, begin anew.

It is one worker by name and address all the time, and another instance after each flip, as after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Protocol

from deploy.worker.life import WorkerLife, WorkerMaker, give_back_kv
from deploy.worker.proposers import DraftParts
from deploy.worker.service import WorkerDoors
from deploy.worker.worker import Worker
from serving.errors import Draining, InvalidRequest, MillraceError, Unavailable
from serving.messages import Role, WorkerStatus

log = logging.getLogger(__name__)

BUSY = "flipping"  # the code of a refusal: another flip is under way
KEPT = "kept"  # and of one that left the worker in its role, as any other flip of it would
LAST = "last"  # and of one that would leave nobody in the worker's role
UNDRAINED = "undrained"  # and of one that may succeed with more time, or later


class Announcer(Protocol):
    """Tells routers how the worker is, without waiting for the next heartbeat (deploy.runtime.heartbeats).

    `lacking` asks them: the role that nobody would serve without it.
    """

    async def during(self, drain: Coroutine[None, None, None]) -> None: ...
    async def once(self) -> None: ...
    async def lacking(self, name: str) -> Role | None: ...


class Unannounced:
    """Before there are heartbeats."""

    async def during(self, drain: Coroutine[None, None, None]) -> None:
        await drain

    async def once(self) -> None: ...

    async def lacking(self, name: str) -> Role | None:
        return None


class FlippableWorker:
    """`begin` its first life, then `flip` it. `leaving` is set when the process is to end, or the engine has died.

    `drain_seconds` bounds how long requests may go on in a life that ends; `shown` is told of each worker that begins,
    and None before one ends: whoever holds it has to let it go.
    """

    def __init__(
        self, maker: WorkerMaker, leaving: asyncio.Event, drain_seconds: float, shown: Callable[[Worker | None], None]
    ):
        self.maker = maker
        self.leaving = leaving
        self.drain_seconds = drain_seconds
        self.shown = shown
        self.doors = WorkerDoors(self.flip)
        self.flips = 0
        self.announcer: Announcer = Unannounced()
        self._life: WorkerLife | None = None
        self._last: WorkerStatus | None = None  # of the life before, while there is none
        self._flipping: asyncio.Task[str] | None = None
        self._to: Role | None = None  # what it flips to

    async def begin(self, role: Role, drafts: DraftParts, name: str | None) -> Worker:
        """Start a worker of the role and lead the doors to it. Raises ValueError."""
        life = await self.maker.make(role, drafts, name, self.leaving.set)
        life.worker.flips = self.flips
        self._life = life
        self.doors.show(life.worker)
        self.shown(life.worker)
        return life.worker

    @property
    def worker(self) -> Worker | None:
        """None between two lives."""
        return self._life.worker if self._life is not None else None

    def status(self) -> WorkerStatus:
        """The heartbeat. Between two lives it is the last one of the worker that has drained."""
        if self._life is not None:
            return self._life.worker.status()
        assert self._last is not None
        return self._last

    async def flip(self, role: Role, seconds: float | None) -> str:
        """Serve as `role`; the instance of the new life. What runs has `seconds` to end, and then goes elsewhere.

        Where it fails the worker serves in its old role. Raises InvalidRequest, Draining, Unavailable.
        """
        now = self.status()
        if self._flipping is not None:
            raise Unavailable(f"{now.name} flips to {self._to}: wait until it serves", code=BUSY, retry_after=1.0)
        self._check_stays(now.name)
        if now.role is role:
            return now.instance
        self._to = role
        self._flipping = asyncio.create_task(self._flip(role, seconds), name="flip")
        self._flipping.add_done_callback(self._flipped)
        return await asyncio.shield(self._flipping)  # it goes on if who asked has left

    async def settle(self) -> None:
        """Wait until no flip is under way."""
        if self._flipping is not None:
            await asyncio.wait([self._flipping])

    async def end(self) -> None:
        if self._life is not None:
            await self._life.end()

    # ---- one flip ------------------------------------------------------------------------------------------------

    def _flipped(self, flip: asyncio.Task[str]) -> None:
        self._flipping = None
        error = None if flip.cancelled() else flip.exception()
        if error is not None:
            log.warning("the flip to %s failed: %s", self._to, error)

    async def _flip(self, role: Role, seconds: float | None) -> str:
        began, now = time.monotonic(), self.status()
        try:
            self.maker.check(now.role, role)
            drafts = await self.maker.drafts(role)
        except ValueError as error:
            raise InvalidRequest(f"{now.name} stays {now.role}: {error}", code=KEPT) from error
        lacking = await self.announcer.lacking(now.name)
        if lacking is not None:
            told = f"{now.name} stays {now.role}: without it no worker would {lacking}"
            raise Unavailable(f"{told}; add a {lacking} or mixed worker first", code=LAST)
        self._check_stays(now.name)
        log.info("%s drains, to serve as %s", now.name, role)
        await self._drain(self.drain_seconds if seconds is None else min(seconds, self.drain_seconds))
        drained = time.monotonic()
        instance = await self._exchange(now, role, drafts)
        await self.announcer.once()
        done = time.monotonic()
        log.info("%s serves as %s: drained in %.2f s, begun in %.2f s", now.name, role, drained - began, done - drained)
        return instance

    def _check_stays(self, name: str) -> None:
        """Raises Draining where the process leaves, or is about to: its engine has died."""
        if self.leaving.is_set() or (self.worker is not None and self.worker.loop.crashed):
            raise Draining(f"{name} is leaving")

    async def _drain(self, seconds: float) -> None:
        """Raises Draining where the process leaves meanwhile, Unavailable where prompts are still computed then."""
        worker = self.worker
        assert worker is not None
        await self._until_leaving(self.announcer.during(worker.drain(seconds)))
        name, role = worker.identity.name, worker.identity.role
        self._check_stays(name)
        if not worker.drained:
            worker.resume()
            await self.announcer.once()
            told = f"{name} stays {role}: prompts were still computed after {seconds:g} s"
            raise Unavailable(f"{told}; flip it with more time, or later", code=UNDRAINED)

    async def _until_leaving(self, drain: Coroutine[None, None, None]) -> None:
        """The drain is cut short where the process leaves: that drains by itself, and has its whole time for it."""
        draining, told = asyncio.create_task(drain), asyncio.create_task(self.leaving.wait())
        try:
            await asyncio.wait({draining, told}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                await draining
        finally:
            for task in (draining, told):
                task.cancel()
            await asyncio.wait({draining, told})

    async def _exchange(self, now: WorkerStatus, role: Role, drafts: DraftParts) -> str:
        """End the drained life and begin one of the role, or where that fails of its own. The new one's instance."""
        assert self._life is not None
        self._last = self._life.worker.status()
        self.doors.close()
        self.shown(None)
        ended, self._life = self._life, None
        kept = ended.kv()
        try:
            await ended.end()
            del ended  # its KV is given back before the next one's is taken
            await give_back_kv(kept)
            self.flips += 1
            try:
                return (await self.begin(role, drafts, now.name)).identity.instance
            except (MillraceError, ValueError, RuntimeError, OSError, MemoryError) as error:
                self.flips -= 1
                await self.begin(now.role, await self.maker.drafts(now.role), now.name)
                await self.announcer.once()
                told = f"{now.name} stays {now.role}: it could not begin as {role}: {error}"
                raise Unavailable(told, code=KEPT) from error
        finally:
            if self._life is None:
                self.leaving.set()  # there is no worker any more
