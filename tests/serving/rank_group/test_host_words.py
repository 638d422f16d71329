"""What a host tells the leader of its experts: those that its ranks have, also where a meeting has failed between."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.expert_parallel.exchange import ExchangeShape, RankLost
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.expert_parallel.surviving import Brought
from serving.model.expert_balance import ExpertPlacement
from serving.rank_group import host_bridge
from serving.rank_group.child import RankProcess
from serving.rank_group.host_bridge import HostBridge
from serving.rank_group.host_line import HostGone, HostLine, HostWord
from serving.rank_group.host_session import HostedModel, HostSession
from serving.rank_group.messages import BeginEpoch, EpochEnded, ExpertsHeld, HoldExperts, MapKV

SECONDS = 60.0
SHAPE = ExchangeShape(ranks=2, slots=2, top_k=1, hidden=8, max_tokens=4, wire=torch.float32, back=torch.float32)
IS = ((0, 1, 2), (3, 3, 3))


@pytest.fixture
def lines() -> Iterator[tuple[HostLine, HostLine]]:
    """The leader's end and the host's."""
    ours, theirs = (HostLine(one) for one in socket.socketpair())
    ours.trusted = theirs.trusted = True
    yield ours, theirs
    ours.close()
    theirs.close()


def ended(
    lines: tuple[HostLine, HostLine], folder: Path, monkeypatch: pytest.MonkeyPatch, held: object
) -> Brought | None:
    """What a bridge reports whose host met for the epoch `IS` while the ranks beside the bridge did not."""

    def fails(*_: object, **__: object) -> None:
        raise RankLost(1, "it has ended")

    monkeypatch.setattr(SharedMemoryExchange, "join", fails)
    monkeypatch.setattr(host_bridge, "also_ours", lambda _: None)
    ours, theirs = lines
    bridge = HostBridge(ours)
    bridge._kv = cast(MapKV, SimpleNamespace(deadline=SECONDS, shape=SHAPE))
    placements = (ExpertPlacement(IS, 4), ExpertPlacement(IS, 4))
    theirs.send("held", {"loaded": 0}, SECONDS)
    assert bridge.hold(HoldExperts(placements, 1)) == ExpertsHeld(0)
    order = BeginEpoch(
        number=1, rank=1, processes=(1, 2), placements=placements, store=folder / "store", meeting=SECONDS
    )
    theirs.send("begun", {"error": None}, SECONDS)
    assert bridge.begin(order).lost
    theirs.send("ended", {"held": held}, SECONDS)
    return bridge.end().held


def test_after_a_failed_meeting_a_bridge_reports_what_its_host_has(
    lines: tuple[HostLine, HostLine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the leader counts on experts that are gone, and gives nobody time to load them."""
    assert ended(lines, tmp_path, monkeypatch, [[3], [2, 3]]) == [[3], [2, 3]]


@pytest.mark.parametrize("held", [None, [], [[3]], [[3], []], [[3], [4]], [[3], [-1]], [[3], ["3"]], [[3], [True]]])
def test_what_no_host_can_hold_ends_the_connection(
    held: object, lines: tuple[HostLine, HostLine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HostGone):
        ended(lines, tmp_path, monkeypatch, held)


class ToldRank:
    """A rank of a host that has placed these experts, or none yet."""

    def __init__(self, held: Brought | None) -> None:
        self.rank, self.held = 0, held

    def ask(self, *_: object) -> None: ...

    def answer(self, *_: object) -> EpochEnded:
        return EpochEnded(self.held)


def reported(lines: tuple[HostLine, HostLine], before: list[Brought], *held: Brought | None) -> list[list[int]]:
    """What a host says at the end of an epoch whose ranks had loaded `before` and have placed `held`."""
    ours, theirs = lines
    session = HostSession(theirs, cast(HostedModel, None))
    session._ranks = [cast(RankProcess, ToldRank(one)) for one in held]
    session._before = before
    session._do(HostWord("end", {}, 0))
    return ours.answer("ended", SECONDS).lists("held", 7)


def test_a_host_has_what_its_ranks_have_placed_or_loaded_at_first(lines: tuple[HostLine, HostLine]) -> None:
    loaded: list[Brought] = [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]
    assert reported(lines, loaded, None, None) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert reported(lines, loaded, [[5, 0], [1, 1]], None) == [[0, 2, 3, 5], [1, 2, 3]]
    assert reported(lines, loaded, [[5], [1]], [[5], [7]]) == [[5], [1, 7]]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=2), lambda inner: st.lists(inner, max_size=3)
)


@given(ANYTHING)
def test_lists_of_numbers_are_that_or_end_the_connection(found: object) -> None:
    word = HostWord("held", {"held": found}, 0)
    sound = isinstance(found, list) and all(
        isinstance(each, list) and each and all(type(number) is int and 0 <= number <= 3 for number in each)
        for each in found
    )
    if sound:
        assert word.lists("held", 3) == found
    else:
        with pytest.raises(HostGone):
            word.lists("held", 3)
