"""Memory written by NIXL: the lender of its buffers, and the writer that fills them from the other end.

The buffers are never KV blocks: a write that comes late may hit memory that is lent to another transfer by then, and
here that can only be a buffer, whose bytes are copied out before their digest is checked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from kvcache.transfer.lending import Lending
from kvcache.transfer.lent_memory import (
    BUFFER_BYTES,
    BUFFERS,
    TRANSFER_BYTES,
    LentBuffers,
    MemoryLender,
    NoBuffers,
    TransferUnavailable,
)
from kvcache.transfer.nixl_agent import DRAM, KIND, Agent
from kvcache.transfer.payload import Payload, Room
from serving.messages import TransportOffer

TRANSFERS = 8  # at a time; more go over the stream. Memory is taken up when it is first written to: 64 MiB in all
REST_SECONDS = 60.0  # how long the buffers of a lost sender rest: far longer than it waits for a write
SETTLE_SECONDS = 2.0  # how long the end of a transfer waits for its writes


class AgentLender(MemoryLender):
    """Lends memory that `agent` has registered."""

    def __init__(self, agent: Agent, memory: Any, first_address: int) -> None:
        self.agent = agent
        offer = TransportOffer(kind=self.kind, details=agent.metadata)
        super().__init__(offer, memory, first_address, REST_SECONDS)

    def lend(self) -> LentBuffers:
        if self.agent.over:  # nothing would arrive
            return LentBuffers()
        lent = super().lend()
        self.agent.expecting(+bool(lent))
        return lent

    def take_back(self, lent: LentBuffers, *, settled: bool) -> None:
        super().take_back(lent, settled=settled)
        self.agent.expecting(-1)

    def close(self) -> None:
        self.agent.close()


class NixlLender(AgentLender):
    """Lends an agent's own memory. Raises TransferUnavailable if NIXL will not start."""

    kind = KIND

    def __init__(self) -> None:
        agent = Agent(TRANSFERS * TRANSFER_BYTES)
        super().__init__(agent, agent.memory, agent.base)


class NixlWriters:
    """The sending half of a process (remote_write.RemoteWriters). NIXL starts with the first transfer."""

    def __init__(self) -> None:
        self.lending = Lending(TRANSFERS, REST_SECONDS)
        self._agent: Agent | None = None
        self._starting = threading.Lock()

    def writer(self, offer: TransportOffer) -> NixlWriter:
        return NixlWriter(self, offer.details)

    def prepare(self) -> None:
        with suppress(TransferUnavailable):
            self.agent()

    def agent(self) -> Agent:
        """Takes a while the first time, and where the last one's thread has broken. Raises TransferUnavailable."""
        with self._starting:
            if self._agent is None or self._agent.over:
                self._agent = self._started()
            return self._agent

    def _started(self) -> Agent:
        return Agent(TRANSFERS * TRANSFER_BYTES)

    def close(self) -> None:
        with self._starting:
            if self._agent is not None:
                self._agent.close()
                self._agent = None


class NixlWriter:
    """One transfer's writes (kvcache.transfer.remote_write.RemoteWriter), out of buffers at this end."""

    kind = KIND
    there = DRAM  # the kind of memory that is written to

    @property
    def room(self) -> Room | None:
        return None

    def __init__(self, writers: NixlWriters, metadata: bytes):
        self.writers = writers
        self.metadata = metadata
        self._part: int | None = None
        self._writes: list[Future[None]] = []

    async def connect(self) -> None:
        self._part = self.writers.lending.lend(time.monotonic())
        if self._part is None:
            raise NoBuffers("all buffers at this end are in use")
        self._agent = await asyncio.to_thread(self.writers.agent)
        self._peer = await asyncio.wrap_future(self._agent.meet(self.metadata))

    def write(self, buffer: int, address: int, payload: Payload) -> asyncio.Future[None]:
        assert self._part is not None and buffer < BUFFERS
        offset = self._part * TRANSFER_BYTES + buffer * BUFFER_BYTES
        done = self._agent.write(self._peer, offset, address, payload, self.there)
        self._writes = [write for write in self._writes if not write.done()] + [done]
        written = asyncio.wrap_future(done)
        written.add_done_callback(lambda over: over.cancelled() or over.exception())  # no caller may be left to ask
        return written

    async def settle(self) -> bool:
        left = [asyncio.wrap_future(write) for write in self._writes if not write.done()]
        if left:
            await asyncio.wait(left, timeout=SETTLE_SECONDS)
        settled = all(write.done() for write in self._writes)
        if self._part is not None:
            self.writers.lending.take_back(self._part, time.monotonic(), settled=settled)
            self._part = None
        return settled
