"""The ranks of a group before there is one: asked and heard together, hosts among them waited for when they are lost.

It does not know what they are asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from serving.expert_parallel.exchange import RankLost
from serving.rank_group.child import RankProcess
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.restarts import RankKeeper

log = logging.getLogger(__name__)

ENDING_SECONDS = 60.0  # that the process of a host that is lost may take to end

Does = Callable[[RankProcess], None]
"""With one of the ranks. Raises RankLost, and ValueError for what it says is wrong."""


class Gathering:
    """Of ranks from `local` on, which are hosts and come by the `lobby`, and those below, of which none is spared."""

    def __init__(self, lobby: HostLobby | None, local: int) -> None:
        self._lobby, self._local = lobby, local

    def ask_each(self, others: Sequence[RankProcess], ask: Does) -> None:
        """A host that is lost is found out about where it is heard."""
        for other in others:
            try:
                ask(other)
            except RankLost:
                if other.rank < self._local:
                    raise
                other.process.kill()

    def hear_each(self, keepers: Sequence[RankKeeper], hear: Does, anew: Does, seconds: float) -> None:
        """`hear` all; a host that comes again does all `anew` that it has been asked so far.

        For that they have so many `seconds` together. All hosts are there in the end, also the first to be heard, which
        may have been lost since.
        """
        until = time.monotonic() + seconds
        for keeper in keepers:
            try:
                hear(keeper.current)
            except RankLost as lost:
                if keeper.current.rank < self._local:
                    raise
                self._come_again(keeper, anew, until, lost)
        while gone := next(self._gone(keepers), None):
            self._come_again(gone, anew, until, RankLost(gone.current.rank, "its process has ended"))

    def _gone(self, keepers: Sequence[RankKeeper]) -> Iterator[RankKeeper]:
        hosts = (keeper for keeper in keepers if keeper.current.rank >= self._local)
        return (keeper for keeper in hosts if keeper.current.process.poll() is not None)

    def _come_again(self, keeper: RankKeeper, anew: Does, until: float, lost: RankLost) -> None:
        assert self._lobby is not None, "hosts come by a lobby"
        rank = keeper.current.rank
        while True:
            log.warning("%s, before there is a group", lost)
            keeper.current.kill(ENDING_SECONDS)
            keeper.current = self._lobby.again(rank, until=until)
            try:
                anew(keeper.current)
                return
            except RankLost as again:
                lost = again
