"""Every kind of exchange brings each row to its experts and each result back to its row, with the bits it had."""

from __future__ import annotations

import gc
import os
import platform
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from serving.expert_parallel import all_to_all, shared_memory
from serving.expert_parallel.all_to_all import KEPT_SIZES, AllToAllExchange, ExchangeBuffers
from serving.expert_parallel.exchange import ExchangeShape, ExchangeTraffic, RankLost, Rows
from serving.expert_parallel.shared_memory import SharedMemoryExchange, functions
from serving.kernels.cpu.build import find_compiler
from serving.kernels.int8 import quantize_rows
from tests.serving.expert_parallel.groups import (
    DEADLINE,
    KINDS,
    Group,
    counts_of,
    expected,
    made_of,
    random_experts,
    shape_for,
    weights_of,
)

STEPS = 12

Opening = Callable[..., Group]


@pytest.fixture
def opened() -> Iterator[Opening]:
    groups: list[Group] = []

    def open_group(kind: str, shape: ExchangeShape, deadline: float = DEADLINE) -> Group:
        groups.append(Group(kind, shape, deadline))
        return groups[-1]

    yield open_group
    for group in groups:
        group.close()


def steps(shape: ExchangeShape, dtype: torch.dtype = torch.float32) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step the rows and physical experts of each rank; some ranks have none."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for step in range(STEPS):
        counts = [0] * shape.ranks if step == 3 else counts_of(shape.ranks, generator, shape.max_tokens)
        made.append(
            [
                (
                    torch.randn(count, shape.hidden, generator=generator).to(dtype),
                    random_experts(count, shape.top_k, shape.ranks * shape.slots, generator),
                )
                for count in counts
            ]
        )
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_results_come_back_to_their_rows(opened: Opening, kind: str, wire: torch.dtype) -> None:
    shape = shape_for(kind, wire=wire)
    group, work = opened(kind, shape), steps(shape, wire)

    def run(rank: int) -> list[Tensor]:
        exchange, found = group.exchanges[rank], []
        for step in work:
            rows, physical = step[rank]
            received = exchange.dispatch(Rows(rows), physical)
            found.append(exchange.combine(made_of(received, rank * shape.slots), weights_of(physical)).clone())
        return found

    for rank, parts in enumerate(group.each(run)):
        for step, found in zip(work, parts, strict=True):
            assert torch.equal(found, expected(*step[rank]))


def summed(group: Group, work: list[list[tuple[Tensor, Tensor]]]) -> list[list[tuple[int, int]]]:
    """Of each step and rank the rows received, and the own ones whose sums went past the caches.

    Each sum has the bits of its formula.
    """
    shape = group.shape

    def run(rank: int) -> list[tuple[int, int]]:
        exchange, found = group.exchanges[rank], []
        assert isinstance(exchange, SharedMemoryExchange)
        for step in work:
            rows, physical = step[rank]
            before = exchange.uncached_sums
            received = exchange.dispatch(Rows(rows), physical)
            count = int(received.counts.sum())
            sums = exchange.combine(made_of(received, rank * shape.slots).bfloat16(), weights_of(physical))
            assert torch.equal(sums, expected(rows, physical, back=torch.bfloat16))
            found.append((count, exchange.uncached_sums - before))
        return found

    return [list(counts) for counts in zip(*group.each(run), strict=True)]


def test_sums_can_go_past_the_caches_on_every_cpu_of_x86_64_v4() -> None:
    flags, cpus = {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}, Path("/proc/cpuinfo")
    there = cpus.exists() and flags.issubset(cpus.read_text().split())
    if not there or Path(find_compiler() or "").name != "g++" or platform.libc_ver()[0] != "glibc":
        pytest.skip("the CPU has no AVX-512, or the library is not compiled by g++ for glibc")
    assert functions().wide()


@pytest.mark.parametrize(("hidden", "aligned"), [(64, 1), (128, 1), (200, 2), (264, 2), (448, 1), (520, 2), (63, 0)])
def test_sums_past_the_caches_have_the_same_bits(
    opened: Opening, monkeypatch: pytest.MonkeyPatch, hidden: int, aligned: int
) -> None:
    """In rows that begin with a line of memory, every `aligned`th; and a rest that is not stored many at once."""
    monkeypatch.setattr(shared_memory, "CACHED_BYTES", 0)
    shape = shape_for("shared_memory", wire=torch.bfloat16, back=torch.bfloat16, hidden=hidden)
    work = steps(shape, torch.bfloat16)
    for step, found in zip(work, summed(opened("shared_memory", shape), work), strict=True):
        for (rows, _), (received, past) in zip(step, found, strict=True):
            assert past == (-(-len(rows) // aligned) if functions().wide() and aligned and received else 0)


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("busy", [1, 3])
def test_sums_keep_their_place_where_caches_hold_all_results(
    opened: Opening, monkeypatch: pytest.MonkeyPatch, busy: int, less: int
) -> None:
    """Each row goes to one expert of each rank, so that all make as many results, whoever has the rows."""
    if not functions().wide():
        pytest.skip("sums are stored past the caches by AVX-512, compiled by g++")
    shape = shape_for("shared_memory", wire=torch.bfloat16, back=torch.bfloat16, hidden=128)
    counts = [4] * busy + [0] * (3 - busy)
    work = [(torch.randn(count, 128).bfloat16(), torch.tensor([[0, 3, 6]] * 4).int()[:count]) for count in counts]
    results = 3 * sum(counts) * 128 * 2  # bytes: of three ranks
    monkeypatch.setattr(shared_memory, "CACHED_BYTES", results - less)
    assert summed(opened("shared_memory", shape), [work]) == [[(sum(counts), count * less) for count in counts]]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_need_not_be_contiguous(opened: Opening, kind: str) -> None:
    shape = shape_for(kind)
    group, work = opened(kind, shape), steps(shape)

    def apart(tensor: Tensor) -> Tensor:
        """The same numbers, column after column in memory."""
        return tensor.t().contiguous().t()

    def run(rank: int) -> list[Tensor]:
        exchange, found = group.exchanges[rank], []
        for step in work:
            rows, physical = map(apart, step[rank])
            received = exchange.dispatch(Rows(rows), physical)
            results = apart(made_of(received, rank * shape.slots))
            found.append(exchange.combine(results, apart(weights_of(physical))).clone())
        return found

    for rank, parts in enumerate(group.each(run)):
        for step, found in zip(work, parts, strict=True):
            assert torch.equal(found, expected(*step[rank]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_rows_are_those_an_int8_expert_would_make(opened: Opening, kind: str, dtype: torch.dtype) -> None:
    shape = shape_for(kind, wire=torch.int8)
    group, work = opened(kind, shape), steps(shape, dtype)

    def run(rank: int) -> None:
        exchange = group.exchanges[rank]
        for step in work:
            received = exchange.dispatch(Rows(step[rank][0]), step[rank][1])
            whole = received.whole()
            assert whole.scale is not None and whole.values.dtype is torch.int8
            wanted = {
                (number // shape.slots, number % shape.slots, *map(int, values), float(scale))
                for rows, physical in step
                for values, scale, numbers in zip(*quantize_rows(rows), physical.tolist(), strict=True)
                for number in numbers
                if number // shape.slots == rank
            }
            slots = torch.arange(shape.slots).repeat_interleave(received.counts).tolist()
            found = {
                (rank, slot, *map(int, values), float(scale))
                for slot, values, scale in zip(slots, whole.values, whole.scale, strict=True)
            }
            assert found == wanted
            parts = exchange.combine(made_of(received, rank * shape.slots), weights_of(step[rank][1]))
            values, scale = quantize_rows(step[rank][0])
            assert torch.equal(parts, expected(values * scale[:, None], step[rank][1]))

    group.each(run)


@pytest.mark.parametrize("kind", KINDS)
def test_two_dispatches_may_be_under_way(opened: Opening, kind: str) -> None:
    shape = shape_for(kind)
    group, work = opened(kind, shape), steps(shape)

    def run(rank: int) -> list[Tensor]:
        exchange, found = group.exchanges[rank], []
        for first, second in zip(work[::2], work[1::2], strict=True):
            one = exchange.dispatch(Rows(first[rank][0]), first[rank][1])
            other = exchange.dispatch(Rows(second[rank][0]), second[rank][1])
            for part, (_, physical) in ((one, first[rank]), (other, second[rank])):
                found.append(exchange.combine(made_of(part, rank * shape.slots), weights_of(physical)).clone())
        return found

    for rank, parts in enumerate(group.each(run)):
        for step, found in zip(work, parts, strict=True):
            assert torch.equal(found, expected(*step[rank]))


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_agree_on_the_least_number_announced(opened: Opening, kind: str) -> None:
    shape = shape_for(kind)
    group = opened(kind, shape)
    nothing = Rows(torch.empty(0, shape.hidden)), torch.empty(0, shape.top_k, dtype=torch.int32)

    def run(rank: int) -> list[int]:
        exchange, found = group.exchanges[rank], [group.exchanges[rank].agreed]
        for step in range(5):
            exchange.announce((step + rank) // 2 + 5 * step)
            received = exchange.dispatch(*nothing)
            found.append(exchange.agreed)
            exchange.combine(made_of(received, 0), weights_of(nothing[1]))
        return found

    assert group.each(run) == [[0] + [step // 2 + 5 * step for step in range(5)]] * shape.ranks


@pytest.mark.parametrize("kind", ["shared_memory", "all_to_all", "hierarchical"])
def test_results_may_travel_as_bfloat16(opened: Opening, kind: str) -> None:
    shape = shape_for(kind, back=torch.bfloat16)
    group, work = opened(kind, shape), steps(shape)

    def run(rank: int) -> None:
        for step in work:
            received = group.exchanges[rank].dispatch(Rows(step[rank][0]), step[rank][1])
            parts = group.exchanges[rank].combine(made_of(received, rank * shape.slots), weights_of(step[rank][1]))
            assert torch.equal(parts, expected(*step[rank], torch.bfloat16))

    group.each(run)


def test_a_row_goes_once_to_each_rank_and_is_counted(opened: Opening) -> None:
    shape = shape_for("shared_memory", wire=torch.int8)
    group = opened("shared_memory", shape)
    # Rank 0's two rows: one to slots 1 and 2 of rank 1 and to itself, one to ranks 1 and 2 and to itself.
    physical = torch.tensor([[4, 5, 0], [3, 6, 1]], dtype=torch.int32)
    work = {0: (torch.randn(2, shape.hidden), physical)}
    nothing = torch.empty(0, shape.hidden), torch.empty(0, shape.top_k, dtype=torch.int32)

    def run(rank: int) -> ExchangeTraffic:
        exchange = group.exchanges[rank]
        before = exchange.traffic
        rows, chosen = work.get(rank, nothing)
        exchange.combine(made_of(exchange.dispatch(Rows(rows), chosen), 0), weights_of(chosen))
        return exchange.traffic - before

    sent = group.each(run)
    assert sent[0].rows == 3 and sent[0].dispatch_bytes == 3 * (shape.hidden + 4)
    assert sent[0].routing_bytes == 2 * 4 + 3 * (4 + shape.top_k * 2)
    assert [one.combine_bytes for one in sent] == [0, 3 * shape.hidden * 4, shape.hidden * 4]


def test_between_nodes_a_row_goes_once_to_each(opened: Opening) -> None:
    shape = shape_for("hierarchical")
    group = opened("hierarchical", shape)
    row, physical = torch.randn(1, shape.hidden), torch.tensor([[6, 9, 10]], dtype=torch.int32)  # ranks 2, 3 and 3

    def run(rank: int) -> ExchangeTraffic:
        exchange = group.exchanges[rank]
        chosen = (row, physical) if rank == 0 else (row[:0], physical[:0])
        exchange.combine(made_of(exchange.dispatch(Rows(chosen[0]), chosen[1]), 0), weights_of(chosen[1]))
        return exchange.between.traffic  # type: ignore[attr-defined]

    assert [one.rows for one in group.each(run)] == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_rows_are_refused(opened: Opening, kind: str) -> None:
    shape = shape_for(kind)
    rows = torch.zeros(shape.max_tokens + 1, shape.hidden)
    physical = torch.zeros(shape.max_tokens + 1, shape.top_k, dtype=torch.int32)
    with pytest.raises(ValueError, match="room for"):
        opened(kind, shape).exchanges[0].dispatch(Rows(rows), physical)


@pytest.mark.parametrize("kind", ["shared_memory", "all_to_all"])
def test_a_closed_exchange_says_so(opened: Opening, kind: str) -> None:
    shape = shape_for(kind)
    group = opened(kind, shape)
    for exchange in group.exchanges:
        exchange.close()
    with pytest.raises(RankLost, match="closed"):
        group.exchanges[0].dispatch(Rows(torch.zeros(1, shape.hidden)), torch.zeros(1, shape.top_k, dtype=torch.int32))
    assert group.exchanges[0].traffic == ExchangeTraffic()


def test_views_of_few_sizes_are_kept() -> None:
    shape = shape_for("all_to_all", max_tokens=3 * KEPT_SIZES)
    buffers = ExchangeBuffers(shape)
    first = buffers.parts(shape, 1)
    assert buffers.parts(shape, 1) is first
    held = [weakref.ref(buffers.parts(shape, tokens)[0]) for tokens in range(1, shape.max_tokens + 1)]
    gc.collect()
    assert sum(one() is not None for one in held) <= KEPT_SIZES + 1  # and that of `first`


@pytest.mark.parametrize("kind", ["shared_memory", "all_to_all"])
def test_after_a_loss_everything_says_so(opened: Opening, kind: str) -> None:
    group = opened(kind, shape_for(kind), 0.5)
    weights = torch.ones(1, group.shape.top_k)
    rows, physical = torch.randn(1, group.shape.hidden), torch.zeros(1, group.shape.top_k, dtype=torch.int32)

    def use(rank: int) -> None:
        exchange = group.exchanges[rank]
        if rank == group.shape.ranks - 1:
            exchange.begin_dispatch(Rows(rows), physical)
            exchange.close()
            return
        ways = [
            lambda: exchange.begin_dispatch(Rows(rows), physical),
            exchange.finish_dispatch,
            lambda: exchange.begin_combine(rows[:0]),
            lambda: exchange.finish_combine(weights),
        ]
        with pytest.raises(RankLost):
            for _ in range(STEPS):
                exchange.combine(exchange.dispatch(Rows(rows), physical).whole().values, weights)
        for way in ways * 3:
            with pytest.raises(RankLost):
                way()

    group.each(use)


def test_more_rows_than_places_have_numbers_for_are_refused() -> None:
    sizes = {"ranks": 2, "slots": 4, "top_k": 4, "hidden": 64, "wire": torch.int8, "back": torch.float32}
    assert ExchangeShape(**sizes, max_tokens=2**28 - 1).most_received < 2**31
    for max_tokens in (2**28, 2**32 + 1, 2**63):
        with pytest.raises(ValueError, match="32 bits"):
            ExchangeShape(**sizes, max_tokens=max_tokens)


@pytest.mark.parametrize("other_host", [False, True])
def test_ranks_of_one_host_listen_there_alone(other_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: on whatever address the host's name has, where anyone on the network could connect."""
    asked: list[bool] = []

    def connected(*_: object, on_one_host: bool = False) -> None:
        asked.append(on_one_host)
        raise RankLost(None, "enough")

    hosts = [all_to_all.host_key(), "another" if other_host else all_to_all.host_key()]
    words = [f"{host} {os.getpid()}".encode() for host in hosts]
    monkeypatch.setattr(all_to_all, "connected", connected)
    monkeypatch.setattr(all_to_all, "exchanged", lambda *_: words)
    with pytest.raises(RankLost, match="enough"):
        AllToAllExchange.join(shape_for(KINDS[0]), 0, HashStore(), deadline=1.0)
    assert asked == [not other_host]
