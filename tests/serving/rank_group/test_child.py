"""What a leader hears of a rank's process that ends."""

from __future__ import annotations

import select

import pytest

from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import ProcessWatch
from serving.rank_group import child
from serving.rank_group.child import RankProcess
from tests.serving.half_ended import LAST_WORD

LONG = 60.0


def test_a_rank_is_lost_as_soon_as_its_process_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket and its pidfd tell it much later, when the kernel has freed its memory; here they never do."""
    monkeypatch.setattr(child, "RANK_MODULE", "tests.serving.half_ended")
    rank = RankProcess(1)
    try:
        assert rank.hear(LONG) == LAST_WORD
        with pytest.raises(RankLost, match="its process has ended"):
            rank.hear(LONG)
        watch = ProcessWatch({1: rank.process.pid})
        assert watch.ended() == 1
        assert watch.all_ended() == set(), "another of its threads lives on"
        assert not select.select([rank.channel], [], [], 0)[0]
        watch.close()
    finally:
        rank.kill(LONG)


def test_what_a_rank_has_said_before_it_ended_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "RANK_MODULE", "tests.serving.half_ended")
    monkeypatch.setattr(RankProcess, "ending", True)
    rank = RankProcess(1)
    try:
        select.select([rank.channel], [], [], LONG)
        assert rank.hear(0.0) == LAST_WORD
    finally:
        rank.kill(LONG)
