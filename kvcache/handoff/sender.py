"""The sending half of a KV handoff: layers leave as they are computed, coalesced into chunks, while the next computes.

It reads the device's tensors in a thread, so that neither the engine nor the event loop waits for a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcache.handoff.chunk import Chunk, encode, sealed_commit
from kvcache.memory.device import DeviceKV
from kvcache.memory.device_room import DeviceRoom
from kvcache.memory.kv_dtype import AS_STORED, Wire
from kvcache.memory.locations import KVLocation, KVLocations
from serving.engine.sequence import SequenceState
from serving.errors import StaleLease, WorkerLost
from serving.links import HandoffLink
from serving.messages import LeaseId

CHUNK_BYTES = 2 << 20  # chunks are cut near this size: large enough to amortise a message, small enough to overlap


class HandoffProgress:
    """Pure bookkeeping: which (layers, tokens) may leave, and which have. Every layer's tokens leave in order, once.

    `start` is the first token the other side lacks, `end` the last of the sequence, exclusive. Layers finish in
    order within a step; a step computes the sequence up to some token for all of them.
    """

    def __init__(self, layers: int, start: int, end: int, token_bytes: int):
        self.layers = layers
        self.end = end
        self.token_bytes = token_bytes  # of one layer
        self.ready = [start] * layers
        self.sent = [start] * layers

    def layer_done(self, layer: int, upto: int) -> None:
        self.ready[layer] = max(self.ready[layer], min(upto, self.end))

    def next(self) -> tuple[range, int, int] | None:
        """Layers and tokens (start, end) of a chunk that may leave now, about CHUNK_BYTES large; None to wait.

        Less than that waits for the layers which the step goes on to compute: the fewer messages, the more of the cores
        is left to it.
        """
        for first in range(self.layers):
            start, end = self.sent[first], self.ready[first]
            if start == end:
                continue
            last = first + 1
            while last < self.layers and (self.sent[last], self.ready[last]) == (start, end):
                last += 1
            room = max(1, CHUNK_BYTES // self.token_bytes)  # in tokens of one layer
            if last < self.layers and self.ready[last] < end and (last - first + 1) * (end - start) <= room:
                return None
            last = min(last, first + max(1, room // (end - start)))
            end = min(end, start + room)
            for layer in range(first, last):
                self.sent[layer] = end
            return range(first, last), start, end
        return None

    def leave_out(self, start: int) -> None:
        """The tokens before `start` are not to be sent. Before anything is."""
        start = min(start, self.end)
        self.sent = [max(start, sent) for sent in self.sent]
        self.ready = [max(start, ready) for ready in self.ready]

    @property
    def done(self) -> bool:
        return all(sent == self.end for sent in self.sent)


class Handoff:
    """One sequence's KV on its way to a lease. Run `send()` as a task; the engine loop calls `layer_done`.

    `layout` is the receiver's. `wire` says how KV is laid out for it; by default as it is stored here. `locations`
    says where KV is read that may move while it waits to leave; without it all lies in `device_kv`.
    """

    def __init__(
        self,
        device_kv: DeviceKV,
        link: HandoffLink,
        seq: SequenceState,
        fence: LeaseId,
        layout: str,
        start: int,
        *,
        wire: Wire | None = None,
        locations: KVLocations | None = None,
    ):
        self.locations = locations or KVLocations(device_kv)
        self.link = link
        self.seq = seq
        self.fence = fence
        self.layout = layout
        self.wire = wire or Wire(AS_STORED, device_kv.specs)
        layers = len(device_kv.specs)
        self.progress = HandoffProgress(layers, start, seq.start, max(1, self.wire.token_bytes // layers))
        self.bytes_sent = 0
        self.unreadable: WorkerLost | None = None  # why our own KV could not be read
        self._news = asyncio.Event()

    def layer_done(self, layer: int, upto: int) -> None:
        """The layer's KV is computed for the sequence's first `upto` tokens."""
        self.progress.layer_done(layer, upto)
        self._news.set()

    async def send(self) -> None:
        """Send what the other side does not bring itself, as it is computed. Raises what the link raises."""
        self.progress.leave_out(await self.link.begin())
        await self.run()

    async def commit(self, first_token: int, waited: Callable[[], float] = float) -> None:
        """All has been sent: hand the sequence over, with what the other side could not bring itself after all.

        `waited` says how many seconds ago the token was drawn. Raises what the link raises.
        """
        lacking = await self.link.commit(sealed_commit(self.fence, first_token, waited()))
        if not lacking:
            return
        if not 0 <= lacking.start < lacking.stop <= self.seq.start:
            raise StaleLease("the decode worker asks for tokens that do not exist", code="range")
        layers = len(self.progress.sent)
        self.progress = HandoffProgress(layers, lacking.start, lacking.stop, self.progress.token_bytes)
        for layer in range(layers):
            self.progress.layer_done(layer, lacking.stop)
        await self.run()
        if await self.link.commit(sealed_commit(self.fence, first_token, waited())):
            raise StaleLease("the decode worker still lacks KV", code="incomplete")

    async def run(self) -> None:
        """Send chunks until every token of every layer has left. Raises what the link raises."""
        while not self.progress.done:
            self._news.clear()
            while (due := self.progress.next()) is not None:
                for chunk in await asyncio.to_thread(self._encode, *due):
                    await self.link.push(chunk)
            if not self.progress.done:
                await self._news.wait()

    def _encode(self, layers: range, start: int, end: int) -> list[Chunk]:
        """These tokens as a chunk, or as one for each memory they lie in."""

        def encoded(location: KVLocation) -> Chunk:
            where = (location.blocks, location.start, location.end)
            room: DeviceRoom | None = None if self.locations.host is not None else self.link.room
            return encode(location.device_kv, self.fence, self.layout, layers, *where, wire=self.wire, room=room)

        try:
            chunks = self.locations.read(self.seq, start, end, encoded)
        except WorkerLost as lost:
            self.unreadable = lost
            raise
        self.bytes_sent += sum(len(chunk.payload) for chunk in chunks)
        return chunks
