"""The sending half of a KV handoff: layers leave as they are computed, coalesced into chunks, while the next computes.

It reads the pool's tensors in a thread, so that neither the engine nor the event loop waits for a copy.
"""

from __future__ import annotations

import asyncio

from kvcache.chunk import Chunk, encode
from kvcache.device import DevicePool
from kvcache.relay import AS_STORED, Wire
from serving.engine.sequence import Sequence
from serving.links import HandoffLink
from serving.messages import LeaseId

CHUNK_BYTES = 1 << 20  # chunks are cut near this size: large enough to amortise a message, small enough to overlap


class HandoffPlan:
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
        """Layers and tokens (start, end) of a chunk that may leave now, about CHUNK_BYTES large; None to wait."""
        for first in range(self.layers):
            start, end = self.sent[first], self.ready[first]
            if start == end:
                continue
            last = first + 1
            while last < self.layers and (self.sent[last], self.ready[last]) == (start, end):
                last += 1
            room = max(1, CHUNK_BYTES // self.token_bytes)  # in tokens of one layer
            last = min(last, first + max(1, room // (end - start)))
            end = min(end, start + room)
            for layer in range(first, last):
                self.sent[layer] = end
            return range(first, last), start, end
        return None

    @property
    def done(self) -> bool:
        return all(sent == self.end for sent in self.sent)


class Handoff:
    """One sequence's KV on its way to a lease. `run()` it as a task; the engine feeds `layer_done`.

    `layout` is the receiver's, `wire` how KV is laid out for it; by default as it is stored here.
    """

    def __init__(
        self,
        pool: DevicePool,
        link: HandoffLink,
        seq: Sequence,
        fence: LeaseId,
        layout: str,
        start: int,
        *,
        wire: Wire | None = None,
    ):
        self.pool = pool
        self.link = link
        self.seq = seq
        self.fence = fence
        self.layout = layout
        self.wire = wire or Wire(AS_STORED, pool.specs)
        layers = len(pool.specs)
        self.plan = HandoffPlan(layers, start, seq.start, max(1, self.wire.token_bytes // layers))
        self.bytes_sent = 0
        self._news = asyncio.Event()

    def layer_done(self, layer: int, upto: int) -> None:
        """The layer's KV is computed for the sequence's first `upto` tokens."""
        self.plan.layer_done(layer, upto)
        self._news.set()

    async def run(self) -> None:
        """Send chunks until every token of every layer has left. Raises what the link raises."""
        while not self.plan.done:
            self._news.clear()
            while (piece := self.plan.next()) is not None:
                await self.link.push(await asyncio.to_thread(self._encode, *piece))
            if not self.plan.done:
                await self._news.wait()

    def _encode(self, layers: range, start: int, end: int) -> Chunk:
        chunk = encode(self.pool, self.fence, self.layout, layers, self.seq.blocks, start, end, wire=self.wire)
        self.bytes_sent += len(chunk.payload)
        return chunk
