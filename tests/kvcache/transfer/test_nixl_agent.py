"""NIXL starts only where it is safe, and a thread of it that breaks keeps nobody waiting."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvcache.transfer import nixl_agent, nixl_transport
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


class BreakingAgent(nixl_agent.Agent):
    """Without NIXL; meeting a peer brings out a mistake that nobody has thought of."""

    def _start(self) -> bytes:
        return b"here"

    def _meet(self, metadata: bytes) -> str:
        raise KeyError(metadata)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_keeps_nobody_waiting_and_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "require_shared_memory", lambda: None)
    monkeypatch.setattr(nixl_transport, "Agent", BreakingAgent)
    writers = nixl_transport.NixlWriters()
    agent = writers.agent()
    assert writers.agent() is agent and agent.call(lambda: 7).result(5) == 7
    waiting = [agent.meet(b"there"), agent.write("peer", 0, 0, b"bytes")]
    for done in (*waiting, agent.meet(b"elsewhere"), agent.write("peer", 0, 0, b"bytes")):
        with pytest.raises(TransferUnavailable):
            done.result(5)
    agent._thread.join(5)  # what broke it has been told of
    assert agent.over and writers.agent() is not agent, "the next transfer has an agent that works"
    writers.close()
