"""The ranks of a group before there is one: asked and heard together, hosts among them waited for when they are lost.

It does not know what they are asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from serving.expert_parallel.exchange import RankLost
from serving.rank_group.child import RankProcess
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.restarts import RankKeeper

log = logging.getLogger(__name__)

ENDING_SECONDS = 60.0  # that the process of a host that is lost may take to end
LOOK_SECONDS = 0.2  # between looks whether others have been lost while some come again

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

        Those that are lost come again beside each other, and beside the others: each has so many `seconds` from when it
        was found to be lost first. All hosts are there in the end, also the first to be heard, which may have been lost
        since. Where one does not, the others are not waited for either, and the lobby is closed.
        """
        untils: dict[int, float] = {}

        def come_again(keeper: RankKeeper, lost: RankLost) -> None:
            until = untils.setdefault(keeper.current.rank, time.monotonic() + seconds)
            coming[pool.submit(self._come_again, keeper, anew, until, lost)] = keeper

        hosts = sum(keeper.current.rank >= self._local for keeper in keepers)
        coming: dict[Future[None], RankKeeper] = {}
        with ThreadPoolExecutor(max(1, hosts), "host") as pool, self._given_up_together(coming):
            for keeper in keepers:
                try:
                    hear(keeper.current)
                except RankLost as lost:
                    if keeper.current.rank < self._local:
                        raise
                    come_again(keeper, lost)
            while True:
                for keeper in self._gone(keepers, coming.values()):
                    come_again(keeper, RankLost(keeper.current.rank, "its process has ended"))
                if not coming:
                    break
                for future in wait(coming, LOOK_SECONDS, FIRST_COMPLETED).done:
                    coming.pop(future)
                    future.result()

    def _gone(self, keepers: Sequence[RankKeeper], coming: Collection[RankKeeper]) -> list[RankKeeper]:
        """Hosts that are lost, and do not come again already."""
        hosts = (keeper for keeper in keepers if keeper.current.rank >= self._local and keeper not in coming)
        return [keeper for keeper in hosts if keeper.current.process.poll() is not None]

    @contextmanager
    def _given_up_together(self, coming: Mapping[Future[None], RankKeeper]) -> Iterator[None]:
        """Where the start fails nobody waits for hosts any more, or hears one that loads."""
        ready = False
        try:
            yield
            ready = True
        finally:
            if not ready and coming:
                assert self._lobby is not None, "hosts come by a lobby"
                self._lobby.close()
                while left := wait(coming, LOOK_SECONDS).not_done:
                    for future in left:
                        coming[future].current.process.kill()

    def _come_again(self, keeper: RankKeeper, anew: Does, until: float, lost: RankLost) -> None:
        assert self._lobby is not None, "hosts come by a lobby"
        rank = keeper.current.rank
        while True:
            log.warning("%s is lost, before there is a group: %s", keeper.current.called, lost.reason)
            keeper.current.kill(ENDING_SECONDS)
            keeper.current = self._lobby.again(rank, until=until)
            try:
                anew(keeper.current)
                return
            except RankLost as again:
                lost = again
