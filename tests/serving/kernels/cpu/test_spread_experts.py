"""Experts that ranks share, computed by the kernels with the exchange inside: the bits of one process with all of them.

Ranks are threads here, each with kernels of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch import Tensor

from serving.expert_parallel.exchange import ExchangeShape, RankLost, Rows
from serving.expert_parallel.physical import PhysicalExperts
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from serving.kernels.layer_weights import ExpertSpread
from serving.model.expert_balance import ExpertPlacement
from tests.serving.expert_parallel.groups import Group
from tests.serving.kernels.cpu.formulas import PlainExperts

HIDDEN, WIDTH, EXPERTS, TOP_K = 96, 71, 7, 3
PLACEMENT = ExpertPlacement(((6, 0, 1, 2), (3, 4, 5, 2), (6, 3, 0, 1)), EXPERTS)  # of some there are copies
RANKS, SLOTS = len(PLACEMENT.slots), len(PLACEMENT.slots[0])
MOST_ROWS = 700
TRIES, PATIENCE = 60, 30.0  # seconds
SHAPE = ExchangeShape(
    ranks=RANKS, slots=SLOTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST_ROWS, wire=torch.float32, back=torch.float32
)


class Ranks:
    """All ranks of a layer of `kind`, and the experts all in one place."""

    def __init__(self, kernels: cpu.Kernels, kind: Kind, deadline: float = 10.0) -> None:
        plain = PlainExperts.random(kind, HIDDEN, WIDTH, EXPERTS, TOP_K).packed(kernels)
        self.whole = cpu.PackedExperts(plain)
        self.group = Group("shared_memory", replace(SHAPE, wire=kind.dtype), deadline)
        self.kernels = [cpu.Kernels(kernels.library, threads=kernels.threads, form=kernels.form) for _ in range(RANKS)]
        self.taken = torch.zeros(RANKS, EXPERTS, dtype=torch.int64)
        self.spread = []
        for rank, exchange in enumerate(self.group.exchanges):
            assert isinstance(exchange, SharedMemoryExchange)
            physical = PhysicalExperts(PLACEMENT, rank)
            spread = ExpertSpread(
                exchange=exchange.address, copies=physical.copies, physical=physical.table, taken=self.taken[rank]
            )
            here = tuple(plain.experts[expert] for expert in PLACEMENT.slots[rank])
            self.spread.append(cpu.PackedExperts(replace(plain, experts=here, spread=spread)))

    def add(self, rows: list[Tensor]) -> list[Tensor]:
        """What is added to zeros for the rows of each rank."""

        def one(rank: int) -> Tensor:
            out = torch.zeros_like(rows[rank])
            self.kernels[rank].experts(rows[rank], self.spread[rank], out)
            exchange = self.group.exchanges[rank]
            assert isinstance(exchange, SharedMemoryExchange)
            exchange.check()
            return out

        with ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(one, range(RANKS)))

    def close(self) -> None:
        self.group.close()
        for kernels in self.kernels:
            kernels.close()


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.name)
def ranks(kernels: cpu.Kernels, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(kernels, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("counts", [(1, 0, 0), (5, 1, 4), (MOST_ROWS, 0, 90), (MOST_ROWS, 650, MOST_ROWS)])
def test_ranks_have_the_bits_of_one_process(counts: tuple[int, ...], kernels: cpu.Kernels, ranks: Ranks) -> None:
    """Also of more rows than are computed at a time, and twice, since memory is used again."""
    for _ in range(2):
        rows = [torch.randn(count, HIDDEN) for count in counts]
        before, found = ranks.taken.clone(), ranks.add(rows)
        for rank, x in enumerate(rows):
            expected = torch.zeros_like(x)
            kernels.experts(x, ranks.whole, expected)
            assert torch.equal(found[rank], expected)
        taken = (ranks.taken - before).sum(dim=1)
        assert taken.tolist() == [count * TOP_K for count in counts]


@pytest.mark.parametrize("absent", ["left", "late"])
def test_a_rank_that_does_not_come_is_noticed(absent: str, kernels: cpu.Kernels) -> None:
    ranks = Ranks(kernels, Kind.BF16, deadline=0.2)
    try:
        if absent == "left":
            ranks.group.exchanges[2].close()
        out, [first, *_] = torch.zeros(4, HIDDEN), ranks.group.exchanges
        ranks.kernels[0].experts(torch.randn(4, HIDDEN), ranks.spread[0], out)
        assert isinstance(first, SharedMemoryExchange)
        with pytest.raises(RankLost):
            first.check()
        assert not out.any(), "nothing is returned with experts left out"
    finally:
        ranks.close()


def test_ranks_that_leave_between_rows_and_results_hold_up_no_thread(kernels: cpu.Kernels) -> None:
    """Also where no rows came, so that threads meet nowhere between hearing of the rows and of the results."""
    plain = PlainExperts.random(Kind.BF16, HIDDEN, WIDTH, EXPERTS, TOP_K).packed(kernels)
    team = cpu.Kernels(kernels.library, threads=4, form=kernels.form)
    shape = replace(SHAPE, wire=torch.bfloat16, max_tokens=64)
    for _ in range(TRIES):
        group, physical = Group("shared_memory", shape, 0.5), PhysicalExperts(PLACEMENT, 0)
        exchange = group.exchanges[0]
        assert isinstance(exchange, SharedMemoryExchange)
        spread = ExpertSpread(exchange=exchange.address, copies=physical.copies, physical=physical.table, taken=None)
        here = tuple(plain.experts[expert] for expert in PLACEMENT.slots[0])
        packed = cpu.PackedExperts(replace(plain, experts=here, spread=spread))
        for other in group.exchanges[1:]:
            other.begin_dispatch(
                Rows(torch.empty(0, HIDDEN, dtype=torch.bfloat16)), torch.empty(0, TOP_K, dtype=torch.int32)
            )
            other.close()
        out = torch.zeros(0, HIDDEN)
        step = Thread(target=team.experts, args=(torch.randn(0, HIDDEN), packed, out), daemon=True)
        step.start()
        step.join(PATIENCE)
        assert not step.is_alive(), "a thread waits for others that have left"
        with pytest.raises(RankLost):
            exchange.check()
        group.close()
    team.close()
