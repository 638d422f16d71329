"""A receiver reached over each transport: in process, over a stream on loopback, or into buffers beside the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from decode.service import DecodeService
from decode.worker import DecodeWorker
from kvcache.handoff.dialer import Dialer
from kvcache.handoff.local import Receiver
from kvcache.transfer.choice import lenders_for
from kvcache.transfer.lent_memory import MemoryLenders
from kvcache.transfer.nixl_agent import installed
from serving.links import HandoffLink
from serving.messages import LeaseGrant, LeaseId, TransportOffer
from serving.rpc import server
from tests.fakes.sequences import lease_id

needs_nixl = pytest.mark.skipif(not installed(), reason="nixl is not installed")
BESIDE = ("shm", pytest.param("nixl", marks=needs_nixl))  # transports that write into buffers beside the stream
STREAMS = ("grpc", *BESIDE)
TRANSPORTS = ("local", *STREAMS)


class Way:
    """A dialer, and how it reaches the receiver; `kind` is the transport all bytes must take."""

    def __init__(self, kind: str, receiver: Any):
        self.kind = kind
        self.receiver = receiver
        self.generation = receiver.identity.generation if isinstance(receiver, DecodeWorker) else ""
        self.lenders = MemoryLenders()
        self.dialer = Dialer(kv_transport="grpc" if kind == "local" else kind)

    async def start(self) -> None:
        self.address = "local:decode"
        if self.kind == "local":
            local: Receiver = self.receiver
            self.dialer.local[self.address] = local
            return
        if self.kind != "grpc":
            self.lenders = self.receiver.lenders = lenders_for(self.kind)
        self.server: aio.Server = server()
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        DecodeService(self.receiver).add_to(self.server)
        await self.server.start()

    async def stop(self) -> None:
        await self.dialer.close()
        if self.kind != "local":
            await self.server.stop(0)
        self.lenders.close()

    def dial(self) -> HandoffLink:
        return self.dialer.dial(granted(self.address, *self.lenders.offers), self.generation)


def granted(address: str, *offers: TransportOffer, fence: LeaseId | None = None) -> LeaseGrant:
    return LeaseGrant(
        lease=fence or lease_id(), cached_tokens=0, address=address, kv_dtype="float32", transports=offers
    )


@asynccontextmanager
async def way_to(kind: str, receiver: Any) -> AsyncIterator[Way]:
    made = Way(kind, receiver)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
