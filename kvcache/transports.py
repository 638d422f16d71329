"""How KV reaches a decode worker: in process by a direct call, or over a gRPC stream (serving.links.HandoffLink).

A transport moves chunks and reports refusals; it neither makes nor checks digests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from kvcache.chunk import Chunk
from serving.errors import WorkerLost
from serving.links import HandoffLink
from serving.messages import LeaseId
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, asking
from serving.wire import lease_to_pb

WINDOW = 4  # chunks that may wait to be written: bounds memory, keeps the wire busy


class Receiver(Protocol):
    """The receiving half: a decode worker."""

    async def receive(self, chunk: Chunk) -> None: ...
    async def commit(self, fence: LeaseId, first_token: int) -> None: ...


class LocalHandoff:
    """Hands chunks to a receiver in the same process (HandoffLink)."""

    def __init__(self, receiver: Receiver):
        self.receiver = receiver

    async def push(self, chunk: Chunk) -> None:
        await self.receiver.receive(chunk)

    async def commit(self, fence: LeaseId, first_token: int) -> None:
        await self.receiver.commit(fence, first_token)

    async def close(self) -> None:
        """Nothing is open."""


class GrpcHandoff:
    """One `Push` stream (HandoffLink). A refusal ends the stream; the next call here raises it."""

    def __init__(self, caller: Caller):
        self.caller = caller
        self._messages: asyncio.Queue[pb.PushMessage | None] = asyncio.Queue(WINDOW)
        self._call = asyncio.create_task(self._run(), name=f"push-{caller.address}")

    async def _run(self) -> None:
        with asking(self.caller.address):
            await stubs.DecodeStub(self.caller.channel).Push(self._outgoing(), metadata=self.caller.metadata)

    async def _outgoing(self) -> AsyncIterator[pb.PushMessage]:
        while (message := await self._messages.get()) is not None:
            yield message

    async def _put(self, message: pb.PushMessage | None) -> None:
        """Queue a message, unless the call ends first: then raise why."""
        put = asyncio.create_task(self._messages.put(message))
        try:
            await asyncio.wait([put, self._call], return_when=asyncio.FIRST_COMPLETED)
        finally:
            put.cancel()  # does nothing to one that is done
        if self._call.done():
            self._call.result()
            raise WorkerLost(f"{self.caller.address} ended the handoff early")

    async def push(self, chunk: Chunk) -> None:
        await self._put(pb.PushMessage(chunk=chunk_to_pb(chunk)))

    async def commit(self, fence: LeaseId, first_token: int) -> None:
        commit = pb.Commit(lease=lease_to_pb(fence), first_token=first_token)
        await self._put(pb.PushMessage(commit=commit))
        await self._put(None)
        await self._call

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._call, return_exceptions=True)


class Dialer:
    """Opens handoffs by address: `local` maps in-process names to receivers, everything else is host:port."""

    def __init__(self, local: dict[str, Receiver] | None = None, cluster_key: str | None = None):
        self.local = local if local is not None else {}
        self.cluster_key = cluster_key
        self._callers: dict[str, Caller] = {}

    def dial(self, address: str) -> HandoffLink:
        receiver = self.local.get(address)
        if receiver is not None:
            return LocalHandoff(receiver)
        caller = self._callers.get(address)
        if caller is None:
            caller = self._callers[address] = Caller(address, self.cluster_key)
        return GrpcHandoff(caller)

    async def close(self) -> None:
        for caller in self._callers.values():
            await caller.close()
        self._callers.clear()


def chunk_to_pb(chunk: Chunk) -> pb.Chunk:
    return pb.Chunk(
        lease=lease_to_pb(chunk.lease),
        layout=chunk.layout,
        first_layer=chunk.first_layer,
        last_layer=chunk.last_layer,
        start=chunk.start,
        end=chunk.end,
        payload=bytes(chunk.payload),
        digest=chunk.digest,
    )
