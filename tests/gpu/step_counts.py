"""Launches, copies and host waits by thread and stream, of steps and of a handoff, on a device that only counts.

`python -m tests.gpu.step_counts` prints them. KV is laid out as an 8B's: 32 layers of 8 heads of 128 in bfloat16.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode.scheduler import DecodeScheduler
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.handoff.chunk import Chunk, Commit
from kvcache.handoff.sender import Handoff
from kvcache.memory.device import DeviceKV
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import StepLimits
from serving.engine.overlap import Launched, OverlapEngine
from serving.engine.plan import Work
from serving.engine.runner import ModelRunner
from serving.kvspec import gqa
from serving.links import HandoffLink
from serving.streams import streams_of
from tests.fakes.sequences import lease_id, make_sequence
from tests.gpu.fake_cuda import DEVICE, Counted, FakeCuda, installed
from tests.gpu.late_forward import SPEC, LateForward, device_pool
from tests.gpu.triton_counts import mixed_steps

EIGHT_B = (gqa(8, 128, "bfloat16"),) * 32
SIZE = 16


class CountingCuda(FakeCuda):
    """Counts kernels and does not call them: what is copied means nothing."""

    def launch(self, kernel: Callable[..., object], *tensors: Tensor) -> None:
        super().launch(lambda *_: None, *tensors)


class Taking(HandoffLink):
    """The other end of a handoff, which takes all."""

    room = None

    def __init__(self) -> None:
        self.bytes = 0
        self.chunks = 0

    async def begin(self) -> int:
        return 0

    async def push(self, chunk: Chunk) -> None:
        self.bytes += len(chunk.payload)
        self.chunks += 1

    async def commit(self, commit: Commit) -> range | None:
        return None

    async def close(self) -> None:
        """Nothing is open."""


def decode_steps(steps: int) -> tuple[Counter[Counted], Counter[Counted]]:
    """What launching so many decode steps of four sequences takes, one ahead of the other; and what reading them does.

    The forward pass is a stand-in for a model's, without kernels of its own: LateForward.
    """
    cuda = FakeCuda()
    launching: Counter[Counted] = Counter()
    with installed(cuda):
        kv = KVCacheManager(BlockAllocator(64, SIZE), "model")
        decode = DecodeScheduler(kv, max_model_len=200)
        prefill = PrefillScheduler(kv, then=decode.add)
        limits = StepLimits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=200, eos_token_ids=frozenset())
        forward = LateForward(device_pool(cuda, SPEC.kv_layers("float32"), 64, SIZE))
        runner = CountedRunner(forward, SPEC, SIZE, DEVICE)  # type: ignore[arg-type]
        runner.launching = launching
        engine = OverlapEngine(runner, kv, [decode, prefill], limits)
        for n in range(4):
            prefill.add(make_sequence(kv, [n, n + 1], stays=True, max_tokens=steps + 4, ignore_eos=True))
        while not engine.ahead:
            engine.step()
        before, begun = cuda.counts.copy(), launching.copy()
        for _ in range(steps):
            engine.step()
    launched = launching - begun
    return launched, cuda.counts - before - launched


class CountedRunner(ModelRunner):
    """Notes what of the device each launch uses."""

    launching: Counter[Counted]

    def launch(self, work: Sequence[Work], after: Launched | None) -> Launched:
        cuda = streams_of(DEVICE)
        assert isinstance(cuda, FakeCuda)
        before = cuda.counts.copy()
        launched = super().launch(work, after)
        self.launching.update(cuda.counts - before)
        return launched


def handoff(tokens: int, chunk: int) -> tuple[Counter[Counted], Taking]:
    """What handing over the KV of a prompt takes, of which a step computes `chunk` tokens."""
    cuda, link = CountingCuda(), Taking()
    with installed(cuda):
        blocks = -(-tokens // SIZE)
        host = DeviceKV(EIGHT_B, blocks, SIZE)
        planes = [tuple(cuda.adopted(plane) for plane in layer) for layer in host.planes]
        device_kv = DeviceKV(EIGHT_B, blocks, SIZE, planes=planes)
        seq = make_sequence(None, [1] * tokens)
        seq.blocks = list(range(blocks))
        sending = Handoff(device_kv, link, seq, lease_id(), "layout", 0)

        async def hand_over() -> None:
            task = asyncio.create_task(sending.send())
            for upto in range(chunk, tokens + 1, chunk):
                for layer in range(len(EIGHT_B)):
                    sending.layer_done(layer, upto)
                    await asyncio.sleep(0)
            async with asyncio.timeout(300):
                await task

        asyncio.run(hand_over())
    return cuda.counts, link


def table(title: str, counts: Counter[Counted], per: int = 1) -> list[str]:
    rows = [title]
    for counted, count in sorted(counts.items(), key=lambda item: (item[0].stream, item[0].what)):
        rows.append(f"  {counted.what:<14} {count / per:>8g}   stream {counted.stream:<10} thread {counted.thread}")
    return rows if counts else [*rows, "  none"]


def main() -> None:
    torch.set_num_threads(1)
    launching, reading = decode_steps(20)
    print(*table("a decode step, launched behind another one", launching, 20), sep="\n")
    print(*table("reading its tokens, while the next one runs", reading, 20), sep="\n")
    for graphs in (False, True):
        title = f"a step of three decodes beside a chunk of a prompt, {'from a graph' if graphs else 'launched'}"
        print(*table(title, mixed_steps(10, graphs=graphs), 10), sep="\n")
    counts, link = handoff(2048, 512)
    print(*table(f"a handoff of 2,048 tokens: {link.chunks} chunks, {link.bytes >> 20} MiB", counts), sep="\n")


if __name__ == "__main__":
    main()
