"""The stand-in for CUDA: it reorders what nothing orders, keeps what something does, and waits where CUDA would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.fake_cuda import POISON, FakeCuda

SEEDS = range(40)


def crossed(cuda: FakeCuda, *, ordered: bool) -> int:
    """What a second stream copies of a number that the first one writes."""
    number = cuda.room(1)
    side, copied = cuda.make("side"), cuda.pinned(1)
    number.fill_(7)
    if ordered:
        event = cuda.event()
        event.record(cuda.current())
        side.wait_event(event)
    with cuda.on(side):
        copied.copy_(number, non_blocking=True)
        done = cuda.event()
        done.record()
    done.synchronize()
    return int(copied)


@pytest.mark.parametrize("eager", [0.0, 0.5])
def test_only_events_order_streams(eager: float) -> None:
    assert {crossed(FakeCuda(seed, eager), ordered=False) for seed in SEEDS} == {7, POISON}
    assert {crossed(FakeCuda(seed, eager), ordered=True) for seed in SEEDS} == {7}


def test_the_host_reads_old_bytes_until_it_has_waited() -> None:
    cuda = FakeCuda()
    numbers = cuda.tensor(torch.arange(4))
    host = cuda.pinned(32).view(torch.int64)
    host.copy_(numbers + 1, non_blocking=True)
    event = cuda.event()
    event.record()
    assert host.view(torch.uint8).unique().tolist() == [POISON]
    event.synchronize()
    assert host.tolist() == [1, 2, 3, 4]
    assert (cuda.total("launch"), cuda.total("copy"), cuda.total("wait: event")) == (1, 1, 1)


@pytest.mark.parametrize(
    "made", [lambda one: one.new_empty(64), torch.empty_like, lambda one: one.new_empty_strided((32,), (2,))]
)
def test_memory_that_nothing_is_written_to_stays_as_it_is(made: Callable[[Tensor], Tensor]) -> None:
    """Whatever this process had there before: a test of what is computed from it goes alike each time."""
    cuda = FakeCuda()
    room = made(cuda.tensor(torch.zeros(64)))
    cuda.finish()
    assert cuda.peek(room).view(torch.uint8).unique().tolist() == [POISON]
    assert cuda.total("launch") == 0


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda numbers: numbers[2].item(), 1),
        (lambda numbers: numbers.tolist(), 1),
        (lambda numbers: numbers.nonzero(), 1),
        (lambda numbers: torch.empty(4, dtype=torch.int64).copy_(numbers, non_blocking=True), 1),
        (lambda numbers: numbers[:0].tolist(), 0),
        (lambda numbers: numbers.view(2, 2).sum(1), 0),
    ],
)
def test_what_waits(read: object, waits: int) -> None:
    """A copy of nothing does not, and neither does one that stays on the device."""
    cuda = FakeCuda()
    numbers: Tensor = cuda.tensor(torch.arange(4)) * 2
    assert callable(read)
    read(numbers)
    assert sum(count for counted, count in cuda.counts.items() if counted.what.startswith("wait")) == waits


def test_pinned_memory_is_read_late() -> None:
    """What is written to it too early is what arrives: places of a ring must be waited for."""
    cuda = FakeCuda()
    host = cuda.pinned(1).fill_(1)
    there = cuda.uploaded(host)
    host.fill_(2)
    assert there.item() == 2
