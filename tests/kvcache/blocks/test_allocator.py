"""The block pool against a model simple enough to believe: who holds what, what is reusable, what goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.eviction import MOST_ENTRIES
from serving.errors import NoRoom

KEYS = [bytes([n]) * 4 for n in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """`tables` are the references handed out; `cached` is the model's list, oldest first, `found` what was found."""

    @initialize(blocks=st.integers(1, 7), caching=st.booleans())
    def start(self, blocks: int, caching: bool) -> None:
        self.allocator = BlockAllocator(blocks, 4, caching=caching)
        self.caching = caching
        self.tables: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.found: set[int] = set()
        self.evictions = 0
        self.reserved = 0

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @property
    def available(self) -> int:
        return self.allocator.num_blocks - len(self.held()) - self.reserved

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > self.available:
            with pytest.raises(NoRoom):
                self.allocator.allocate(count)
            return  # the invariants show that nothing was taken
        self.take(count, self.allocator.allocate)

    @rule(count=st.integers(0, 8), headroom=st.integers(0, 2))
    def reserve(self, count: int, headroom: int) -> None:
        if count + headroom > self.available:
            with pytest.raises(NoRoom):
                self.allocator.reserve(count, headroom=headroom)
            return
        self.allocator.reserve(count, headroom=headroom)
        self.reserved += count

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def allocate_reserved(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.reserved))
        self.reserved -= count
        self.take(count, self.allocator.allocate_reserved)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def cancel_reserved(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.reserved))
        self.reserved -= count
        self.allocator.cancel_reserved(count)

    def take(self, count: int, how: Callable[[int], list[int]]) -> None:
        free = self.allocator.num_blocks - len(self.held()) - len(self.cached)
        taken = how(count)
        assert len(set(taken)) == count and not set(taken) & self.held()
        evicted = [block for block in self.cached if block in taken]
        assert len(evicted) == max(0, count - free), "a block was evicted while others were free"
        for kind in (self.found, self.key_of.keys() - self.found):
            in_turn = [block for block in self.cached if block in kind]
            gone = [block for block in in_turn if block in taken]
            assert gone == in_turn[: len(gone)], "a block was evicted before its turn"
        for block in evicted:
            del self.key_of[block], self.cached[block]
            self.found.discard(block)
        self.evictions += len(evicted)
        self.tables.append(taken)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True), again=st.booleans())
    def match_and_acquire(self, keys: list[bytes], again: bool) -> None:
        by_key = {key: block for block, key in self.key_of.items()}
        expected = []
        for key in keys:
            if key not in by_key:
                break
            expected.append(by_key[key])
        found = self.allocator.match(keys)
        assert found == expected
        unused = sum(block not in self.held() for block in found)
        assert self.allocator.cached_among(found) == unused
        if unused > self.available:
            return  # who takes up a prefix needs no more blocks than before
        self.allocator.acquire(found)
        if again:
            self.allocator.found(found)
            self.found.update(found)
        for block in found:
            self.cached.pop(block, None)
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.release(table)
        for block in reversed(table):
            if block in self.key_of and block not in self.held():
                self.cached[block] = None

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.held())))
        self.allocator.publish(block, key)
        if self.caching and block not in self.key_of and key not in self.key_of.values():
            self.key_of[block] = key

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.allocator.check(self.tables) == 0
        assert self.allocator.held == len(self.held()) + self.reserved
        assert self.allocator.available == self.available
        assert self.allocator.evictions == self.evictions
        for key in KEYS:
            expected = [block for block, known in self.key_of.items() if known == key]
            assert self.allocator.match([key]) == expected
            assert self.allocator.holds(key) is bool(expected)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_released_tables_tail_is_evicted_before_its_head() -> None:
    allocator = BlockAllocator(3, 4)
    table = allocator.allocate(3)
    for block, key in zip(table, KEYS, strict=False):
        allocator.publish(block, key)
    allocator.release(table)
    assert allocator.allocate(1) == [table[2]]
    assert allocator.match(KEYS[:3]) == table[:2], "the rest of the prefix is still there"


def test_a_matched_prefix_becomes_the_last_to_be_evicted() -> None:
    allocator = BlockAllocator(2, 4)
    old, new = allocator.allocate(1), allocator.allocate(1)
    allocator.publish(old[0], KEYS[0])
    allocator.publish(new[0], KEYS[1])
    allocator.release(old)
    allocator.release(new)
    allocator.acquire(allocator.match(KEYS[:1]))
    allocator.release(old)
    assert allocator.allocate(1) == new


@pytest.mark.parametrize("again", [False, True])
def test_a_prefix_that_is_taken_over_and_over_fills_no_memory(again: bool) -> None:
    """The order of eviction has entries that are passed over: they do not pile up, and the order stays."""
    allocator = BlockAllocator(8, 4)
    table, keys = allocator.allocate(6), [bytes([n]) for n in range(6)]
    for block, key in zip(table, keys, strict=True):
        allocator.publish(block, key)
    allocator.release(table)
    for turn in range(1000):
        hot = allocator.match(keys[: 1 + turn % 3])
        allocator.acquire(hot)
        if again:
            allocator.found(hot)
        allocator.release(hot)
        assert sum(map(len, allocator._cached._queues)) <= MOST_ENTRIES * 8
    assert allocator.check([]) == 0
    wanted = [table[5], table[4], table[3], table[2], table[1], table[0]]
    allocator.allocate(2)
    assert [allocator.allocate(1)[0] for _ in wanted] == wanted


def test_a_free_block_cannot_be_acquired() -> None:
    allocator = BlockAllocator(2, 4)
    with pytest.raises(AssertionError, match="free"):
        allocator.acquire([0])


def test_check_counts_the_references_nobody_accounts_for() -> None:
    allocator = BlockAllocator(4, 4)
    table = allocator.allocate(3)
    assert allocator.check([table]) == 0
    assert allocator.check([table[:1]]) == 2
    with pytest.raises(AssertionError, match="without a reference"):
        allocator.check([table, table[:1]])


def test_a_block_cannot_be_released_more_often_than_taken() -> None:
    allocator = BlockAllocator(2, 4)
    table = allocator.allocate(1)
    allocator.release(table)
    with pytest.raises(AssertionError, match="more often"):
        allocator.release(table)
    with pytest.raises(AssertionError, match="no sequence holds"):
        allocator.publish(table[0], KEYS[0])


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_of_nothing_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockAllocator(*shape)
