"""Pool nodes for tests: over real stores, in process or behind gRPC on loopback, and what may be done to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from hashlib import sha256
from typing import Any

from kvcache.pool.block import DEFAULT_NAMESPACE, PoolBlock, Slab, make_block
from kvcache.pool.client import PoolClient
from kvcache.pool.links import PoolLink
from kvcache.pool.node import PoolNode
from kvcache.pool.remote import RemoteNode
from kvcache.pool.service import PoolService
from kvcache.pool.store import BlockStore
from kvcache.pool.storeconfig import StoreConfig
from kvcache.transfer.choice import lenders_on_demand
from serving.rpc import listen, server

KEY = "sesame"
KINDS = ("local", "grpc", "shm")  # in process; behind gRPC; with slabs in memory that both share
PARTS = 4
PATIENCE = 120.0  # seconds: a machine that stands still for a while is not a node that does not answer


def key(number: int) -> bytes:
    return sha256(b"key %d" % number).digest()


def content(number: int, part: int, size: int = 1000) -> bytes:
    return (sha256(b"content %d %d" % (number, part)).digest() * (size // 32 + 1))[:size]


def patient_client(make_link: Callable[[str], PoolLink], **options: Any) -> PoolClient:
    """What it does not find is not there, however busy the machine is."""
    return PoolClient(make_link, **{"timeout": PATIENCE, **options})


def block(number: int, *, parts: int = PARTS, size: int = 1000, namespace: str = DEFAULT_NAMESPACE) -> PoolBlock:
    return make_block(key(number), namespace, [content(number, part, size) for part in range(parts)])


class GatedStore(BlockStore):
    """Reads stop after `after` slabs until the gate is opened."""

    def __init__(self, config: StoreConfig):
        super().__init__(config)
        self.after: int | None = None
        self.reached, self.gate = threading.Event(), threading.Event()

    def read(self, keys: Sequence[bytes], first_part: int, last_part: int) -> Generator[Slab, None, None]:
        for number, slab in enumerate(super().read(keys, first_part, last_part)):
            if number == self.after:
                self.reached.set()
                assert self.gate.wait(10)
            yield slab


class Served:
    """A node and a link to it, of one kind. `address` is what a client would dial."""

    def __init__(self, kind: str, name: str = "node", port: int = 0, **config: Any):
        self.kind = kind
        self.name = name
        self.port = port
        self.store = GatedStore(StoreConfig(**{"ram_bytes": 64 << 20, **config}))
        self.alive = False

    async def start(self) -> Served:
        self.node = PoolNode(self.name, self.store, address=f"local:{self.name}")
        self.alive = True
        self.link: PoolLink = self.node
        if self.kind != "local":
            self.server = server(KEY)
            self.service = PoolService(self.node)
            self.service.add_to(self.server)
            self.node.address = f"127.0.0.1:{listen(self.server, '127.0.0.1', self.port)}"
            await self.server.start()
            self.lenders = lenders_on_demand(self.kind)
            self.link = RemoteNode(self.node.address, KEY, seconds=PATIENCE, lenders=self.lenders)
        self.address = self.node.address
        return self

    async def kill(self) -> None:
        """It answers no more, whatever it was doing."""
        self.alive = False
        if self.kind != "local":
            await self.server.stop(0)
            self.service.close()
        stopping = asyncio.create_task(self.node.stop())
        await asyncio.sleep(0)
        self.store.gate.set()
        await stopping

    async def stop(self) -> None:
        if self.alive:
            await self.kill()
        await self.link.close()
        if self.kind != "local":
            self.lenders.close()


class Cluster:
    """Several nodes, and how a client reaches them."""

    def __init__(self, kind: str, count: int, **config: Any):
        self.kind = kind
        self.served = [Served(kind, f"node-{number}", **config) for number in range(count)]
        self.lenders = lenders_on_demand("grpc" if kind == "local" else kind)

    async def __aenter__(self) -> Cluster:
        for served in self.served:
            await served.start()
        self.by_address = {served.address: served for served in self.served}
        return self

    async def __aexit__(self, *_: object) -> None:
        for served in self.served:
            await served.stop()
        self.lenders.close()

    @property
    def addresses(self) -> list[str]:
        return list(self.by_address)

    def link(self, address: str) -> PoolLink:
        if self.kind == "local":
            return self.by_address[address].node
        return RemoteNode(address, KEY, seconds=PATIENCE, lenders=self.lenders)
