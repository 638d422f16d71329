"""Opens handoffs to decode workers by the lease's grant: the first transport on offer that this process has too.

A channel to an address is kept for the next handoff, and ends when none has come for a while: workers that come back
have other addresses.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from kvcache.handoff.grpc_stream import GrpcHandoff
from kvcache.handoff.local import LocalHandoff, Receiver
from kvcache.handoff.nixl_device import device_writers
from kvcache.transfer.choice import writers_for
from kvcache.transfer.remote_write import writer_to
from serving.grpc_tls import GrpcTls
from serving.links import HandoffLink
from serving.messages import LeaseGrant
from serving.rpc import Caller

IDLE_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class _Channel:
    caller: Caller
    handoffs: int = 0
    ending: asyncio.TimerHandle | None = None  # set while there are none


class Dialer:
    """`local` maps in-process names to receivers; every other address is host:port.

    A channel without handoffs ends after `idle_seconds`.
    """

    def __init__(
        self,
        local: dict[str, Receiver] | None = None,
        cluster_key: str | None = None,
        kv_transport: str = "grpc",
        *,
        idle_seconds: float = IDLE_SECONDS,
        tls: GrpcTls | None = None,
        device: str = "cpu",
    ):
        """`device` is the torch device that KV is handed over from."""
        self.local = local if local is not None else {}
        self.cluster_key = cluster_key
        self.idle_seconds = idle_seconds
        self.tls = tls
        self._writers = device_writers(kv_transport, device) | writers_for(kv_transport)
        self._channels: dict[str, _Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def channels(self) -> int:
        """Open to other processes."""
        return len(self._channels)

    async def prepare(self) -> None:
        """Start what takes a while, NIXL half a second, so that the first handoff need not wait for it."""
        for writers in self._writers.values():
            await asyncio.to_thread(writers.prepare)

    def dial(self, grant: LeaseGrant, generation: str = "") -> HandoffLink:
        receiver = self.local.get(grant.address)
        if receiver is not None:
            return LocalHandoff(receiver, grant.lease, generation)
        channel = self._channels.get(grant.address)
        if channel is None:
            channel = self._channels[grant.address] = _Channel(Caller(grant.address, self.cluster_key, self.tls))
        if channel.ending is not None:
            channel.ending.cancel()
            channel.ending = None
        channel.handoffs += 1
        writer = writer_to(self._writers, grant.transports)
        ended = partial(self._closed, grant.address, channel)
        return GrpcHandoff(channel.caller, writer, grant.lease, generation, closed=ended)

    def _closed(self, address: str, channel: _Channel) -> None:
        """A handoff over the channel has ended."""
        channel.handoffs -= 1
        if not channel.handoffs and self._channels.get(address) is channel:
            channel.ending = asyncio.get_running_loop().call_later(self.idle_seconds, self._end, address)

    def _end(self, address: str) -> None:
        task = asyncio.get_running_loop().create_task(self._channels.pop(address).caller.close(), name="close-channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            if channel.ending is not None:
                channel.ending.cancel()
        await asyncio.gather(*(channel.caller.close() for channel in channels), *self._closing)
        for writers in self._writers.values():
            writers.close()
