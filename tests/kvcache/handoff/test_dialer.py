"""The dialer's channels: one to each address while handoffs go there, and none some time after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvcache.handoff.dialer import Dialer
from serving.messages import LeaseGrant
from tests.fakes.loop_time import passing_time
from tests.fakes.sequences import lease_id

Passing = Callable[[float], Awaitable[None]]


def grant(port: int) -> LeaseGrant:
    return LeaseGrant(lease=lease_id(), cached_tokens=0, address=f"127.0.0.1:{port}", kv_dtype="float32")


@pytest.fixture
async def let_pass() -> Passing:
    """So many seconds pass, and what they bring about."""
    pass_ = passing_time()

    async def passed(seconds: float) -> None:
        pass_(seconds)
        for _ in range(20):
            await asyncio.sleep(0)

    return passed


async def test_channels_to_workers_that_are_gone_end(let_pass: Passing) -> None:
    """A decode worker in a crash loop has another port each time."""
    dialer = Dialer(idle_seconds=1000.0)
    for port in range(1, 6):
        await dialer.dial(grant(port)).close()
    assert dialer.channels == 5
    await let_pass(1001.0)
    assert dialer.channels == 0
    await dialer.close()


async def test_a_channel_in_use_stays_and_is_shared(let_pass: Passing) -> None:
    dialer = Dialer(idle_seconds=1000.0)
    first, second = dialer.dial(grant(1)), dialer.dial(grant(1))
    await first.close()
    await let_pass(1001.0)
    assert dialer.channels == 1, "another handoff goes over it"
    await second.close()
    third = dialer.dial(grant(1))
    await let_pass(1001.0)
    assert dialer.channels == 1, "it is used again"
    await third.close()
    await let_pass(1001.0)
    assert dialer.channels == 0
    await dialer.close()


async def test_a_handoff_that_is_closed_twice_counts_once(let_pass: Passing) -> None:
    dialer = Dialer(idle_seconds=1000.0)
    first, second = dialer.dial(grant(1)), dialer.dial(grant(1))
    await first.close()
    await first.close()
    await let_pass(1001.0)
    assert dialer.channels == 1
    await second.close()
    await dialer.close()
    assert dialer.channels == 0
