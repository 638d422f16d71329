"""Times the handoff of a prompt's KV to another process over each transport: `python -m bench.handoff`.

Layers leave while a stand-in for the prefill computes on all the threads it is given, as they do in a worker; a second
figure has all layers ready at once. Rounds take the transports in turn; medians are shown beside a plain memcpy.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import uvloop

from bench.far import FarProcess, memcpy_seconds
from bench.report import aligned
from bench.sink import BLOCK, HandoffSink, smollm2_layers
from kvcache.handoff.chunk import sealed_commit
from kvcache.handoff.dialer import Dialer
from kvcache.handoff.sender import Handoff
from kvcache.memory.device import DeviceKV, token_bytes
from kvcache.transfer.choice import LENDERS, chosen
from serving.engine.sequence import SequenceState
from serving.links import HandoffLink
from serving.malloc import keep_freed_memory
from serving.messages import LeaseGrant, LeaseId, LeaseOrder, Request, SamplingParams, TransportOffer

FENCE = LeaseId(lease="bench", epoch=0, instance="sink")
LOCAL, GRPC = "local", "grpc"
STEP_TOKENS = 512  # tokens a step computes, as a worker by default


@dataclass
class Figures:
    """One transport's rounds: seconds, and CPU seconds of each end."""

    name: str
    at_once: list[float] = field(default_factory=list)  # all layers ready
    beside: list[float] = field(default_factory=list)  # from the prefill's begin to the commit
    alone: list[float] = field(default_factory=list)  # the same prefill without a handoff
    sender_cpu: list[float] = field(default_factory=list)
    receiver_cpu: list[float] = field(default_factory=list)


class Prefill:
    """Something to compute: `layers` products a step, in a thread, on all of torch's threads, `seconds` in all."""

    def __init__(self, layers: int, tokens: int, seconds: float):
        self.layers = layers
        self.steps = [min(upto, tokens) for upto in range(STEP_TOKENS, tokens + STEP_TOKENS, STEP_TOKENS)]
        self.left, self.right = torch.randn(STEP_TOKENS, 576), torch.randn(576, 1536)
        self.products = 1
        self.run(lambda layer, upto: None)  # threads start, caches warm up
        took = min(self.timed() for _ in range(3))
        self.products = max(1, round(seconds / took))

    def timed(self) -> float:
        began = time.perf_counter()
        self.run(lambda layer, upto: None)
        return time.perf_counter() - began

    def run(self, layer_done: Callable[[int, int], None]) -> None:
        for upto in self.steps:
            for layer in range(self.layers):
                for _ in range(self.products):
                    torch.mm(self.left, self.right)
                layer_done(layer, upto)


class FarEnd(FarProcess):
    """The process of bench.sink."""

    def __init__(self, layers: int, tokens: int, kv_transport: str):
        super().__init__("bench.sink", str(layers), str(tokens), kv_transport)
        told = json.loads(self.told)
        self.address: str = told["address"]
        self.offers = {kind: base64.b64decode(details) for kind, details in told["transports"].items()}


class Bench:
    """The near end: a full KV cache, and links to the far end over each transport."""

    def __init__(self, options: argparse.Namespace):
        self.tokens: int = options.tokens
        specs = smollm2_layers(options.layers)
        self.bytes = token_bytes(specs) * self.tokens
        blocks = -(-self.tokens // BLOCK)
        self.device_kv = DeviceKV(specs, blocks, BLOCK)
        for planes in self.device_kv.planes:
            for plane in planes:
                plane.view(torch.uint8).random_(256)
        self.far = FarEnd(options.layers, self.tokens, options.kv_transport)
        self.here = HandoffSink(specs, self.tokens)
        self.prefill = Prefill(options.layers, self.tokens, options.prefill_ms / 1000)
        self.dialer = Dialer({LOCAL: self.here}, kv_transport=options.kv_transport)
        self.names = [LOCAL, GRPC, *self.far.offers]

    def dial(self, name: str) -> HandoffLink:
        offers = [TransportOffer(kind=name, details=self.far.offers[name])] if name in self.far.offers else []
        address = LOCAL if name == LOCAL else self.far.address
        return self.dialer.dial(
            LeaseGrant(lease=FENCE, cached_tokens=0, address=address, kv_dtype="bfloat16", transports=tuple(offers))
        )

    def sequence(self) -> SequenceState:
        request = Request(request_id="bench", prompt=(0,) * self.tokens, sampling=SamplingParams(max_tokens=1))
        seq = SequenceState(LeaseOrder(lease=FENCE, request=request), root=b"", stays=False)
        seq.blocks = list(range(self.device_kv.num_blocks))
        return seq

    async def hand_over(self, name: str, *, beside_prefill: bool) -> float:
        """Seconds from the first layer's begin to the commit."""
        link = self.dial(name)
        handoff = Handoff(self.device_kv, link, self.sequence(), FENCE, "bench", 0)
        loop = asyncio.get_running_loop()
        began = time.perf_counter()

        def layer_done(layer: int, upto: int) -> None:
            loop.call_soon_threadsafe(handoff.layer_done, layer, upto)

        if beside_prefill:
            threading.Thread(target=self.prefill.run, args=(layer_done,)).start()
        else:
            for layer in range(len(self.device_kv.specs)):
                handoff.layer_done(layer, self.tokens)
        await handoff.run()
        await link.commit(sealed_commit(FENCE, 0))
        took = time.perf_counter() - began
        await link.close()
        return took

    async def round(self, figures: Figures) -> None:
        cpu = time.process_time(), self.far.cpu()
        figures.at_once.append(await self.hand_over(figures.name, beside_prefill=False))
        figures.sender_cpu.append(time.process_time() - cpu[0])
        figures.receiver_cpu.append(self.far.cpu() - cpu[1])
        figures.alone.append(await asyncio.to_thread(self.prefill.timed))
        figures.beside.append(await self.hand_over(figures.name, beside_prefill=True))

    async def run(self, rounds: int) -> list[Figures]:
        await self.dialer.prepare()
        found = [Figures(name) for name in self.names]
        for figures in found:
            await self.round(Figures(figures.name))  # connections, pages and caches
        for _ in range(rounds):
            for figures in found:
                await self.round(figures)
        return found

    def arrived(self) -> bool:
        """True if what came to the near sink is what left, byte for byte."""
        pairs = zip(self.device_kv.planes, self.here.device_kv.planes, strict=True)
        return all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for x in pairs for a, b in zip(*x, strict=True)
        )

    async def close(self) -> None:
        await self.dialer.close()
        self.far.close()


def table(found: list[Figures], size: int, memcpy: float) -> str:
    rows = [["transport", "ms", "GB/s", "of memcpy", "CPU s/GB out", "CPU s/GB in", "prefill ms", "with handoff", ""]]
    rows.append(["memcpy", f"{memcpy * 1e3:.1f}", f"{size / memcpy / 1e9:.2f}", "1.00", "", "", "", "", ""])
    for figures in found:
        at_once, beside, alone = map(statistics.median, (figures.at_once, figures.beside, figures.alone))
        out, into = (statistics.median(cpu) / size * 1e9 for cpu in (figures.sender_cpu, figures.receiver_cpu))
        ratio = statistics.median(b / a for a, b in zip(figures.alone, figures.beside, strict=True))
        once = [f"{at_once * 1e3:.1f}", f"{size / at_once / 1e9:.2f}", f"{memcpy / at_once:.2f}"]
        rows.append([figures.name, *once, f"{out:.2f}", f"{into:.2f}", f"{alone * 1e3:.0f}", f"{beside * 1e3:.0f}"])
        rows[-1].append(f"{ratio:.3f}x")
    return aligned(rows)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.handoff", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt (default: 2048)")
    parser.add_argument("--layers", type=int, default=30, help="layers of SmolLM2's KV (default: 30)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds over all transports (default: 7)")
    parser.add_argument("--threads", type=int, default=2, help="threads the prefill computes with (default: 2)")
    parser.add_argument("--prefill-ms", type=float, default=560.0, help="how long it computes (default: 560)")
    parser.add_argument("--kv-transport", default="auto", choices=("auto", "grpc", *LENDERS), help="beside gRPC")
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args(arguments)


async def main() -> None:
    asked = options()
    chosen(asked.kv_transport)
    keep_freed_memory()
    torch.set_num_threads(asked.threads)
    bench = Bench(asked)
    try:
        memcpy = memcpy_seconds(bench.bytes)
        found = await bench.run(asked.rounds)
        assert bench.arrived(), "what arrived is not what left"
    finally:
        await bench.close()
    print(f"{asked.tokens} tokens x {asked.layers} layers, {bench.bytes / 1e6:.1f} MB, {asked.rounds} rounds, medians")
    print(table(found, bench.bytes, memcpy))
    if asked.json is not None:
        told = {"bytes": bench.bytes, "memcpy_seconds": memcpy, "transports": [asdict(each) for each in found]}
        asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    uvloop.run(main())
