"""Clients take turns in a queue whose length and bytes are bounded."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.fair_queue import FairQueue
from serving.errors import Overloaded

puts = st.tuples(st.sampled_from("abc"), st.integers(0, 40))


@given(st.lists(st.one_of(puts, st.none()), max_size=60))
def test_each_client_in_order_all_of_them_in_turn_and_never_more_than_there_is_room_for(
    steps: list[tuple[str, int] | None],
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(8, 100)
    held: dict[str, deque[tuple[int, int]]] = {}
    turns: list[str] = []  # clients that wait, the next one first
    for number, step in enumerate(steps):
        if step is None and turns:
            client = turns.pop(0)
            size, name = held[client].popleft()
            assert queue.pop() == (client, name)
            if held[client]:
                turns.append(client)
        elif step is not None:
            client, size = step
            try:
                queue.put(client, size, (client, number))
            except Overloaded as error:
                assert error.retry_after
                assert len(queue) or size > 100
                continue
            held.setdefault(client, deque()).append((size, number))
            if client not in turns:
                turns.append(client)
        assert len(queue) == sum(map(len, held.values())) <= 8
        assert queue.held_bytes == sum(size for items in held.values() for size, _ in items) <= 100


def test_one_client_leaves_half_of_the_room_to_others() -> None:
    queue: FairQueue[int] = FairQueue(8, 100)
    for number in range(4):
        queue.put("greedy", 1, number)
    with pytest.raises(Overloaded):
        queue.put("greedy", 1, 4)
    queue.put("other", 50, 5)
    assert [queue.pop(), queue.pop()] == [0, 5]


def test_what_is_taken_out_leaves_its_room_and_its_turn() -> None:
    """Before: bodies whose clients had hung up kept all others out."""
    queue: FairQueue[str] = FairQueue(4, 100)
    queue.put("a", 30, "first")
    queue.put("a", 0, "second")
    queue.put("b", 60, "third")
    queue.discard("b", "third")
    queue.discard("b", "third")
    queue.discard("a", "first")
    assert (len(queue), queue.held_bytes) == (1, 0)
    queue.put("b", 100, "fourth")
    assert [queue.pop(), queue.pop()] == ["second", "fourth"]
    assert (len(queue), queue.held_bytes) == (0, 0)


def test_the_only_item_of_a_client_may_be_larger_than_its_half() -> None:
    queue: FairQueue[int] = FairQueue(8, 100)
    queue.put("a", 90, 0)
    with pytest.raises(Overloaded):
        queue.put("a", 1, 1)
    queue.put("b", 10, 2)
