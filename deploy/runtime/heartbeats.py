"""How a worker or a pool node tells every router that it is there, and learns from them where the KV pool is.

What a heartbeat says is the caller's; this only repeats it until told otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from math import inf

from deploy.runtime.discovery import LOOKUP_SECONDS, RouterDirectory
from deploy.runtime.roles import role_of
from serving.background import BackgroundTasks
from serving.config import ClusterConfig, PlacementConfig
from serving.errors import InvalidRequest, MillraceError, Unauthorized
from serving.grpc_tls import GrpcTls
from serving.messages import Role
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, asking, refused_by_tls

log = logging.getLogger(__name__)

NEWS_AFTER = 0.02  # seconds from a change until routers are told of it, so that what comes with it is told too
NEWS_GAP = 0.05  # seconds between two heartbeats to a router, at least,
NEWS_SHARE = 0.02  # of which it takes this much at most to answer one: one that has much to do is told less often.
NEWS_LOAD = 0.2  # It takes that much at most to answer all its workers, so that of many each tells it less often.

Send = Callable[[Caller, float], Awaitable[pb.HeartbeatReply]]
"""Sends one heartbeat to a router, within so many seconds."""


def news_gap(seconds: float, workers: int) -> float:
    """Seconds between two heartbeats with news to a router of so many workers that answers one in `seconds`."""
    return max(NEWS_GAP, seconds / NEWS_SHARE, seconds * workers / NEWS_LOAD)


class Heartbeats:
    """`run()` beats until cancelled, to each router at its own pace: one that is dead slows no other.

    Where there are several routers, `news()` tells each of what the others may have sent, without waiting for its turn.

    Names marked in `--routers` are looked up again and again: each address is a router. One that its name has lost
    stays one while it answers: it takes us for dead without heartbeats, and its requests with us would be lost.

    With `parent` set, `orphaned` is called once that process is gone. `on_pool_nodes` is told the pool's nodes, those
    any router knows and `fixed_nodes`, whenever they change. Mistakes of our own are counted in `restarts`.
    """

    def __init__(
        self,
        send: Send,
        cluster: ClusterConfig,
        placement: PlacementConfig,
        *,
        fixed_nodes: Iterable[str] = (),
        on_pool_nodes: Callable[[list[str]], None] | None = None,
        parent: int | None = None,
        orphaned: Callable[[], None] = lambda: None,
        restarts: Counter[str] | None = None,
        tls: GrpcTls | None = None,
    ):
        self.send = send
        self.interval, self.silence = placement.heartbeat_interval, placement.heartbeat_timeout
        self.fixed_nodes = tuple(fixed_nodes)
        self.on_pool_nodes = on_pool_nodes
        self.parent = parent
        self.orphaned = orphaned
        self._background = BackgroundTasks(restarts)
        self._cluster_key, self._tls = cluster.cluster_key, tls
        self.directory = RouterDirectory(cluster.routers)
        self._callers = {address: self._caller(address) for address in self.directory.fixed}
        self._heard: dict[str, tuple[str, ...]] = {}  # the pool's nodes by the router that told us
        self._told: list[str] = []
        self._answered: dict[str, float] = {}  # when each router did so last, by the loop's clock
        self._refusals: dict[str, str] = {}  # what a router refuses us for, until it takes us
        self._news: dict[str, asyncio.Event] = {}  # by router: there is some since its last heartbeat
        self._workers: dict[str, int] = {}  # that beat to each router, as it said last

    async def run(self) -> None:
        try:
            self._tell()
            for caller in self._callers.values():
                self._background.start("heartbeats", partial(self._keep_beating, caller))
            if self.directory.names:
                self._background.start("routers", self._keep_finding)
            if self.parent is not None:
                self._background.start("parent", self._watch_parent)
            await asyncio.Event().wait()
        finally:
            await self._background.stop()
            for caller in self._callers.values():
                await caller.close()

    async def once(self) -> None:
        """Tell every router now."""
        await asyncio.gather(*(self._beat(caller) for caller in list(self._callers.values())))

    def news(self) -> None:
        """What the last heartbeats said is no longer so. A lone router knows: whatever comes, it has sent."""
        if len(self._callers) > 1:
            for event in self._news.values():
                event.set()

    async def during(self, drain: Coroutine[None, None, None]) -> None:
        """Begin the drain, tell every router at once that it has begun, and see it through. Cancelled, so is it."""
        draining = asyncio.create_task(drain)
        try:
            await asyncio.sleep(0)
            await self.once()
            await draining
        finally:
            draining.cancel()

    async def lacking(self, name: str) -> Role | None:
        """The role that a router would have no worker for without this one. Who does not answer has no say."""
        for caller in list(self._callers.values()):
            request, seconds = pb.WithoutRequest(worker=name), max(1.0, self.interval)
            ask = stubs.RegistryStub(caller.channel).Without
            try:
                with asking(caller.address):
                    reply = await ask(request, metadata=caller.metadata, timeout=seconds)
            except MillraceError as error:
                log.info("%s does not say who else serves: %s", caller.address, error.message)
                continue
            if reply.role:
                return role_of(reply.role)
        return None

    def _caller(self, address: str) -> Caller:
        return Caller(address, self._cluster_key, self._tls)

    async def _keep_finding(self) -> None:
        while True:
            await self._find_routers()
            await asyncio.sleep(LOOKUP_SECONDS)

    async def _find_routers(self) -> None:
        """Begin to beat to each new router, and end it for those that are silent and that no name has any more."""
        found = await self.directory.now()
        for address in [one for one in self._callers if one not in found and self._is_silent(one)]:
            log.info("%s is no router any more", address)
            for known in (self._heard, self._answered, self._refusals, self._workers):
                known.pop(address, None)
            await self._callers.pop(address).close()
        self._tell()
        for address in found:
            if address not in self._callers:
                self._callers[address] = caller = self._caller(address)
                self._background.start("heartbeats", partial(self._keep_beating, caller))

    def _is_silent(self, router: str) -> bool:
        """True if it has not answered for as long as takes it to hold us for dead."""
        answered = self._answered.get(router)
        return answered is None or asyncio.get_running_loop().time() - answered > self.silence

    async def _keep_beating(self, caller: Caller) -> None:
        clock = asyncio.get_running_loop().time
        news = self._news[caller.address] = asyncio.Event()
        while self._callers.get(caller.address) is caller:
            began = clock()
            news.clear()
            await self._beat(caller)
            if self._answered.get(caller.address, -inf) < began:  # what it would be told now it hears at its turn
                await asyncio.sleep(began + self.interval - clock())
                continue
            soonest = began + news_gap(clock() - began, self._workers.get(caller.address, 1))
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + self.interval):
                    await news.wait()
                    await asyncio.sleep(max(NEWS_AFTER, soonest - clock()))
        if self._news.get(caller.address) is news:
            del self._news[caller.address]

    async def _watch_parent(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            if os.getppid() != self.parent:
                break
        log.warning("the process that started this one is gone")
        self.orphaned()

    async def _beat(self, caller: Caller) -> None:
        """A router that does not answer keeps its last word: its nodes may well be there."""
        try:
            with asking(caller.address):
                reply = await self.send(caller, max(1.0, self.interval))
        except (Unauthorized, InvalidRequest) as error:
            self._refused(caller.address, error)
        except MillraceError as error:
            self._unanswered(caller.address, error)
        else:
            if self._callers.get(caller.address) is not caller:
                return  # it was a router when it was asked
            self._refusals.pop(caller.address, None)
            self._answered[caller.address] = asyncio.get_running_loop().time()
            self._heard[caller.address] = tuple(reply.pool_nodes)
            self._workers[caller.address] = reply.workers
            self._tell()

    def _unanswered(self, router: str, error: MillraceError) -> None:
        """Routers may well be away; what certificates may be the reason of is said once, until it answers."""
        said = self._refusals.get(router) == error.message or not refused_by_tls(error)
        log.log(logging.DEBUG if said else logging.WARNING, "router %s does not answer: %s", router, error.message)
        if not said:
            self._refusals[router] = error.message

    def _refused(self, router: str, error: MillraceError) -> None:
        """Say why once; the next heartbeat asks again, as the router may be another by then."""
        if self._refusals.get(router) != error.message:
            self._refusals[router] = error.message
            log.error("router %s refuses us: %s", router, error.message)

    def _tell(self) -> None:
        nodes = sorted({*self.fixed_nodes, *(node for heard in self._heard.values() for node in heard)})
        if self.on_pool_nodes is not None and nodes != self._told:
            self._told = nodes
            self.on_pool_nodes(list(nodes))


class RouterClocks:
    """What the clock of each router says now: its last reply's, and what has passed here since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._told: dict[str, tuple[float, float]] = {}  # by router: its time, and ours when that came

    def told(self, router: str, router_time: float) -> None:
        self._told[router] = (router_time, self.clock())

    def forget(self, router: str) -> None:
        """It did not answer: it may be another one, with another clock, when it does."""
        self._told.pop(router, None)

    def now(self, router: str) -> float | None:
        """Its time, late by as long as the reply was on its way; None before it has answered."""
        if router not in self._told:
            return None
        router_time, then = self._told[router]
        return router_time + self.clock() - then
