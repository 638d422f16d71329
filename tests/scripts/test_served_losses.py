"""What is noted of a loss, by what a group tells of itself while it gets over it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace
from typing import cast

import pytest

from scripts.served_group import Served
from scripts.served_losses import LOOK, lose
from serving.expert_parallel.recovery import RecoveryCounts
from serving.rank_group.leader import SpreadModel


async def test_a_step_that_is_counted_late_is_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group tells first for how long it has stood still, and another thread looks at any moment."""
    victim = SimpleNamespace(rank=1, process=SimpleNamespace(pid=0))
    ranks = SimpleNamespace(others=[victim], counts=RecoveryCounts(), configured=3, size=3)
    group = SimpleNamespace(heard=[[time.monotonic()]])
    monkeypatch.setattr(os, "kill", lambda _pid, _signal: None)

    async def over() -> None:
        ranks.size, ranks.counts.stalled_seconds = 2, 0.5
        await asyncio.sleep(20 * LOOK)
        ranks.counts.repeated_steps += 1
        await asyncio.sleep(20 * LOOK)
        ranks.size, ranks.counts.admitted, ranks.counts.stalled_seconds = 3, 1, 0.75
        while True:
            group.heard[0].append(time.monotonic())
            await asyncio.sleep(LOOK)

    getting_over = asyncio.create_task(over())
    loss = await lose(cast(Served, group), cast(SpreadModel, SimpleNamespace(ranks=ranks)), 1, signal.SIGKILL)
    getting_over.cancel()
    assert (loss.repeated, loss.stalled, loss.rejoined) == (1, 0.5, 0.25)
