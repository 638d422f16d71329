"""KV from device to device: chunks are packed and digested on the sender's, written by NIXL into buffers that the
receiver lends of its own, copied out of these there, digested again and unpacked. No byte of them passes a host.

What cannot go so, as KV that is laid out otherwise at the other end, passes through host memory as ever. Whether NIXL
moves this device's memory at all is tried out at the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.memory.device_room import DeviceRoom, copied_to_host
from kvcache.memory.staging_ring import ring_of
from kvcache.transfer.choice import AUTO
from kvcache.transfer.lent_memory import BUFFER_BYTES, BUFFERS, TRANSFER_BYTES, MemoryLender, TransferUnavailable
from kvcache.transfer.nixl_agent import KIND as NIXL
from kvcache.transfer.nixl_agent import VRAM, Agent, AgentMemory, installed
from kvcache.transfer.nixl_transport import TRANSFERS, AgentLender, NixlWriter, NixlWriters
from kvcache.transfer.payload import Payload
from kvcache.transfer.remote_write import RemoteWriters
from serving.messages import TransportOffer
from serving.streams import Streams, recorded, streams_of

log = logging.getLogger(__name__)

KIND = "nixl_device"
MEMORY = VRAM  # as NIXL calls it
PACKED_PLACES = TRANSFERS * (BUFFERS + 1)  # of a sender, 80 MiB: a chunk for each buffer, and one that waits for one
# Of a receiver, 16 MiB, between its buffers, 64 MiB, and its blocks: a transfer's chunks come one after the other.
TAKEN_PLACES = TRANSFERS
PROBE_BYTES = 4096
PROBE_SECONDS = 10.0


def serves(kv_transport: str, device: str) -> bool:
    """Whether `--kv-transport` lets KV of a worker on this torch device go so."""
    return torch.device(device).type == "cuda" and kv_transport in (AUTO, NIXL) and installed()


def device_lenders(kv_transport: str, device: str) -> Mapping[str, Callable[[], MemoryLender]]:
    """Makers of lenders of the device's memory (kvcache.transfer.choice.lenders_for)."""
    return {KIND: lambda: NixlDeviceLender(device)} if serves(kv_transport, device) else {}


def device_writers(kv_transport: str, device: str) -> dict[str, RemoteWriters]:
    """The sending halves out of the device's memory."""
    return {KIND: NixlDeviceWriters(device)} if serves(kv_transport, device) else {}


class NixlDeviceLender(AgentLender):
    """Lends memory of the device. Raises TransferUnavailable if NIXL does not move it."""

    kind = KIND

    def __init__(self, device: str) -> None:
        streams = streams_of(device)
        with _enough_memory():
            memory = streams.room(TRANSFERS * TRANSFER_BYTES)
            self.room = DeviceRoom(streams, TAKEN_PLACES, BUFFER_BYTES)
        super().__init__(moving_agent(0, streams, memory), memory, streams.address(memory))

    async def taken(self, address: int, length: int) -> Payload:
        return await asyncio.to_thread(self._taken, address, length)

    def _taken(self, address: int, length: int) -> Payload:
        first = address - self._first_address
        source: Tensor = self.memory[first : first + length]
        found = self.room.taken(source)
        return copied_to_host(self.room.streams, source) if found is None else found


class NixlDeviceWriters(NixlWriters):
    """The sending half of a process. Where NIXL does not move the device's memory, no writer leads anywhere."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.room: DeviceRoom | None = None
        self.broken: TransferUnavailable | None = None

    def writer(self, offer: TransportOffer) -> NixlDeviceWriter:
        if self.broken is not None:
            raise TransferUnavailable(str(self.broken))
        return NixlDeviceWriter(self, offer.details)

    def _started(self) -> Agent:
        streams = streams_of(self.device)
        try:
            with _enough_memory():
                room = DeviceRoom(streams, PACKED_PLACES, BUFFER_BYTES)
            agent = moving_agent(TRANSFERS * TRANSFER_BYTES, streams, room.memory)
        except TransferUnavailable as error:
            if self.broken is None:
                log.warning("KV leaves the device through host memory: %s", error)
            self.broken = error
            raise
        self.room = room
        return agent


class NixlDeviceWriter(NixlWriter):
    """One transfer's writes, out of the device's memory where their payloads lie there."""

    kind = KIND

    def __init__(self, writers: NixlDeviceWriters, metadata: bytes) -> None:
        super().__init__(writers, metadata)
        self.there = MEMORY
        self._device = writers

    @property
    def room(self) -> DeviceRoom | None:
        return self._device.room


@dataclass(frozen=True, slots=True)
class Probe:
    """Some bytes of the device (kvcache.transfer.payload.HeldPayload)."""

    address: int

    def __len__(self) -> int:
        return PROBE_BYTES

    def to_host(self) -> memoryview:
        raise AssertionError("a probe passes no host")


def moving_agent(size: int, streams: Streams, memory: Tensor) -> Agent:
    """An agent with `memory` of the device, of which it has moved some bytes, and `size` bytes of its own.

    Raises TransferUnavailable where it does not: UCX may register memory that it does not reach, or lack CUDA.
    """
    there = streams.address(memory)
    agent = Agent(size, AgentMemory(there, len(memory), MEMORY))
    try:
        _probe(agent, streams, memory)
    except BaseException:
        agent.close()
        raise
    return agent


@contextmanager
def _enough_memory() -> Iterator[None]:
    """A device without room for buffers is one that NIXL moves nothing of."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TransferUnavailable(f"the device lacks memory for buffers: {str(error).split('. ')[0]}") from error


def _probe(agent: Agent, streams: Streams, memory: Tensor) -> None:
    """Have the agent write bytes of the memory to another place in it, and look."""
    ring, there = ring_of(streams), streams.address(memory)
    host = streams.pinned(2 * PROBE_BYTES)
    host[:PROBE_BYTES].copy_(torch.randint(0, 256, (PROBE_BYTES,), dtype=torch.uint8))
    host[PROBE_BYTES:].fill_(0)
    with streams.on(ring.inward):
        memory[: 2 * PROBE_BYTES].copy_(host, non_blocking=True)
        recorded(streams).synchronize()
    written = agent.write(agent.name, 0, there + PROBE_BYTES, Probe(there), MEMORY)
    try:
        written.result(PROBE_SECONDS)
    except TimeoutError as error:
        raise TransferUnavailable(f"NIXL has not moved memory of the device within {PROBE_SECONDS:g} s") from error
    with streams.on(ring.outward):
        host[PROBE_BYTES:].copy_(memory[PROBE_BYTES : 2 * PROBE_BYTES], non_blocking=True)
        recorded(streams).synchronize()
    if not torch.equal(host[:PROBE_BYTES], host[PROBE_BYTES:]):
        raise TransferUnavailable("NIXL says that it has moved memory of the device, and has not")
