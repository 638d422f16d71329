"""The KV memory of a role that has ended is free before the next one's is taken."""

from __future__ import annotations

import asyncio
import weakref

import pytest
import torch

from deploy.worker import life
from deploy.worker.life import give_back_kv


async def test_memory_that_a_call_still_holds_is_waited_for() -> None:
    calls = [torch.zeros(1)]
    kept = [weakref.ref(calls[0])]
    asyncio.get_running_loop().call_later(0.05, calls.clear)
    await give_back_kv(kept)
    assert kept[0]() is None


async def test_memory_that_stays_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(life, "GIVE_BACK_SECONDS", 0.0)
    calls = [torch.zeros(1)]
    await give_back_kv([weakref.ref(calls[0])])
    assert "1 of 1 KV planes of the role before are still held" in caplog.text
