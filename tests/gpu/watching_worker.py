"""A mixed worker's engine on a FakeCuda, which sees that KV is there whenever it is counted or published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from decode.scheduler import DecodeScheduler
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import BlockListener, KVCacheManager
from kvcache.memory.device import DeviceKV
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import Engine, StepLimits
from serving.engine.runner import ModelRunner
from serving.engine.sequence import SequenceState
from tests.fakes.sequences import make_sequence
from tests.gpu.fake_cuda import DEVICE, FakeCuda
from tests.gpu.late_forward import SPEC, VOCAB, LateForward, device_pool, kv_of, next_token

BLOCKS, SIZE, BUDGET = 64, 4, 24


class Worker(BlockListener):
    """An engine on a fake device, which looks into the device's memory whenever KV is counted or published."""

    def __init__(
        self,
        cuda: FakeCuda,
        kind: type[Engine],
        forward: Callable[[DeviceKV], Any] = LateForward,
        follows: Callable[[Sequence[int]], int] = lambda text: next_token(text[-1]),
    ) -> None:
        """`forward` draws what `follows` a text."""
        self.cuda = cuda
        self.follows = follows
        self.device_kv = device_pool(cuda, SPEC.kv_layers("float32"), BLOCKS, SIZE)
        self.kv = KVCacheManager(BlockAllocator(BLOCKS, SIZE), "model", listener=self)
        decode = DecodeScheduler(self.kv, max_model_len=200)
        self.prefill = PrefillScheduler(self.kv, then=decode.add)
        limits = StepLimits(max_num_batched_tokens=BUDGET, max_num_seqs=8, max_model_len=200, eos_token_ids=frozenset())
        self.forward = forward(self.device_kv)
        runner = ModelRunner(self.forward, SPEC, SIZE, DEVICE)
        self.engine = kind(runner, self.kv, [decode, self.prefill], limits)
        self.sequences: list[SequenceState] = []
        self.published = 0

    def offer(self, seq: SequenceState, first: int, last: int) -> None:
        self.published += last - first
        self.look(seq, first * SIZE, last * SIZE)

    def give_up(self) -> None:
        """It holds nothing."""

    def look(self, seq: SequenceState, start: int, end: int) -> None:
        """The KV of these tokens is in the device's memory now."""
        for layer, planes in enumerate(self.device_kv.planes):
            wanted = [kv_of(seq.tokens[position], position, layer) for position in range(start, end)]
            for plane in planes:
                rows = self.cuda.peek(plane).view(BLOCKS * SIZE, 2)
                slots = [seq.blocks[p // SIZE] * SIZE + p % SIZE for p in range(start, end)]
                assert rows[slots].tolist() == wanted, f"KV that is counted is not there: tokens {start} to {end}"

    def serve(self, prompts: Sequence[int], outputs: int) -> None:
        """Prompts of these lengths, a step apart; afterwards the texts are right."""
        for number, length in enumerate(prompts):
            prompt = [(17 * number + i) % VOCAB for i in range(length)]
            self.sequences.append(make_sequence(self.kv, prompt, stays=True, max_tokens=outputs, ignore_eos=True))
            self.prefill.add(self.sequences[-1])
            self.step()
        while self.step():
            pass
        for seq in self.sequences:
            expected = seq.tokens[: seq.prompt_len]
            for _ in range(outputs):
                expected.append(self.follows(expected))
            assert seq.tokens == expected
        assert self.kv.allocator.held == 0

    def step(self) -> bool:
        outputs = self.engine.step()
        for seq in self.sequences:
            if seq.blocks:
                self.look(seq, 0, seq.computed)
        return outputs is not None
