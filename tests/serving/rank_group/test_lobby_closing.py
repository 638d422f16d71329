"""A group closes in the moment after a host has come."""

from __future__ import annotations

from typing import Any

import pytest

from serving.expert_parallel.exchange import RankLost
from serving.rank_group.host_plan import HostPlace
from tests.serving.rank_group.test_host_lobby import LATER, Lobby, lobby

__all__ = ["lobby"]


class ClosesNow(dict[HostPlace, Any]):
    """Another thread's close() comes between the look and the taking."""

    def __contains__(self, place: object) -> bool:
        there = super().__contains__(place)
        self.clear()
        return there


def test_who_waits_for_a_host_is_told_though_it_had_come(lobby: Lobby) -> None:
    lobby.places = [HostPlace(2, 1), LATER]
    lobby._came = ClosesNow({LATER: object()})
    lobby._closing.set()
    with pytest.raises(RankLost, match="closing"):
        lobby.again(3)
