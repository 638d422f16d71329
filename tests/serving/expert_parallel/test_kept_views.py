"""What a dispatch through shared memory answers is kept for the next one alike: a few numbers, until the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import HashStore

from serving.expert_parallel.exchange import Received, Rows
from serving.expert_parallel.shared_memory import KEPT_VIEWS, SharedMemoryExchange
from tests.serving.expert_parallel.groups import SHAPE

ALONE = replace(SHAPE, ranks=1, top_k=1, max_tokens=2 * KEPT_VIEWS, wire=torch.int8)


def alone() -> SharedMemoryExchange:
    return SharedMemoryExchange.join(ALONE, 0, HashStore())


def dispatched(exchange: SharedMemoryExchange, tokens: int) -> Received:
    return exchange.dispatch(Rows(torch.zeros(tokens, ALONE.hidden)), torch.zeros(tokens, 1, dtype=torch.int32))


def combined(exchange: SharedMemoryExchange, received: Received) -> Tensor:
    assert received.results is not None
    return exchange.combine(received.results, torch.zeros(len(received.results), 1))


def round_of(exchange: SharedMemoryExchange, tokens: int) -> tuple[Received, Tensor]:
    """A dispatch of so many rows and its sums."""
    received = dispatched(exchange, tokens)
    return received, combined(exchange, received)


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("millrace-experts")


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_as_many_rows_again_are_answered_by_the_same_tensors() -> None:
    with closing(alone()) as exchange:
        first, second, third = ([*round_of(exchange, 5)] for _ in range(3))
        assert third[0] is first[0] and third[1] is second[1] is first[1]
        assert second[0].counts.data_ptr() != first[0].counts.data_ptr(), "of two dispatches that may be under way"
        received, sums = round_of(exchange, 4)
        assert received.results is not None and len(received.results) == len(received.in_place().addresses) == 4
        assert len(sums) == 4


def test_as_many_rows_elsewhere_are_others() -> None:
    with closing(alone()) as exchange:
        under_way = [dispatched(exchange, 5) for _ in range(2)]
        for received in under_way:
            combined(exchange, received)
        addresses = [
            received.results.data_ptr()
            for received in [*under_way, *(round_of(exchange, 5)[0] for _ in range(2))]
            if received.results is not None
        ]
        assert addresses[0] == addresses[2] == addresses[3] != addresses[1]


def test_few_numbers_of_rows_are_kept() -> None:
    with closing(alone()) as exchange:
        held = [weakref.ref(round_of(exchange, tokens)[0].results) for tokens in range(1, ALONE.max_tokens + 1)]
        gc.collect()
        assert 0 < sum(one() is not None for one in held) <= KEPT_VIEWS


def test_the_end_gives_the_memory_back() -> None:
    with no_collections():
        before = mapped_segments()
        exchange = alone()
        round_of(exchange, 5)
        assert mapped_segments() == before + 1
        exchange.close()
        assert mapped_segments() == before
