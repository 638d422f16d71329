"""Eviction policies: each keeps to the protocol, LRU to its order, S3-FIFO to its three queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool.eviction import POLICIES, EvictionPolicy, Lru, S3Fifo
from tests.kvcache.pool.storage import key_of

STEPS = st.lists(st.tuples(st.sampled_from(["add", "touch", "remove", "evict"]), st.integers(0, 7)), max_size=80)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS)
def test_the_order_is_of_those_that_are_here_and_holds_until_something_changes(
    name: str, steps: list[tuple[str, int]]
) -> None:
    policy = POLICIES[name]()
    here: set[bytes] = set()
    for step, number in steps:
        key = key_of(number)
        if step == "add" and key not in here:
            policy.add(key, 1 + number)
            here.add(key)
        elif step == "touch" and key in here:
            policy.touch(key)
        elif step == "remove" and key in here:
            policy.remove(key)
            here.remove(key)
        elif step == "evict" and here:
            victim = next(policy.victims())
            policy.remove(victim, evicted=True)
            here.remove(victim)
        assert len(policy) == len(here)
        order = list(policy.victims())
        assert order == list(policy.victims())
        assert sorted(order) == sorted(here)


def evicted(policy: EvictionPolicy, count: int) -> list[int]:
    """The numbers of the next victims, which go."""
    numbers = {key_of(number): number for number in range(100)}
    gone = []
    for _ in range(count):
        victim = next(policy.victims())
        policy.remove(victim, evicted=True)
        gone.append(numbers[victim])
    return gone


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = Lru()
    for number in range(5):
        policy.add(key_of(number), 1)
    policy.touch(key_of(0))
    policy.touch(key_of(2))
    assert evicted(policy, 5) == [1, 3, 4, 0, 2]


def test_s3fifo_keeps_what_was_used_on_probation_and_drops_the_rest_in_order() -> None:
    policy = S3Fifo()
    for number in range(10):
        policy.add(key_of(number), 1)
    for _ in range(2):
        policy.touch(key_of(0))
        policy.touch(key_of(3))
    assert evicted(policy, 7) == [1, 2, 4, 5, 6, 7, 8]


def test_s3fifo_remembers_what_it_dropped() -> None:
    policy = S3Fifo()
    for number in range(10):
        policy.add(key_of(number), 1)
    assert evicted(policy, 5) == [0, 1, 2, 3, 4]
    policy.add(key_of(0), 1)  # comes back while remembered: straight to the main queue
    policy.add(key_of(20), 1)
    assert evicted(policy, 6) == [5, 6, 7, 8, 9, 20]
    assert list(policy.victims()) == [key_of(0)]


def test_s3fifo_forgets_what_left_for_another_reason() -> None:
    policy = S3Fifo()
    for number in range(4):
        policy.add(key_of(number), 1)
    policy.remove(key_of(0))
    policy.add(key_of(0), 1)  # on probation as any other
    policy.add(key_of(5), 1)
    assert evicted(policy, 5) == [1, 2, 3, 0, 5]


def test_a_scan_does_not_push_out_what_s3fifo_knows_to_be_used() -> None:
    policy, lru = S3Fifo(), Lru()
    for one in (policy, lru):
        for number in range(10):
            one.add(key_of(number), 1)
            one.touch(key_of(number))
            one.touch(key_of(number))
        for number in range(10, 60):  # each used once, at its coming
            victim = next(one.victims())
            one.remove(victim, evicted=True)
            one.add(key_of(number), 1)
    assert min(evicted(lru, 10)) >= 50
    assert sorted(evicted(policy, 10))[:8] == list(range(2, 10))
