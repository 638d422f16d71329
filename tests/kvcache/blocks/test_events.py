"""The log of block keys against followers that poll it at any pace: each ends with exactly the keys present."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.events import KEY_BYTES, KVEventLog
from serving.messages import KVEvents

KEYS = [bytes([n]) * KEY_BYTES + bytes([end]) * 24 for n in range(4) for end in range(2)]  # two of each cut key


class Follower:
    """What a router makes of the events of one worker."""

    def __init__(self) -> None:
        self.next = 0
        self.keys: set[bytes] = set()

    def follow(self, events: KVEvents) -> None:
        assert not set(events.stored) & set(events.removed)
        if events.reset:
            self.keys.clear()
        else:
            assert events.first == self.next
        self.keys.update(events.stored)
        self.keys.difference_update(events.removed)
        self.next = events.next


class LogMachine(RuleBasedStateMachine):
    """A log of five events, and two followers that poll it now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KVEventLog(limit=5)
        self.present: set[bytes] = set()
        self.followers = [Follower(), Follower()]

    @rule(key=st.sampled_from(KEYS))
    def toggle(self, key: bytes) -> None:
        if key in self.present:
            self.log.removed(key)
        else:
            self.log.stored(key)
        self.present ^= {key}

    @rule(which=st.integers(0, 1))
    def poll(self, which: int) -> None:
        follower = self.followers[which]
        follower.follow(self.log.since(follower.next))
        assert follower.keys == {key[:KEY_BYTES] for key in self.present}

    @rule(which=st.integers(0, 1), sequence=st.integers(-2, 100))
    def forget(self, which: int, sequence: int) -> None:
        """A follower that begins anew, or asks from a number that the log has never reached."""
        self.followers[which] = Follower()
        if not 0 <= sequence <= self.log.since(0).next:
            self.followers[which].next = sequence
            self.poll(which)

    @invariant()
    def new_followers_see_all(self) -> None:
        follower = Follower()
        follower.follow(self.log.since(0))
        assert follower.keys == {key[:KEY_BYTES] for key in self.present}


TestLog = LogMachine.TestCase


@given(st.lists(st.sampled_from(["take", "publish", "release"]), max_size=60), st.data())
def test_the_log_holds_exactly_the_keys_an_allocator_matches(acts: list[str], data: st.DataObject) -> None:
    log, follower = KVEventLog(limit=4), Follower()
    allocator = BlockAllocator(3, 4, events=log)
    held: list[int] = []
    for act in acts:
        if act == "take" and allocator.available:
            held += allocator.allocate(1)
        elif act == "publish" and held:
            allocator.publish(data.draw(st.sampled_from(held)), data.draw(st.sampled_from(KEYS[::2])))
        elif act == "release" and held:
            allocator.release([held.pop()])
        if data.draw(st.booleans()):
            follower.follow(log.since(follower.next))
    follower.follow(log.since(follower.next))
    assert follower.keys == {key[:KEY_BYTES] for key in KEYS if allocator.match([key])}


def test_a_delta_says_the_last_of_each_key_alone() -> None:
    log = KVEventLog()
    log.stored(KEYS[0])
    log.stored(KEYS[2])
    log.removed(KEYS[0])
    log.stored(KEYS[4])
    assert log.since(1) == KVEvents(first=1, next=4, stored=(KEYS[2][:8], KEYS[4][:8]), removed=(KEYS[0][:8],))
    assert log.since(4) == KVEvents(first=4, next=4)


@pytest.mark.parametrize("sequence", [-1, 0, 1, 99])
def test_where_the_log_does_not_reach_all_keys_are_told(sequence: int) -> None:
    log = KVEventLog(limit=2)
    for key in KEYS:
        log.stored(key)
    keys = tuple(key[:KEY_BYTES] for key in KEYS[::2])
    assert log.since(sequence) == KVEvents(first=-1, next=4, reset=True, stored=keys)
    assert log.since(3) == KVEvents(first=3, next=4, stored=keys[3:])


def test_an_empty_log_has_nothing_to_tell_but_that_it_is_empty() -> None:
    assert KVEventLog().since(0) == KVEvents(first=0, next=0)
    assert KVEventLog().since(7) == KVEvents(first=-1, next=0, reset=True)
