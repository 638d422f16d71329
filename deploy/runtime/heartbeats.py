"""How a worker or a pool node tells every router that it is there, and learns from them where the KV pool is.

What a heartbeat says is the caller's; this only repeats it until told otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable

from serving.config import ClusterConfig, PlacementConfig
from serving.errors import MillraceError, Unauthorized
from serving.proto import millrace_pb2 as pb
from serving.rpc import Caller, asking

log = logging.getLogger(__name__)

Send = Callable[[Caller, float], Awaitable[pb.HeartbeatReply]]
"""Sends one heartbeat to a router, within so many seconds."""


class Heartbeats:
    """`run()` beats until cancelled. With `parent` set, `orphaned` is called once that process is gone.

    `on_pool_nodes` is told the pool's nodes, those any router knows and `fixed_nodes`, whenever they change.
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
    ):
        self.send = send
        self.interval = placement.heartbeat_interval
        self.fixed_nodes = tuple(fixed_nodes)
        self.on_pool_nodes = on_pool_nodes
        self.parent = parent
        self.orphaned = orphaned
        self._callers = [Caller(address, cluster.cluster_key) for address in addresses(cluster.routers)]
        self._heard: dict[str, tuple[str, ...]] = {}  # the pool's nodes by the router that told us
        self._told: list[str] = []

    async def run(self) -> None:
        try:
            self._tell()
            while True:
                await self.once()
                if self.parent is not None and os.getppid() != self.parent:
                    log.warning("the process that started this one is gone")
                    self.orphaned()
                await asyncio.sleep(self.interval)
        finally:
            for caller in self._callers:
                await caller.close()

    async def once(self) -> None:
        """Tell every router now."""
        await asyncio.gather(*(self._beat(caller) for caller in self._callers))

    async def during(self, drain: Coroutine[None, None, None]) -> None:
        """Begin the drain, tell every router at once that it has begun, and see it through."""
        draining = asyncio.create_task(drain)
        await asyncio.sleep(0)
        await self.once()
        await draining

    async def _beat(self, caller: Caller) -> None:
        """A router that does not answer keeps its last word: its nodes may well be there."""
        try:
            with asking(caller.address):
                reply = await self.send(caller, max(1.0, self.interval))
        except Unauthorized as error:
            log.error("router %s refuses us: %s", caller.address, error.message)
        except MillraceError as error:
            log.debug("router %s does not answer: %s", caller.address, error.message)
        else:
            self._heard[caller.address] = tuple(reply.pool_nodes)
            self._tell()

    def _tell(self) -> None:
        nodes = sorted({*self.fixed_nodes, *(node for heard in self._heard.values() for node in heard)})
        if self.on_pool_nodes is not None and nodes != self._told:
            self._told = nodes
            self.on_pool_nodes(list(nodes))


def addresses(text: str | None) -> list[str]:
    """`a:1, b:2` → ["a:1", "b:2"]."""
    return [address.strip() for address in (text or "").split(",") if address.strip()]
