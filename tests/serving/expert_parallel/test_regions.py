"""Through shared memory rows come in portions, and dispatches share two regions in whatever order they overlap."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.expert_parallel.exchange import ExpertExchange, RankLost, Received, Rows
from tests.serving.expert_parallel.groups import Group, expected, made_of, random_experts, shape_for, weights_of

MOST = 2  # dispatches under way
Work = list[tuple[Tensor, Tensor]]


def work_of(rank: int, shape_hidden: int, dispatches: int) -> Work:
    """Rows and physical experts of one rank, dispatch after dispatch."""
    generator = torch.Generator().manual_seed(rank)
    counts = [random.Random(100 * rank + number).randrange(7) for number in range(dispatches)]
    return [
        (torch.randn(count, shape_hidden, generator=generator), random_experts(count, 3, 9, generator))
        for count in counts
    ]


def schedule_of(choices: list[int], dispatches: int) -> list[int]:
    """Each dispatch makes its four calls, 0 to 3, in turn; at most two are under way. Which call comes next."""
    done, order, left = [0, 0, 0, 0], [], list(choices)
    while done[3] < dispatches:
        begun = [dispatches if done[0] - done[3] < MOST else done[0], *done[:3]]
        possible = [call for call in range(4) if done[call] < begun[call]]
        order.append(possible[(left.pop() if left else 0) % len(possible)])
        done[order[-1]] += 1
    return order


def run_schedule(exchange: ExpertExchange, order: list[int], work: Work, first_slot: int) -> list[Tensor]:
    done, found, received = [0, 0, 0, 0], list[Tensor](), dict[int, Received]()
    for call in order:
        number = done[call]
        done[call] += 1
        if call == 0:
            exchange.begin_dispatch(Rows(work[number][0]), work[number][1])
        elif call == 1:
            received[number] = exchange.finish_dispatch()
        elif call == 2:
            exchange.begin_combine(made_of(received[number], first_slot))
        else:
            found.append(exchange.finish_combine(weights_of(work[number][1])).clone())
    return found


@settings(max_examples=15, deadline=None, phases=[Phase.generate])  # a shorter failure takes as many deadlines more
@given(st.lists(st.integers(0, 3), max_size=60))
def test_dispatches_may_overlap_in_any_order(choices: list[int]) -> None:
    shape, dispatches = shape_for("shared_memory"), 8
    order = schedule_of(choices, dispatches)
    with closing(Group("shared_memory", shape)) as group:
        work = [work_of(rank, shape.hidden, dispatches) for rank in range(shape.ranks)]
        parts = group.each(lambda rank: run_schedule(group.exchanges[rank], order, work[rank], rank * shape.slots))
    for given_work, found in zip(work, parts, strict=True):
        assert all(
            torch.equal(one, expected(rows, physical)) for one, (rows, physical) in zip(found, given_work, strict=True)
        )


def results_at(exchange: ExpertExchange, order: list[int], work: Work) -> list[int]:
    """Where the results of each dispatch lie."""
    addresses, received = list[int](), list[Received]()
    for number, call in enumerate(order):
        if call == 1:
            received.append(exchange.finish_dispatch())
            results = received[-1].results
            assert results is not None
            addresses.append(results.data_ptr())
        else:
            run: list[Callable[[], object]] = [
                lambda: exchange.begin_dispatch(Rows(work[0][0]), work[0][1]),
                lambda: None,
                lambda: exchange.begin_combine(made_of(received[order[:number].count(2)], 0)),  # noqa: B023
                lambda: exchange.finish_combine(weights_of(work[0][1])),
            ]
            run[call]()
    return addresses


@pytest.mark.parametrize(("order", "regions"), [([0, 1, 2, 3] * 4, 1), ([0, 0, 1, 2, 1, 2, 3, 3] * 2, 2)])
def test_a_dispatch_alone_uses_the_memory_of_the_one_before(order: list[int], regions: int) -> None:
    shape = shape_for("shared_memory")
    rows = torch.ones(1, shape.hidden), torch.arange(0, 9, 3, dtype=torch.int32)[None]  # one of each rank
    with closing(Group("shared_memory", shape)) as group:
        found = group.each(lambda rank: results_at(group.exchanges[rank], order, [rows]))
    assert [len(set(addresses)) for addresses in found] == [regions] * shape.ranks


def lying(received: Received, hidden: int) -> Tensor:
    """The numbers that rows received stand for, read where they lie just now."""
    placed = received.in_place()
    values = [ctypes.string_at(address, hidden) for address in placed.addresses.tolist()]
    found = torch.tensor([list(row) for row in values], dtype=torch.uint8).view(torch.int8).view(-1, hidden)
    return found * placed.scale[:, None]


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(st.lists(st.integers(0, 3), max_size=60))
def test_rows_stay_where_they_lie_until_their_results_are_sent(choices: list[int]) -> None:
    """Nobody gathers them: what others begin and finish meanwhile must not change them."""
    shape, dispatches = shape_for("shared_memory", wire=torch.int8), 8
    order = schedule_of(choices, dispatches)

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        exchange, done, found = group.exchanges[rank], [0, 0, 0, 0], list[tuple[Tensor, Tensor]]()
        received, first = dict[int, Received](), dict[int, Tensor]()
        for call in order:
            number = done[call]
            done[call] += 1
            rows, physical = work[rank][number]
            if call == 0:
                exchange.begin_dispatch(Rows(rows), physical)
            elif call == 1:
                received[number] = exchange.finish_dispatch()
                whole = received[number].whole()
                assert whole.scale is not None
                first[number] = whole.values * whole.scale[:, None]
            elif call == 2:
                found.append((lying(received[number], shape.hidden), first[number]))
                exchange.begin_combine(made_of(received[number], 0))
            else:
                exchange.finish_combine(weights_of(physical))
        return found

    with closing(Group("shared_memory", shape)) as group:
        work = [work_of(rank, shape.hidden, dispatches) for rank in range(shape.ranks)]
        for parts in group.each(run):
            assert all(torch.equal(now, before) for now, before in parts)


def test_rows_of_a_rank_that_leaves_stay_where_they_lie() -> None:
    shape = shape_for("shared_memory", wire=torch.int8)
    with closing(Group("shared_memory", shape)) as group:
        work = [work_of(rank + 1, shape.hidden, 1)[0] for rank in range(shape.ranks)]
        received = group.each(lambda rank: group.exchanges[rank].dispatch(Rows(work[rank][0]), work[rank][1]))
        before = lying(received[0], shape.hidden)
        assert len(before) > 0
        for other in group.exchanges[1:]:
            other.close()
        assert torch.equal(lying(received[0], shape.hidden), before)
        with pytest.raises(RankLost):
            group.exchanges[0].combine(made_of(received[0], 0), weights_of(work[0][1]))


@pytest.mark.parametrize("wire", [torch.int8, torch.float32])
def test_rows_come_in_portions_of_whole_slots(wire: torch.dtype) -> None:
    hidden = 16384 // wire.itemsize
    shape = shape_for("shared_memory", wire=wire, hidden=hidden, max_tokens=24)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(24, hidden, generator=generator)
    physical = torch.arange(shape.top_k, dtype=torch.int32).repeat(24, 1)  # all of them are rank 0's
    with closing(Group("shared_memory", shape)) as group:

        def run(rank: int) -> list[range]:
            exchange = group.exchanges[rank]
            received = exchange.dispatch(Rows(rows), physical)
            counts, whole, end = received.counts.tolist(), received.whole(), 0
            slots = []
            for portion in received.portions:
                begin, end = end, end + sum(counts[slot] for slot in portion.slots)
                assert torch.equal(portion.rows.values, whole.values[begin:end])
                assert portion.rows.scale is None or torch.equal(portion.rows.scale, whole.scale[begin:end])
                slots.append(portion.slots)
            assert end == sum(counts)
            back = exchange.combine(made_of(received, rank * shape.slots), weights_of(physical))
            if wire is torch.float32:
                assert torch.equal(back, expected(rows, physical))
            return slots

        found = group.each(run)
    assert found[0] == [range(slot, slot + 1) for slot in range(shape.slots)]
    assert found[1:] == [[range(shape.slots)]] * 2


def test_a_rank_that_begins_in_another_order_is_noticed() -> None:
    shape = shape_for("shared_memory")
    rows, physical = torch.randn(1, shape.hidden), torch.zeros(1, shape.top_k, dtype=torch.int32)
    physical[:] = torch.arange(shape.top_k)
    with closing(Group("shared_memory", shape, 2.0)) as group:

        def run(rank: int) -> None:
            exchange, weights = group.exchanges[rank], weights_of(physical)
            exchange.begin_dispatch(Rows(rows), physical)
            if rank == 0:
                exchange.begin_dispatch(Rows(rows), physical)
            exchange.begin_combine(made_of(exchange.finish_dispatch(), 0))
            exchange.finish_combine(weights)
            if rank:
                exchange.begin_dispatch(Rows(rows), physical)
            exchange.finish_dispatch()

        def lost(rank: int) -> str:
            with pytest.raises(RankLost) as error:
                run(rank)
            return str(error.value)

        assert all("makes no sense" in word for word in group.each(lost))
