"""Host memory behind the device: every token's KV lies in one place that holds it, whatever moves; nothing leaks.

The model keeps what was last written to every token's place of every device block and of every host extent.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KeptBlocks, KVCacheManager
from kvcache.blocks.offload import JOINT_TOKENS, STAGING_SHARE, OffloadManager, OffloadPlan, plan_host
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from serving.kvspec import gqa, gqa_int8
from tests.fakes.sequences import make_sequence

TOKEN = st.integers(0, 1)
PLANS = st.builds(
    OffloadPlan,
    block_size=st.integers(1, 3),
    device_blocks=st.integers(6, 14),
    extent_blocks=st.integers(1, 3),
    extents=st.integers(2, 12),
    segment_extents=st.just(1),
)


class Memory:
    """What lies where: the prefix whose KV was last written to a token's place on the device or the host."""

    def __init__(self, plan: OffloadPlan):
        self.plan = plan
        self.device: dict[tuple[int, int], object] = {}
        self.host: dict[tuple[int, int], object] = {}

    def move(self, seq: SequenceState) -> None:
        """Carry out the moves the sequence asks for, as a step does before it computes."""
        assert seq.offload is not None
        size = self.plan.block_size
        for move in seq.offload.moves:
            for place, block in enumerate(move.blocks):
                for offset in range(size):
                    self.host[move.extent, place * size + offset] = self.device.pop((block, offset))
        seq.offload.settle()

    def write(self, seq: SequenceState, position: int) -> None:
        first = seq.offload.blocks if seq.offload is not None else 0
        block = seq.blocks[position // self.plan.block_size - first]
        self.device[block, position % self.plan.block_size] = kv_of(seq, position)

    def put(self, seq: SequenceState, position: int) -> None:
        """KV that has come from elsewhere: straight to the host where that is its place."""
        if seq.offload is None or position // self.plan.block_size >= seq.offload.blocks:
            self.write(seq, position)
            return
        extent, place = divmod(position, self.plan.extent_tokens)
        self.host[seq.offload.extents[extent], place] = kv_of(seq, position)

    def read(self, seq: SequenceState, position: int) -> object:
        """The KV of a token, from the one place the sequence's own account says it lies in."""
        index, offset = divmod(position, self.plan.block_size)
        offload = seq.offload
        if offload is None or index >= offload.blocks:
            return self.device.get((seq.blocks[index - (offload.blocks if offload is not None else 0)], offset))
        extent, place = divmod(position, self.plan.extent_tokens)
        return self.host.get((offload.extents[extent], place))


def kv_of(seq: SequenceState, position: int) -> object:
    return seq.prefix.root, tuple(seq.tokens[: position + 1])


def make_kv(plan: OffloadPlan) -> KVCacheManager:
    return KVCacheManager(BlockAllocator(plan.device_blocks, plan.block_size), "model", OffloadManager(plan))


def advance(kv: KVCacheManager, memory: Memory, seq: SequenceState, count: int) -> None:
    """A step over up to `count` of the sequence's tokens, as the prefill scheduler and the runner take it."""
    count = kv.make_room(seq, min(count, seq.uncomputed))
    assert count > 0
    if seq.offload is not None:
        memory.move(seq)
    for position in range(seq.computed, seq.computed + count):
        memory.write(seq, position)
    seq.computed += count
    kv.publish(seq)


class HostMachine(RuleBasedStateMachine):
    @initialize(plan=PLANS)
    def start(self, plan: OffloadPlan) -> None:
        self.plan = plan
        self.kv = make_kv(plan)
        self.memory = Memory(plan)
        self.sequences: list[SequenceState] = []

    @property
    def tier(self) -> OffloadManager:
        assert self.kv.host is not None
        return self.kv.host

    def pick(self, data: st.DataObject) -> SequenceState:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]

    @rule(data=st.data(), share=st.floats(0, 1), headroom=st.integers(0, 2))
    def open(self, data: st.DataObject, share: float, headroom: int) -> None:
        length = max(1, round(share * (self.plan.tokens - 1)))
        seq = make_sequence(self.kv, data.draw(st.lists(TOKEN, min_size=length, max_size=length)), stays=True)
        before = self.kv.allocator.held, self.tier.extents.held
        try:
            self.kv.open(seq, headroom=headroom)
        except NoRoom:
            assert (
                seq.blocks == [] and seq.offload is None and (self.kv.allocator.held, self.tier.extents.held) == before
            )
            assert before[0] or headroom, "an idle worker has room for whatever is not too long"
            return
        assert self.kv.allocator.available >= headroom
        longer = self.kv.blocks_for(len(seq.tokens) + 1) > self.plan.device_blocks
        assert (seq.offload is not None) == longer, "only what the device cannot hold goes to the host"
        self.sequences.append(seq)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 20))
    def compute(self, data: st.DataObject, count: int) -> None:
        seq = self.pick(data)
        seq.prefill.scheduled_at = 0.0
        if seq.uncomputed:
            advance(self.kv, self.memory, seq, count)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """All of a sequence's KV comes from elsewhere, each token's to where its sequence says."""
        seq = self.pick(data)
        if seq.computed or len(seq.tokens) > seq.start:
            return
        if seq.offload is not None:
            seq.offload.arrive()
        for position in range(len(seq.tokens)):
            self.memory.put(seq, position)
        seq.computed = len(seq.tokens)
        self.kv.publish(seq)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=TOKEN)
    def decode(self, data: st.DataObject, token: int) -> None:
        seq = self.pick(data)
        if seq.uncomputed or len(seq.tokens) >= self.plan.tokens:
            return
        seq.tokens.append(token)
        try:
            self.kv.grow(seq)
        except NoRoom:
            self.close(seq)
            return
        advance(self.kv, self.memory, seq, 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def rematch(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        if seq.prefill.scheduled_at is None and len(seq.tokens) == seq.start:
            self.kv.rematch(seq)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.close(self.pick(data))

    def close(self, seq: SequenceState) -> None:
        self.sequences.remove(seq)
        self.kv.release(seq)
        self.kv.release(seq)
        assert seq.offload is None and seq.blocks == []

    @invariant()
    def each_computed_token_is_where_its_sequence_says(self) -> None:
        for seq in self.sequences:
            for position in range(seq.computed):
                assert self.memory.read(seq, position) == kv_of(seq, position)

    @invariant()
    def nothing_leaks_and_nothing_is_shared_that_is_written_again(self) -> None:
        assert self.kv.unaccounted(self.sequences) == 0 == self.tier.unaccounted(self.sequences)
        extents = [extent for seq in self.sequences if seq.offload is not None for extent in seq.offload.extents]
        assert len(extents) == len(set(extents)) == self.tier.extents.held
        for seq in self.sequences:
            if seq.offload is not None:
                others = {block for other in self.sequences if other is not seq for block in other.blocks}
                assert not others & set(seq.blocks) and len(seq.blocks) <= self.plan.most_resident
                assert not any(self.kv.allocator._key_of[block] for block in seq.blocks), (
                    "a block that will hold other tokens is named"
                )
                assert seq.offload.blocks * self.plan.block_size <= seq.computed

    def teardown(self) -> None:
        for seq in list(getattr(self, "sequences", ())):
            self.close(seq)
        if hasattr(self, "kv"):
            assert self.kv.allocator.held == 0 == self.tier.extents.held


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(plan=PLANS, data=st.data(), budget=st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_alone_a_sequence_reaches_the_longest_that_is_promised(
    plan: OffloadPlan, data: st.DataObject, budget: int
) -> None:
    kv, memory = make_kv(plan), Memory(plan)
    length = data.draw(st.integers(1, plan.tokens - 1))
    seq = make_sequence(kv, [n % 2 for n in range(length)], stays=True)
    kv.open(seq)
    while seq.uncomputed:
        advance(kv, memory, seq, budget)
    if seq.offload is not None:  # on the device alone it would be opened anew, and then offload
        while len(seq.tokens) < plan.tokens:
            seq.tokens.append(1)
            kv.grow(seq)
            advance(kv, memory, seq, 1)
    assert all(memory.read(seq, position) == kv_of(seq, position) for position in range(seq.computed))
    kv.release(seq)
    assert kv.allocator.held == 0 and kv.host is not None and kv.host.extents.held == 0


@given(
    blocks=st.integers(1, 4000),
    size=st.sampled_from([1, 8, 16, 32, 48, 100]),
    layers=st.integers(1, 40),
    eight_bit=st.booleans(),
    host=st.integers(0, 1 << 26),
)
@settings(max_examples=200, deadline=None)
def test_memory_is_cut_within_what_is_given(blocks: int, size: int, layers: int, eight_bit: bool, host: int) -> None:
    spec = gqa_int8(3, 64) if eight_bit else gqa(3, 64, "bfloat16")
    specs = (spec,) * layers
    block_bytes = spec.token_bytes * layers * size
    try:
        plan = plan_host(specs, blocks, size, host)
    except ValueError as error:
        assert "--host-kv-memory" in str(error)
        return
    staging = 2 * plan.segment_extents * plan.extent_tokens * spec.token_bytes
    assert plan.device_blocks * block_bytes + staging <= blocks * block_bytes
    assert plan.segment_extents == 1 or staging * STAGING_SHARE <= blocks * block_bytes
    assert plan.extents * plan.extent_tokens * spec.token_bytes * layers <= host
    assert plan.extent_tokens % JOINT_TOKENS == 0 == plan.extent_tokens % size
    assert plan.tokens > plan.device_blocks * size, "or it would be of no use"
    assert plan.extent_blocks <= plan.least_resident <= plan.most_resident <= plan.device_blocks


@pytest.mark.parametrize(("blocks", "host", "says"), [(10, 1 << 30, "on the device"), (100, 1 << 10, "no sequence")])
def test_too_little_memory_is_refused(blocks: int, host: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_host((gqa(2, 16, "float32"),) * 4, blocks, 16, host)


@settings(max_examples=50, deadline=None)
@given(PLANS, st.integers(1, 60))
def test_least_blocks_are_enough_to_be_opened_and_fewer_are_not(plan: OffloadPlan, tokens: int) -> None:
    kv = make_kv(plan)
    seq = make_sequence(kv, [0] * min(tokens, plan.tokens - 1))
    least = kv.least_blocks(seq)
    with pytest.raises(NoRoom):
        kv.open(seq, headroom=plan.device_blocks - least + 1)
    assert kv.allocator.held == 0
    kv.open(seq, headroom=plan.device_blocks - least)
    assert len(seq.blocks) >= least
    kv.release(seq)


def test_a_copy_says_whether_extents_come_free_as_it_ends() -> None:
    plan = OffloadPlan(block_size=2, device_blocks=4, extent_blocks=2, extents=4, segment_extents=2)
    kv = make_kv(plan)
    assert kv.host is not None
    kept = KeptBlocks((), tuple(kv.host.extents.allocate(2)))
    others = KeptBlocks((), kept.extents[:1])
    kv.host.extents.acquire(others.extents)
    kv.kept += [kept, others]
    assert not kv.let_go(others)
    assert kv.let_go(kept) and kv.host.extents.available == 4
