"""The far end of `bench.handoff`: a process that takes KV in as a decode worker does, and has no model behind it.

It prints where it is reached, answers each line of its input with the CPU seconds it has used, and ends with it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Sequence

import torch
import uvloop

from bench.far import answer_cpu
from decode.service import DecodeService
from kvcache.handoff.chunk import Chunk, Commit, split, verify
from kvcache.handoff.local import LOCAL
from kvcache.memory.device import DeviceKV
from kvcache.transfer.choice import lenders_for
from kvcache.transfer.lent_memory import MemoryLenders
from serving.kvspec import LayerKV, gqa
from serving.malloc import keep_freed_memory
from serving.messages import LeaseId
from serving.rpc import listen, server

BLOCK = 16  # tokens


def smollm2_layers(layers: int) -> tuple[LayerKV, ...]:
    """SmolLM2-135M's KV: 3 heads of 64 in bfloat16, 768 bytes a token and layer."""
    return (gqa(3, 64, "bfloat16"),) * layers


class HandoffSink:
    """The receiving half (kvcache.handoff.local.Receiver): checks chunks, writes them into KV blocks as a lease's."""

    def __init__(self, specs: Sequence[LayerKV], tokens: int, lenders: MemoryLenders | None = None):
        blocks = -(-tokens // BLOCK)
        self.device_kv = DeviceKV(specs, blocks, BLOCK)
        self.blocks = list(range(blocks))
        self.lenders = lenders or MemoryLenders()
        self.receiving = 0

    async def begin(self, fence: LeaseId | None, generation: str) -> int:
        """Everything is to be handed over."""
        return 0

    async def receive(self, chunk: Chunk, via: str = LOCAL) -> None:
        await asyncio.to_thread(self._receive, chunk)

    def _receive(self, chunk: Chunk) -> None:
        verify(chunk, self.device_kv)
        slots = self.device_kv.slots(self.blocks, chunk.start, chunk.end)
        for layer, parts in enumerate(split(chunk, self.device_kv), chunk.first_layer):
            self.device_kv.write(layer, slots, parts)

    async def commit(self, commit: Commit, via: str = LOCAL) -> None:
        """Nothing follows."""


async def serve(layers: int, tokens: int, kv_transport: str) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    sink = HandoffSink(smollm2_layers(layers), tokens, lenders_for(kv_transport))
    grpc_server = server()
    port = listen(grpc_server, "127.0.0.1", 0)
    DecodeService(sink).add_to(grpc_server)  # type: ignore[arg-type]
    await grpc_server.start()
    found = {offer.kind: base64.b64encode(offer.details).decode() for offer in sink.lenders.offers}
    await answer_cpu(json.dumps({"address": f"127.0.0.1:{port}", "transports": found}))
    await grpc_server.stop(0)
    sink.lenders.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
