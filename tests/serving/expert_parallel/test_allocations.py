"""In the steady state a dispatch and a combine through shared memory allocate nothing that stays, and no tensor."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from bench.expert_rank import Allocated, Case, allocated
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from tests.serving.expert_parallel.groups import Group

SMALL = 4096  # bytes that Python keeps of numbers and frames, however many rounds there are
TRIES = 3


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """What the tests before these have left is freed before the rounds, and not between two looks at the heap."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_rounds_leave_nothing_allocated() -> None:
    case = Case(ranks=1, tokens=8, hidden=512, wire="int8", back="bf16", rounds=400)
    exchange = SharedMemoryExchange.join(case.shape, 0, HashStore(), deadline=10.0)
    # The heap is all threads': what another one takes meanwhile is not there each time, what rounds leave is.
    found = [allocated(exchange, case) for _ in range(TRIES)]
    exchange.close()
    assert [each.torch for each in found] == [0] * TRIES
    assert min(abs(each.heap) for each in found) < SMALL
    assert max(abs(each.python) for each in found) < SMALL


def test_allocations_would_be_seen() -> None:
    """The same over the local exchange, which makes its tensors anew."""
    case = Case(ranks=1, tokens=8, hidden=512, wire="int8", back="bf16", rounds=40)
    group = Group("local", case.shape)
    found: Allocated = allocated(group.exchanges[0], case)
    group.close()
    assert found.torch > 40 // 4 * 8 * 512
