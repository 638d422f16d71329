"""Sequences with KV in host memory among others: computed apart from them, and giving way only to their like."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decode.scheduler import DecodeScheduler
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadManager, OffloadPlan
from prefill.scheduler import PrefillScheduler
from serving.batch.ragged import OffloadedKV, RaggedBatch
from serving.engine.offload import OffloadMove, OffloadState
from serving.engine.plan import StepPlan, Work
from serving.engine.runner import ModelRunner
from serving.model.spec import ModelSpec
from tests.fakes.sequences import make_sequence

VOCAB = 50
SPEC = ModelSpec(
    architecture="llama",
    vocab_size=VOCAB,
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=4,
    intermediate=8,
    max_position=100,
    norm_eps=1e-5,
)


class SummingForward:
    """Scores token (sum of the sequence's own new tokens) best; notes what it was given, and tells of layers."""

    form = "sums"

    def __init__(self) -> None:
        self.batches: list[RaggedBatch] = []

    def greedy(self, batch: RaggedBatch, layer_done: Callable[[int], None] | None) -> Tensor:
        return self.logits(batch, layer_done).argmax(-1)

    def logits(self, batch: RaggedBatch, layer_done: Callable[[int], None] | None) -> Tensor:
        self.batches.append(batch)
        for layer in range(SPEC.layers) if layer_done is not None else ():
            layer_done(layer)
        starts = batch.query_start.tolist()
        best = [int(batch.tokens[a:b].sum()) % VOCAB for a, b in itertools.pairwise(starts)]
        rows = torch.tensor(best).repeat_interleave(torch.tensor(batch.query_lens))
        return torch.eye(VOCAB)[rows][batch.logits_rows]


class NotedHost:
    """A host that keeps no bytes."""

    def __init__(self) -> None:
        self.moves: list[OffloadMove] = []
        self.open = 0

    def move(self, moves: Sequence[OffloadMove]) -> None:
        self.moves += moves

    @contextmanager
    def stream(self, offload: OffloadState, computed: int, kv_dtype: str) -> Iterator[OffloadedKV]:
        self.open += 1
        yield Nothing(offload.moved * 4)
        self.open -= 1


class Nothing(OffloadedKV):
    def __init__(self, tokens: int):
        self.tokens = tokens

    def pieces(self) -> Iterator[object]:  # type: ignore[override]
        return iter(())


def make_kv(blocks: int = 8, extents: int = 10) -> KVCacheManager:
    plan = OffloadPlan(block_size=2, device_blocks=blocks, extent_blocks=2, extents=extents, segment_extents=1)
    return KVCacheManager(BlockAllocator(blocks, 2), "model", OffloadManager(plan))


def test_offloaded_sequences_are_computed_after_the_others_and_apart() -> None:
    kv = make_kv()
    long = make_sequence(kv, list(range(3, 33)), stays=True, prompt_logprobs=0)
    kv.open(long)
    assert long.offload is not None
    short = [make_sequence(kv, [n]) for n in (5, 7)]
    for seq in short:
        kv.open(seq)
    prefill = PrefillScheduler(kv)
    for count in (7, 5, 6):
        long.computed += kv.make_room(long, count)
    host, forward = NotedHost(), SummingForward()
    runner = ModelRunner(forward, SPEC, 2, host=host)
    work = [Work(short[0], 1, prefill), Work(long, kv.make_room(long, 4), prefill), Work(short[1], 1, prefill)]
    heard: list[tuple[list[object], int]] = []
    short[0].prefill.handoff = long.prefill.handoff = object()  # type: ignore[assignment]
    result = runner.run(work, lambda work, layer: heard.append(([item.seq for item in work], layer)))
    assert [batch.query_lens for batch in forward.batches] == [(1, 1), (4,)]
    each = [([seq], layer) for seq in (short[0], long) for layer in range(2)]
    assert heard == each, "whoever waits for layers hears of each once, when it is his own"
    assert [[one.token for one in drawn] for drawn in result.drawn] == [[5], [], [7]]  # type: ignore[union-attr]
    assert list(result.prompt_logprobs) == [1] and len(result.prompt_logprobs[1]) == 4
    batch = forward.batches[1]
    assert batch.offloaded is not None and batch.offloaded.tokens == 4 * long.offload.moved > 0
    assert batch.positions.tolist() == list(range(long.computed, long.computed + 4))
    places = [long.blocks[p // 2 - long.offload.blocks] * 2 + p % 2 for p in batch.positions.tolist()]
    assert batch.slots.tolist() == places
    assert len(host.moves) == long.offload.moved and long.offload.moves == [] and host.open == 0
    assert long.offload.copied == long.offload.moved


def test_a_step_without_them_is_one_batch() -> None:
    kv = make_kv()
    seq = make_sequence(kv, list(range(3, 33)), stays=True)
    kv.open(seq)
    forward, host = SummingForward(), NotedHost()
    runner = ModelRunner(forward, SPEC, 2, host=host)
    runner.run([Work(seq, kv.make_room(seq, 5), PrefillScheduler(kv))], None)
    assert forward.batches[0].offloaded is None, "nothing has moved yet"


def test_who_lacks_host_memory_takes_it_from_its_like() -> None:
    kv = make_kv(blocks=18, extents=12)
    decode = DecodeScheduler(kv, max_model_len=99)
    oldest, younger = make_sequence(kv, [1] * 36, stays=True), make_sequence(kv, [2] * 36, stays=True)
    bystander = make_sequence(kv, [3], stays=True)
    for seq, headroom in ((oldest, 11), (younger, 3), (bystander, 0)):
        kv.open(seq, headroom=headroom)
        while seq.uncomputed:
            seq.computed += kv.make_room(seq, seq.uncomputed)
        seq.tokens.append(0)
        decode.add(seq)
    assert oldest.offload is not None and younger.offload is not None and bystander.offload is None
    plan = StepPlan(9, 9)
    decode.fill(plan, 0.0)
    while not plan.preempted:
        for work in plan.work:
            work.seq.computed += 1
            work.seq.tokens.append(0)
        plan = StepPlan(9, 9)
        decode.fill(plan, 0.0)
    assert plan.preempted == [younger] and younger.offload is None and younger.blocks == []
    assert [work.seq for work in plan.work] == [oldest, bystander], "who holds no extent has none to give"
    assert kv.host is not None and kv.host.unaccounted([oldest, bystander]) == 0
