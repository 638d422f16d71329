"""What lies between simulated processes: messages that take a moment, and KV that shares each worker's bandwidth.

It carries production messages, chunks and commits, and decides nothing. All waiting is on the event loop's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from decode.worker import RouterSession
from deploy.simulator.held_tokens import HeldTokens
from kvcache.handoff.chunk import Chunk, Commit
from kvcache.handoff.local import Receiver
from router.fleet import WorkerLink
from serving.errors import MillraceError
from serving.links import DecodeSession, Deliver, HandoffLink
from serving.messages import Audit, LeaseGrant, LeaseOrder, Prefilled, PrefillOrder

MODELLED = "modelled"  # the transport's name in a decode worker's accounts


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkModel:
    """`message_seconds` one way, of any message; `transfer_seconds` beside those that a chunk's bytes take.

    `commit_seconds` pass at the end of a handoff, until its sequence can decode: what no chunk before has hidden.
    """

    message_seconds: float = 2e-4
    transfer_seconds: float = 5e-4
    commit_seconds: float = 0.0
    bytes_per_second: float = 25e9  # into a worker, and out of one

    def __post_init__(self) -> None:
        if min(self.message_seconds, self.transfer_seconds, self.commit_seconds) < 0 or self.bytes_per_second <= 0:
            raise ValueError("a network's seconds cannot be negative, and its bandwidth must be positive")


class Ports:
    """Each worker's way in and way out, by its address: a transfer takes both, each behind what came there before it.

    Neither waits for the other: what another receiver keeps waiting takes nothing of this one's way in.
    """

    def __init__(self) -> None:
        self._out: dict[str, float] = {}  # when it is free, by address
        self._in: dict[str, float] = {}

    async def carry(self, sender: str, receiver: str, seconds: float) -> None:
        """A transfer that takes each way so long: it arrives as it leaves, once the way in is free."""
        loop = asyncio.get_running_loop()
        begins = max(loop.time(), self._out.get(sender, 0.0))
        self._out[sender] = begins + seconds
        if begins > loop.time():
            await asyncio.sleep(begins - loop.time())
        ends = self._in[receiver] = max(begins, self._in.get(receiver, 0.0)) + seconds
        await asyncio.sleep(ends - loop.time())


class ModelledDialer:
    """One worker's way to hand KV over (serving.links.HandoffDialer). `receivers` are decode workers by address.

    A token's KV takes `kv_bytes` on the wire, whatever the chunks hold.
    """

    def __init__(
        self, address: str, receivers: dict[str, Receiver], ports: Ports, network: NetworkModel, kv_bytes: float
    ):
        self.address = address
        self.receivers = receivers
        self.ports = ports
        self.network = network
        self.kv_bytes = kv_bytes

    def dial(self, grant: LeaseGrant, generation: str = "") -> HandoffLink:
        return ModelledHandoff(self, grant, generation)


class ModelledHandoff:
    """One handoff (serving.links.HandoffLink). The next chunk waits until this one is there: that is its back-pressure.

    Chunks are laid out for workers of one KV layer of a byte, so a chunk's bytes are its tokens.
    """

    room = None

    def __init__(self, dialer: ModelledDialer, grant: LeaseGrant, generation: str):
        self.dialer = dialer
        self.generation = generation
        self.grant = grant
        self.receiver = dialer.receivers[grant.address]

    async def begin(self) -> int:
        await asyncio.sleep(self.dialer.network.message_seconds)
        return await self.receiver.begin(self.grant.lease, self.generation)

    async def push(self, chunk: Chunk) -> None:
        dialer = self.dialer
        seconds = len(chunk.payload) * dialer.kv_bytes / dialer.network.bytes_per_second
        await dialer.ports.carry(dialer.address, self.grant.address, seconds)
        await asyncio.sleep(dialer.network.transfer_seconds)
        await self.receiver.receive(chunk, MODELLED)

    async def commit(self, commit: Commit) -> range | None:
        await asyncio.sleep(self.dialer.network.message_seconds + self.dialer.network.commit_seconds)
        return await self.receiver.commit(commit, MODELLED)

    async def close(self) -> None:
        """Nothing is open."""


class DecodingLink(WorkerLink, Protocol):
    """A worker in this process."""

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> RouterSession: ...


class ModelledLink:
    """A router's way to a worker (router.fleet.WorkerLink): the worker itself, some time away.

    `placed` is told of the requests that are leased or prefilled there: request id, worker's name, and `decode` or
    `prefill`. `steps_since` says how many steps of the worker have ended later than at some time.
    """

    def __init__(
        self,
        worker: DecodingLink,
        name: str,
        seconds: float,
        placed: Callable[[str, str, str], None],
        steps_since: Callable[[float], int],
    ):
        self.worker = worker
        self.steps_since = steps_since
        self.name = name
        self.seconds = seconds
        self.placed = placed
        self._held: list[HeldTokens] = []  # of each session

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> DecodeSession:
        await asyncio.sleep(self.seconds)
        loop = asyncio.get_running_loop()
        held = HeldTokens(deliver, self.seconds, loop.time, loop.call_later)
        session = await self.worker.connect(router, held.send, lost)
        held.untold = lambda: session.untold(self.steps_since(loop.time() - self.seconds))
        self._held.append(held)
        return ModelledSession(self, session, held)

    def flush(self) -> None:
        """Deliver the tokens that have come by now."""
        for held in self._held:
            held.flush()

    async def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        await asyncio.sleep(self.seconds)
        self.placed(order.order.request.request_id, self.name, "prefill")
        async with aclosing(self.worker.run(order)) as results:  # type: ignore[type-var]
            async for prefilled in results:
                await asyncio.sleep(self.seconds)
                yield prefilled

    async def audit(self) -> list[Audit]:
        return await self.worker.audit()

    async def close(self) -> None:
        await self.worker.close()


class ModelledSession:
    """A session with a worker some time away (serving.links.DecodeSession)."""

    def __init__(self, link: ModelledLink, session: DecodeSession, held: HeldTokens):
        self.link = link
        self.session = session
        self.held = held

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        await asyncio.sleep(self.link.seconds)
        grant = await self.session.open(order)
        self.link.placed(order.request.request_id, self.link.name, "decode")
        await asyncio.sleep(self.link.seconds)  # one whose request has left meanwhile is cancelled by its session
        return grant

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        await asyncio.sleep(2 * self.link.seconds)
        return await self.session.advance(order)

    def cancel(self, lease: str) -> None:
        self.held.forget(lease)
        if self.link.seconds == 0.0:
            self.session.cancel(lease)
        else:
            asyncio.get_running_loop().call_later(self.link.seconds, self.session.cancel, lease)

    async def close(self) -> None:
        await self.session.close()
