"""What a rank answers to its leader's words, and what it leaves behind."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from serving import temporary
from serving.channel import Channel, ChannelClosed
from serving.rank_group import rank_process
from serving.rank_group.member import EpochMember
from serving.rank_group.messages import BeginEpoch, EpochBegun, KVMapped, LoadShare, RunStep, StepFailed
from serving.rank_group.rank_process import FollowingRank
from serving.rank_group.shared_planes import MappedPlanes


def rank_with(**does: Any) -> FollowingRank:
    model = SimpleNamespace(norm=SimpleNamespace(weight=torch.empty(0)))
    member = SimpleNamespace(model=model, leave=lambda: None, **does)
    return FollowingRank(cast(EpochMember, member), cast(MappedPlanes, None))


@pytest.mark.parametrize("mistake", [AssertionError, IndexError, RuntimeError, struct.error])
def test_a_mistake_over_rows_ends_no_process(mistake: type[Exception]) -> None:
    """Each kind that the engine looks whose it is: a request would else end one rank after the other."""

    def breaks() -> None:
        raise mistake("a row of mine")

    assert rank_with(begin_step=breaks).does(RunStep(1, 0, None)) == StepFailed(1, f"{mistake.__name__}: a row of mine")


def test_a_rank_removes_the_folder_of_the_meeting_where_its_leader_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that move keep it as long as the epoch."""
    monkeypatch.setattr(temporary, "_folders", set())
    folder = tmp_path / "met"
    folder.mkdir()
    order = BeginEpoch(number=0, rank=1, processes=(1, 2), placements=(), store=folder / "store", meeting=1.0)
    assert rank_with(begin=lambda _: None).does(order) == EpochBegun()
    temporary.remove_temporary_folders()
    assert not folder.exists()


class Leader:
    """Says `words`, then closes; `happened` gets what it hears."""

    def __init__(self, words: Sequence[object], happened: list[object]) -> None:
        self._words, self._happened = list(words), happened

    def receive(self, _seconds: float | None) -> object:
        if not self._words:
            raise ChannelClosed("the leader has left")
        return self._words.pop(0)

    def send(self, word: object, _seconds: float) -> None:
        self._happened.append(word)


def test_a_rank_has_collected_its_garbage_before_it_may_be_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a tenth of a second, in which all others would stand still in the middle of a step."""
    happened: list[object] = []
    made = SimpleNamespace(model=None)
    kv = SimpleNamespace(segment=None, compiled=None, most_rows=1, deadline=1.0, balancing=None, bridged=False)
    for name in ("MappedPlanes", "EpochMember", "loader_of", "loaded_share"):
        monkeypatch.setattr(rank_process, name, lambda *_, **__: made)
    monkeypatch.setattr(rank_process, "keep_freed_memory", lambda: happened.append("keeps memory"))
    monkeypatch.setattr(rank_process, "collect_seldom", lambda: happened.append("collected"))
    order = LoadShare(path=Path(), dtype="float32", rank=1, ranks=2, redundant=0, threads=torch.get_num_threads())
    with pytest.raises(ChannelClosed):
        rank_process.serve(cast(Channel, Leader([order, kv], happened)))
    assert happened == ["keeps memory", "collected", KVMapped()]
