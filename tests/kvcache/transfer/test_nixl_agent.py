"""NIXL starts only where it is safe."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvcache.transfer import nixl_agent
from kvcache.transfer.choice import lenders_for
from kvcache.transfer.lent_memory import TransferUnavailable
from serving.errors import InvalidRequest


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setattr(nixl_agent.shutil, "disk_usage", lambda path: SimpleNamespace(free=16 << 20))


def test_it_does_not_start_where_shared_memory_is_short(little_memory: None) -> None:
    with pytest.raises(
        TransferUnavailable, match="wants 32 MiB free in /dev/shm, which has 16; give the container more"
    ):
        nixl_agent.Agent(1 << 20)


def test_other_ways_are_taken_then_unless_it_was_asked_for(
    little_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lenders = lenders_for("auto")
    assert "NIXL wants 32 MiB" in caplog.text
    lenders.close()
    with pytest.raises(InvalidRequest, match="--kv-transport nixl: NIXL wants 32 MiB"):
        lenders_for("nixl")
