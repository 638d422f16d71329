"""What sequences get from the KV manager: blocks that hold what their tokens say, shared only when that cannot change.

The model keeps, for every slot of every block, the prefix whose KV was last written there.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from tests.fakes.sequences import make_sequence

TOKEN = st.integers(0, 1)
PROMPT = st.lists(TOKEN, min_size=1, max_size=14)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(2, 10), size=st.integers(1, 4), caching=st.booleans())
    def start(self, blocks: int, size: int, caching: bool) -> None:
        self.kv = KVCacheManager(BlockAllocator(blocks, size, caching=caching), "model")
        self.size = size
        self.sequences: list[SequenceState] = []
        self.written: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # slot → root, and tokens up to this one

    def pick(self, data: st.DataObject) -> SequenceState:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]

    def held(self) -> int:
        return self.kv.allocator.held

    @rule(
        prompt=PROMPT,
        tenant=st.sampled_from(["", "other"]),
        headroom=st.integers(0, 3),
        probed=st.booleans(),
        waits=st.booleans(),
    )
    def open(self, prompt: list[int], tenant: str, headroom: int, probed: bool, waits: bool) -> None:
        seq = make_sequence(self.kv, prompt, tenant=tenant, prompt_logprobs=0 if probed else None)
        before, hits, evictions = self.held(), self.kv.hits, self.kv.allocator.evictions
        lacking = self.kv.lacking(seq, headroom=headroom)
        try:
            self.kv.open(seq, headroom=headroom, waits=waits)
        except NoRoom:
            assert not seq.opened and seq.computed == 0 and self.held() == before and self.kv.hits == hits
            assert lacking == self.kv.lacking(seq, headroom=headroom) > 0
            return
        assert lacking == 0 and self.kv.allocator.available >= headroom
        assert len(seq.blocks) + seq.reserved == self.kv.blocks_for(len(seq.tokens) + 1)
        assert seq.opened and (seq.reserved > 0) is waits
        assert not waits or self.kv.allocator.evictions == evictions, "what only waits evicts nothing"
        assert seq.uncomputed >= 1, "nothing would be left to draw a token from"
        assert seq.cached == seq.computed == self.kv.hits - hits
        assert not probed or seq.computed == 0, "prompt log-probabilities need every token computed"
        self.sequences.append(seq)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def rematch(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        if (
            seq.prefill.scheduled_at is None and len(seq.tokens) == seq.start
        ):  # as the scheduler does: before the first chunk
            before = seq.computed
            self.kv.rematch(seq)
            assert seq.computed >= before and seq.uncomputed >= 1

    @rule()
    def refresh(self) -> None:
        """As good as to rematch each one that waits."""
        self.kv.refresh(self.sequences)
        for seq in self.sequences:
            before = seq.computed
            if seq.reserved:
                self.kv.rematch(seq)
                assert seq.computed == before

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data: st.DataObject, count: int) -> None:
        seq = self.pick(data)
        if seq.prefill.scheduled_at is None and seq.reserved:
            self.kv.begin(seq)
        assert not seq.reserved
        count = min(count, seq.uncomputed)
        seq.prefill.scheduled_at = 0.0
        for position in range(seq.computed, seq.computed + count):
            block = seq.blocks[position // self.size]
            users = sum(block in other.blocks for other in self.sequences)
            assert users == 1, "a block is written that others read"
            assert self.kv.allocator._key_of[block] is None, "a block is written that others may find"
            slot = block * self.size + position % self.size
            self.written[slot] = (seq.prefix.root, tuple(seq.tokens[: position + 1]))
        seq.computed += count
        self.kv.publish(seq)
        self.kv.publish(seq)  # again is as good as once

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=TOKEN)
    def draw_a_token(self, data: st.DataObject, token: int) -> None:
        seq = self.pick(data)
        if seq.uncomputed:
            return
        seq.tokens.append(token)
        before = self.held()
        try:
            self.kv.grow(seq)
        except NoRoom:
            assert self.held() == before
            self.close(seq)
            return
        assert self.kv.blocks_for(len(seq.tokens)) <= len(seq.blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.close(self.pick(data))

    def close(self, seq: SequenceState) -> None:
        self.sequences.remove(seq)
        self.kv.release(seq)
        self.kv.release(seq)
        assert seq.blocks == [] and seq.computed == seq.prefix.published == 0

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.kv.unaccounted(self.sequences) == 0
        held = {block for seq in self.sequences for block in seq.blocks}
        assert self.held() == len(held) + sum(seq.reserved for seq in self.sequences)
        assert self.kv.hits <= self.kv.queries

    @invariant()
    def computed_tokens_are_what_the_blocks_hold(self) -> None:
        for seq in self.sequences:
            assert seq.computed <= len(seq.tokens) <= (len(seq.blocks) + seq.reserved) * self.size
            for position in range(seq.computed):
                slot = seq.blocks[position // self.size] * self.size + position % self.size
                assert self.written[slot] == (seq.prefix.root, tuple(seq.tokens[: position + 1]))

    @invariant()
    def only_full_blocks_are_shared(self) -> None:
        for seq in self.sequences:
            others = {block for other in self.sequences if other is not seq for block in other.blocks}
            full = seq.computed // self.size
            assert not others & set(seq.blocks[full:])

    def teardown(self) -> None:
        for seq in list(getattr(self, "sequences", ())):
            self.close(seq)
            self.nothing_leaks()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def computed(kv: KVCacheManager, prompt: list[int]) -> SequenceState:
    seq = make_sequence(kv, prompt)
    kv.open(seq)
    seq.computed = len(seq.tokens)
    kv.publish(seq)
    return seq


def test_a_prompt_seen_before_leaves_one_token_to_compute() -> None:
    kv = KVCacheManager(BlockAllocator(8, 4), "model")
    kv.release(computed(kv, list(range(8))))
    again = make_sequence(kv, list(range(8)))
    kv.open(again)
    assert (again.cached, again.uncomputed) == (4, 4), "the last block may not be reused whole"
    longer = make_sequence(kv, list(range(9)))
    kv.open(longer)
    assert (longer.cached, longer.uncomputed) == (8, 1)


def test_output_of_an_earlier_try_is_looked_up_like_the_prompt() -> None:
    kv = KVCacheManager(BlockAllocator(8, 4), "model")
    kv.release(computed(kv, list(range(8))))
    continued = make_sequence(kv, list(range(6)), generated=[6, 7, 8])
    kv.open(continued)
    assert continued.cached == 8
    assert continued.delta((), (), None).cached_tokens == 6, "of the prompt, that is"


def test_a_waiting_sequence_takes_up_what_was_computed_meanwhile() -> None:
    kv = KVCacheManager(BlockAllocator(12, 4), "model")
    waiting, first = make_sequence(kv, list(range(10))), make_sequence(kv, list(range(10)))
    kv.open(waiting)
    kv.open(first)
    own = list(waiting.blocks)
    first.computed = len(first.tokens)
    kv.publish(first)
    kv.rematch(waiting)
    assert waiting.computed == waiting.cached == 8
    assert waiting.blocks == [*first.blocks[:2], *own[2:]]
    assert kv.unaccounted([waiting, first]) == 0 and kv.allocator.held == 4


def test_a_queue_evicts_nothing_until_it_is_computed() -> None:
    """Whatever waits: the prefixes that it will find are there when its turn comes."""
    kv = KVCacheManager(BlockAllocator(12, 4), "model")
    for text in (0, 100):
        kv.release(computed(kv, list(range(text, text + 12))))
    queue = [make_sequence(kv, [*range(text, text + 12), 1000]) for text in (200, 0, 100)]
    kv.open(queue[0], waits=True)
    for found in queue[1:]:
        kv.open(found, waits=True)
        assert found.computed == 12, "the first evicted nothing yet"
    assert kv.allocator.evictions == 0 and kv.allocator.available == 0
    kv.begin(queue[0])
    assert len(queue[0].blocks) == 4 and not queue[0].reserved, "what was promised is there"
    for seq in queue:
        kv.release(seq)
    assert kv.unaccounted([]) == 0 and kv.allocator.held == 0


def test_sequences_that_wait_for_the_same_need_it_once() -> None:
    kv = KVCacheManager(BlockAllocator(12, 4), "model")
    first, *waiting = [make_sequence(kv, [*range(10), tail]) for tail in (97, 98, 99)]
    for seq in (first, *waiting):
        kv.open(seq, waits=True)
    assert kv.allocator.available == 3
    kv.begin(first)
    first.computed = len(first.tokens)
    kv.publish(first)
    kv.refresh([first, *waiting])
    assert [seq.computed for seq in waiting] == [8, 8] and kv.allocator.available == 7


def test_a_reservation_that_is_lost_is_told() -> None:
    kv = KVCacheManager(BlockAllocator(12, 4), "model")
    seq = make_sequence(kv, list(range(10)))
    kv.open(seq, waits=True)
    assert kv.unaccounted([]) == 3 and kv.unaccounted([seq]) == 0


def test_no_room_takes_nothing_and_keeps_what_was_cached() -> None:
    kv = KVCacheManager(BlockAllocator(3, 4), "model")
    kv.release(computed(kv, list(range(8))))
    with pytest.raises(NoRoom, match="spare"):
        kv.open(make_sequence(kv, list(range(9))), headroom=1)
    assert kv.allocator.held == 0
    fits = make_sequence(kv, list(range(9)))
    kv.open(fits)
    assert fits.cached == 8


def run_through(kv: KVCacheManager, prompt: list[int], upto: int | None = None) -> SequenceState:
    """Opened, computed to the end or `upto` a token, and published."""
    seq = make_sequence(kv, prompt)
    kv.open(seq)
    seq.computed = upto or len(prompt)
    kv.publish(seq)
    return seq


def found_blocks(kv: KVCacheManager) -> int:
    """How many cached or held blocks count as found, so that they are kept longer."""
    return sum(kv.allocator._cached._kinds)


def test_a_prefix_that_is_found_is_kept_longer_than_text_of_ones_own() -> None:
    kv = KVCacheManager(BlockAllocator(10, 2), "model")
    kv.allocator._cached.longer = 64.0
    for last in (7, 8):
        kv.release(run_through(kv, [1, 2, 3, 4, last]))
    assert found_blocks(kv) == 2
    for other in range(10, 40, 10):
        kv.release(run_through(kv, [*range(other, other + 9)]))
    assert kv.known_blocks(make_sequence(kv, [1, 2, 3, 4, 9])) == 2


def test_a_prefix_that_is_taken_up_while_it_is_computed_counts_as_found() -> None:
    kv = KVCacheManager(BlockAllocator(12, 2), "model")
    first, second = make_sequence(kv, [1, 2, 3, 4, 5]), make_sequence(kv, [1, 2, 3, 4, 6])
    kv.open(first)
    kv.open(second, waits=True)
    first.computed = 5
    kv.publish(first)
    assert found_blocks(kv) == 0
    kv.begin(second)
    assert second.computed == 4 and found_blocks(kv) == 2


def test_what_finds_no_room_counts_for_nothing() -> None:
    """Whoever waits tries again at each step: that is no use of its prefix, and no time for others to age in."""
    kv = KVCacheManager(BlockAllocator(6, 2), "model")
    kv.release(run_through(kv, [1, 2, 3, 4]))
    held = run_through(kv, [7, 8, 9])
    before = kv.allocator._cached._now
    for _ in range(5):
        with pytest.raises(NoRoom):
            kv.open(make_sequence(kv, [1, 2, 3, 4, *range(20, 26)]))
    assert found_blocks(kv) == 0 and kv.allocator._cached._now == before
    kv.release(held)
    assert kv.known_blocks(make_sequence(kv, [1, 2, 3, 4, 5])) == 2
