"""The order of eviction: against the plain sums it stands for, and by what it leaves of traffic that comes again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.blocks import eviction
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.eviction import MOST_LONGER, REMEMBERED, SAMPLE, EvictionOrder

Prompts = Iterator[tuple[str, list[bytes]]]


KEYS = [b"key %d" % number for number in range(8 * SAMPLE)]
SAMPLED = [key for key in KEYS if crc32(key) % SAMPLE == 0]


class OrderMachine(RuleBasedStateMachine):
    """The order beside plain lists of what is cached and what has gone."""

    @initialize(blocks=st.integers(1, 6))
    def start(self, blocks: int) -> None:
        self.order = EvictionOrder(blocks)
        self.held = list(range(blocks))
        self.keys: list[bytes | None] = [None] * blocks
        self.since: dict[int, int] = {}  # cached blocks
        self.found: set[int] = set()
        self.gone: dict[bytes, tuple[bool, int]] = {}  # evicted keys: was it found, and cached since when
        self.now = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), used=st.booleans())
    def add(self, data: st.DataObject, used: bool) -> None:
        some = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.order.add(some, used=used)
        for block in some:
            self.now += used
            self.since[block] = self.now
            self.since[block] = self.since.pop(block)  # in the order they came
            self.held.remove(block)
            fresh = [key for key in KEYS if key not in self.gone and key not in self.keys]
            self.keys[block] = self.keys[block] or data.draw(st.sampled_from(fresh))

    @precondition(lambda self: self.since)
    @rule(data=st.data(), found=st.booleans())
    def take(self, data: st.DataObject, found: bool) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.since)), unique=True))
        self.order.remove(some)
        for block in some:
            del self.since[block]
            self.held.append(block)
        if found:
            beside = [block for block in self.held if block not in some and self.keys[block] is not None]
            self.order.found([*some, *beside])
            self.found.update(some, beside)

    @precondition(lambda self: self.since)
    @rule(data=st.data(), longer=st.sampled_from([1.0, 1.7, MOST_LONGER]))
    def evict(self, data: st.DataObject, longer: float) -> None:
        self.order.longer = longer
        count = data.draw(st.integers(0, len(self.since)))
        expected = []
        for _ in range(count):
            first: dict[bool, int] = {}
            for block in self.since:
                first.setdefault(block in self.found, block)
            waited = {kind: self.now - self.since[block] for kind, block in first.items()}
            found = True in first and (False not in first or waited[False] * longer < waited[True])
            expected.append(first[found])
            key = self.keys[first[found]]
            if key in SAMPLED:
                self.gone[key] = found, self.since[first[found]]
            del self.since[first[found]]
        assert self.order.evict(count, self.keys) == expected
        self.found.difference_update(expected)
        self.held += expected
        for block in expected:
            self.keys[block] = None

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def miss(self, data: st.DataObject) -> None:
        """What was kept too short is kept longer, at the other's cost; what nobody remembers changes nothing."""
        key = data.draw(st.sampled_from(sorted(self.gone)))
        found, since = self.gone.pop(key)
        self.order.longer = 8.0
        self.order.missed(key)
        if self.now - since > REMEMBERED * self.order.num_blocks + self.order.num_blocks:
            assert self.order.longer == 8.0
        elif self.now - since <= REMEMBERED * self.order.num_blocks:
            assert self.order.longer > 8.0 if found else self.order.longer < 8.0
        self.order.missed(key)
        assert 1.0 <= self.order.longer <= MOST_LONGER * 1.001

    @invariant()
    def agrees(self) -> None:
        assert len(self.order) == len(self.since) and set(self.order) == set(self.since)


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


# ---- what it leaves of traffic ---------------------------------------------------------------------------------------


def shared(texts: Sequence[int], count: int, seed: int = 0) -> Prompts:
    """Prompts that begin with one of some texts of 56 blocks, and end in ten of their own."""
    draw = random.Random(seed)
    for number in range(count):
        text = draw.choice(texts)
        yield (
            "shared",
            [*(b"%d.%d" % (text, i) for i in range(56)), *(b"%d-%d-%d" % (seed, number, i) for i in range(10))],
        )


def chats(live: int, count: int, seed: int = 0) -> Prompts:
    """So many chats at a time, each turn of which is 12 blocks longer than the one before; six turns."""
    draw, turns, opened = random.Random(seed), dict[int, int](), 0
    for _ in range(count):
        if len(turns) < live:
            chat, opened = opened, opened + 1
        else:
            chat = draw.choice(sorted(turns))
        turns[chat] = turns.get(chat, 0) + 1
        yield "chats", [b"chat %d.%d.%d" % (seed, chat, i) for i in range(12 * turns[chat])]
        if turns[chat] == 6:
            del turns[chat]


def twice(apart: int, count: int) -> Prompts:
    """Texts of 20 blocks, each asked for twice, so many other texts apart."""
    for number in range(count):
        for text in (number, number - apart):
            if text >= 0:
                yield "twice", [b"twice %d.%d" % (text, i) for i in range(20)]


def between(one: Prompts, other: Prompts, share: float) -> Prompts:
    """Of `one` so large a share, until either is over."""
    draw = random.Random(2)
    while (prompt := next(one if draw.random() < share else other, None)) is not None:
        yield prompt


def hits(prompts: Prompts, allocator: BlockAllocator, of: str | None = None) -> float:
    """The share of blocks that were cached, where six requests run at a time."""
    running, found, asked = list[list[int]](), 0, 0
    for kind, keys in prompts:
        matched = allocator.match(keys)
        allocator.acquire(matched)
        allocator.found(matched)
        blocks = matched + allocator.allocate(len(keys) - len(matched))
        for block, key in zip(blocks, keys, strict=True):
            allocator.publish(block, key)
        running.append(blocks)
        if len(running) > 6:
            allocator.release(running.pop(0))
        if of in (None, kind):
            found, asked = found + len(matched), asked + len(keys)
    for blocks in running:
        allocator.release(blocks)
    assert allocator.check([]) == 0
    return found / asked


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """LRU."""
    monkeypatch.setattr(eviction, "MOST_LONGER", 1.0)


ALL_SHARED = 56 / 66


def test_lru_loses_shared_texts_to_text_that_nobody_asks_for_again(plain: None) -> None:
    """What the next test would show if it tested nothing."""
    allocator = BlockAllocator(1024, 16)
    hits(shared(range(14), 300), allocator)
    assert hits(shared(range(14), 1000, seed=1), allocator) < 0.93 * ALL_SHARED


def test_shared_texts_stay_beside_text_that_nobody_asks_for_again() -> None:
    allocator = BlockAllocator(1024, 16)
    hits(shared(range(14), 300), allocator)
    assert hits(shared(range(14), 1000, seed=1), allocator) > 0.99 * ALL_SHARED


def test_texts_that_are_asked_for_no_more_make_room() -> None:
    """Fourteen after fourteen others, which have been found thousands of times: they are kept as well."""
    allocator = BlockAllocator(1024, 16)
    for turn in range(3):
        texts = range(14 * turn, 14 * (turn + 1))
        assert hits(shared(texts, 400, seed=turn), allocator) > 0.9 * ALL_SHARED
        assert hits(shared(texts, 1000, seed=10 + turn), allocator) > 0.99 * ALL_SHARED


@pytest.mark.parametrize("live", [60, 90, 120, 200])
def test_chats_find_as_much_as_by_lru(live: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their turns come again too, whether they were found before or not."""
    found = hits(chats(live, 3000), BlockAllocator(4096, 16))
    monkeypatch.setattr(eviction, "MOST_LONGER", 1.0)
    assert found > 0.98 * hits(chats(live, 3000), BlockAllocator(4096, 16))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_chats_beside_shared_texts(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All together find as much as by LRU, also after a time of shared texts alone, and chats not much less."""

    def found(of: str | None = None) -> float:
        allocator = BlockAllocator(2048, 16)
        hits(shared(range(24), 1000), allocator)
        return hits(between(shared(range(24), 3000, seed=1), chats(30, 3000), share), allocator, of)

    all_together, chats_alone = found(), found("chats")
    monkeypatch.setattr(eviction, "MOST_LONGER", 1.0)
    assert all_together > 0.98 * found()
    assert chats_alone > 0.8 * found("chats")


@pytest.mark.parametrize("apart", [8, 12])
def test_what_is_asked_for_twice_is_not_locked_out(apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that everybody asks for have been kept for long: those that come then are found the second time as well."""

    def found(of: str | None = None) -> float:
        allocator = BlockAllocator(1000, 16)
        hits(shared(range(10), 1500), allocator)
        hits(between(shared(range(10), 3000, seed=1), twice(apart, 500), 0.3), allocator)
        return hits(between(shared(range(10), 3000, seed=2), twice(apart, 500), 0.3), allocator, of)

    all_together, second_time = found(), found("twice")
    monkeypatch.setattr(eviction, "MOST_LONGER", 1.0)
    assert all_together > 0.96 * found()
    assert second_time > 0.85 * found("twice") > 0.25
