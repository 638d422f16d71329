"""The prefix index: what it answers is what its events and placements say, within its bytes."""

from __future__ import annotations

import sys
import time
import tracemalloc
from hashlib import sha256
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.blocks.events import KVEventLog
from router import prefix_index
from router.prefix_index import ENTRY_BYTES, MOST_BITS, PrefixIndex
from serving.messages import KVEvents

ROOMY = 1 << 24


def key(number: int) -> bytes:
    return sha256(b"block %d" % number).digest()


CHAIN = [key(number) for number in range(12)]
WORKERS = st.sampled_from("abc")


class FollowsWorkers(RuleBasedStateMachine):
    """Workers store and remove blocks; the router asks when it likes; some workers restart, some are forgotten."""

    bits: ClassVar = {"MOST_BITS": prefix_index.MOST_BITS, "SWEPT_BITS": prefix_index.SWEPT_BITS}

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in self.bits.items():
            self.patch.setattr(prefix_index, name, value)
        self.index = PrefixIndex(ROOMY)
        self.logs = {name: KVEventLog(limit=8) for name in "abc"}
        self.held: dict[str, set[int]] = {name: set() for name in "abc"}
        self.seen: dict[str, set[int]] = {}

    def teardown(self) -> None:
        self.patch.undo()

    @rule(name=WORKERS, number=st.integers(0, 11))
    def stores(self, name: str, number: int) -> None:
        if number not in self.held[name]:
            self.held[name].add(number)
            self.logs[name].stored(CHAIN[number])

    @rule(name=WORKERS, number=st.integers(0, 11))
    def removes(self, name: str, number: int) -> None:
        if number in self.held[name]:
            self.held[name].remove(number)
            self.logs[name].removed(CHAIN[number])

    @rule(name=WORKERS)
    def reports(self, name: str) -> None:
        self.index.apply(name, self.logs[name].since(self.index.since(name)))
        self.seen[name] = set(self.held[name])

    @rule(name=WORKERS)
    def is_forgotten(self, name: str) -> None:
        self.index.retain(set("abc") - {name})
        self.seen.pop(name, None)

    @invariant()
    def the_answer_is_what_was_reported(self) -> None:
        expected = {}
        for name, numbers in self.seen.items():
            leading = next((n for n in range(len(CHAIN)) if n not in numbers), len(CHAIN))
            if leading:
                expected[name] = leading
        assert self.index.match(CHAIN) == expected


class FollowsWorkersWithFewBits(FollowsWorkers):
    """Bits are taken back from the first one on, or run out."""

    bits: ClassVar = {"MOST_BITS": 4, "SWEPT_BITS": 1}

    @rule(name=WORKERS)
    def asks_for_all(self, name: str) -> None:
        self.index.apply(name, self.logs[name].since(0))
        self.seen[name] = set(self.held[name])

    @invariant()
    def masks_stay_narrow(self) -> None:
        assert self.index.mask_bytes <= 1


FollowsWorkers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
FollowsWorkersWithFewBits.TestCase.settings = FollowsWorkers.TestCase.settings
TestFollowsWorkers = FollowsWorkers.TestCase
TestFollowsWorkersWithFewBits = FollowsWorkersWithFewBits.TestCase


def test_a_gap_in_the_events_is_closed_by_a_snapshot() -> None:
    index = PrefixIndex(ROOMY)
    index.apply("a", KVEvents(first=-1, next=5, reset=True, stored=tuple(k[:8] for k in CHAIN[:3])))
    index.apply("a", KVEvents(first=7, next=9, stored=(CHAIN[3][:8],)))
    assert index.since("a") == 0 and index.match(CHAIN) == {"a": 3}, "what comes after a gap is not taken"
    index.apply("a", KVEvents(first=-1, next=9, reset=True, stored=(CHAIN[0][:8],)))
    assert index.since("a") == 9 and index.match(CHAIN) == {"a": 1}, "a snapshot replaces all"


def test_placements_count_until_the_worker_says_otherwise() -> None:
    index = PrefixIndex(ROOMY)
    index.stored("a", CHAIN[:4])
    assert index.match(CHAIN) == {"a": 4} and index.match(CHAIN[1:]) == {"a": 3} and index.since("a") == 0
    index.apply("a", KVEvents(first=-1, next=2, reset=True, stored=tuple(k[:8] for k in CHAIN[:2])))
    assert index.match(CHAIN) == {"a": 2}
    index.stored("a", CHAIN[:6])
    index.apply("a", KVEvents(first=2, next=4, removed=(CHAIN[5][:8],)))
    assert index.match(CHAIN) == {"a": 5} and index.match([]) == {}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WORKERS, st.integers(0, 60), st.integers(1, 20)), max_size=60))
def test_the_oldest_keys_go_first_and_never_too_many_stay(placed: list[tuple[str, int, int]]) -> None:
    index = PrefixIndex(20 * (ENTRY_BYTES + MOST_BITS // 8))
    for name, first, count in placed:
        index.stored(name, [key(number) for number in range(first, first + count)])
        assert len(index) <= 20
        assert index.match([key(first + count - 1)]).get(name) == 1, "what was placed last is still known"


def test_snapshots_without_end_leave_the_other_workers_known() -> None:
    """Each takes a bit of the masks: bits that are out of use are taken back, and nothing else is lost."""
    index = PrefixIndex(ROOMY)
    index.stored("other", CHAIN[:5])
    for number in range(3 * MOST_BITS):
        index.apply(
            "a", KVEvents(first=-1, next=number, reset=True, stored=tuple(k[:8] for k in CHAIN[: 1 + number % 4]))
        )
        assert index.match(CHAIN) == {"other": 5, "a": 1 + number % 4} and index.since("a") == number
    for number in range(MOST_BITS + 100):
        index.stored(f"w{number}", CHAIN[:2])
    assert len(index.match(CHAIN)) == MOST_BITS + 102 and index.match(CHAIN)["other"] == 5, "more workers than bits"


def test_taking_bits_back_goes_through_a_small_part_of_the_keys_at_a_time() -> None:
    """Every snapshot of a worker leaves a bit behind. A million blocks were gone through at once, for a second."""
    index = PrefixIndex(1 << 26)
    index.stored("other", (number.to_bytes(8, "little") for number in range(50_000)))
    assert index.shards > 32
    for number in range(700):
        before = [index.entries(shard) for shard in range(index.shards)]
        index.apply("a", KVEvents(first=-1, next=number, reset=True, stored=tuple(CHAIN[:2])))
        made_anew = sum(index.entries(shard) is not before[shard] for shard in range(index.shards))
        assert made_anew <= 1
    assert index.mask_bytes <= MOST_BITS // 8 and index.match(CHAIN) == {"a": 2}
    assert index.match([(49_999).to_bytes(8, "little")]) == {"other": 1}


def test_pushing_older_keys_out_costs_little_more_than_storing() -> None:
    """A full index takes each new key in constant time: it was a hundred times as long before."""
    keys = [number.to_bytes(8, "little") for number in range(100_000)]

    def seconds(most: int) -> float:
        index = PrefixIndex(most * (ENTRY_BYTES + MOST_BITS // 8))
        began = time.process_time()
        index.stored("w", keys)
        assert len(index) <= most
        return time.process_time() - began

    roomy, full = min(seconds(200_000) for _ in range(3)), min(seconds(10_000) for _ in range(3))
    assert full < 10 * roomy, (full, roomy)


def test_a_snapshot_larger_than_the_index_is_cut() -> None:
    index = PrefixIndex(100 * (ENTRY_BYTES + MOST_BITS // 8))
    keys = tuple(number.to_bytes(8, "little") for number in range(5_000))
    index.apply("w", KVEvents(first=-1, next=5_000, reset=True, stored=keys))
    assert 0 < len(index) <= 100 and index.match(keys[:3]) == {"w": 3}


@pytest.mark.thorough
def test_entries_take_no_more_bytes_than_they_are_counted_for() -> None:
    """Just before and just after the dicts behind it have grown, which is when they are largest for what they hold."""
    for entries in (21_000, 22_400):
        tracemalloc.start()
        index = PrefixIndex(entries * 5 // 4 * (ENTRY_BYTES + MOST_BITS // 8))  # shards are not filled evenly
        for worker in range(4):
            index.stored(f"w{worker}", (number.to_bytes(8, "little") for number in range(entries)))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(index) == entries and taken <= entries * ENTRY_BYTES + 100_000, taken / entries
    widest = sys.getsizeof(1 << (MOST_BITS - 1)) - sys.getsizeof(1)
    assert widest <= MOST_BITS // 7 and prefix_index.KEY_BYTES == 8
