"""The wire between simulated workers: each way carries one transfer after the other, and is never idle for another."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.simulator.network import Ports
from deploy.simulator.virtual_loop import VirtualLoop, run_virtually

Transfer = tuple[str, str, float, float]  # sender, receiver, when it begins, seconds


def carried(transfers: list[Transfer]) -> list[float]:
    """When each is over."""

    async def main(loop: VirtualLoop) -> list[float]:
        ports = Ports()

        async def one(sender: str, receiver: str, at: float, seconds: float) -> float:
            await asyncio.sleep(at)
            await ports.carry(sender, receiver, seconds)
            return loop.time()

        return await asyncio.gather(*(one(*transfer) for transfer in transfers))

    return run_virtually(main)


def test_a_busy_sender_keeps_no_receiver_from_others() -> None:
    long, behind, free = carried([("a", "x", 0.0, 10.0), ("a", "y", 0.0, 1.0), ("b", "y", 0.5, 1.0)])
    assert (long, behind) == (pytest.approx(10.0), pytest.approx(11.0))
    assert free == pytest.approx(1.5), "nothing comes in at y until a has sent to x"


def test_a_busy_receiver_keeps_no_sender_from_others() -> None:
    found = carried([("a", "x", 0.0, 10.0), ("b", "x", 0.0, 1.0), ("b", "y", 0.5, 1.0)])
    assert found == [pytest.approx(10.0), pytest.approx(11.0), pytest.approx(2.0)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.floats(0.0, 5.0), st.floats(0.01, 3.0)),
        min_size=1,
        max_size=12,
    )
)
def test_no_way_carries_more_than_it_can_nor_wastes_its_time(transfers: list[Transfer]) -> None:
    """What one way carries takes at least its seconds, and ends no later than if it had to wait for every other."""
    ended = carried(transfers)
    ways: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for (sender, receiver, at, seconds), end in zip(transfers, ended, strict=True):
        assert end >= at + seconds - 1e-9
        ways[sender].append((at, seconds, end))
        ways[receiver].append((at, seconds, end))
    for through in ways.values():
        first, total = min(at for at, _, _ in through), sum(seconds for _, seconds, _ in through)
        assert max(end for _, _, end in through) >= first + total - 1e-9
    latest = max(at for _, _, at, _ in transfers) if transfers else 0.0
    assert max(ended) <= latest + sum(seconds for *_, seconds in transfers) + 1e-6
