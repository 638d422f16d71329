"""The waits of one rank for the others of its layout: each ends within a deadline, and a lost rank is named.

All process groups of a rank share them: whoever waits for a rank that waits for a lost one names the lost one. It does
not know what is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store, Work

from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import ProcessWatch

POLL = timedelta(milliseconds=20)  # between looks at the processes of the others
WAITING = 0.5  # of the deadline: how long a rank waits before it says so
ROLL_CALL = 0.05  # of the deadline: how long a rank that has given up waits to hear who else waits
FIRST = "lost"  # under which the store has the rank that was lost first
DEATH_SECONDS = 0.05  # a broken connection is seen before the end of the process that held it


class BoundedWaits:
    """Waits of `rank`, one of `ranks`. After a RankLost every later wait raises the same one."""

    def __init__(self, store: Store, rank: int, ranks: int, watch: ProcessWatch, deadline: float) -> None:
        """`store` is where ranks that have waited for `deadline` seconds find out for whom."""
        self.rank, self.ranks, self.deadline = rank, ranks, deadline
        self.seconds = 0.0  # spent in waits, so far
        self._store, self._watch = store, watch
        self._lost: RankLost | None = None

    def check(self) -> None:
        """Raises the RankLost that there was, or that tells of the end."""
        if self._lost is not None:
            raise self._lost

    def begin(self, start: Callable[[], Work]) -> Work:
        """An operation that is to be finished. Raises RankLost where its connection is broken already."""
        self.check()
        try:
            return start()
        except RuntimeError as error:
            raise self._broken(error) from error

    def finish(self, work: Work) -> None:
        """Wait until the operation is done. Raises RankLost."""
        self.check()
        began, said = time.monotonic(), False
        try:
            while not self._ended(work):
                if (dead := self._watch.ended()) is not None:
                    raise self._lost_rank(dead, "its process has ended")
                waited = time.monotonic() - began
                if not said and waited >= WAITING * self.deadline:
                    said = True
                    self._store.set(self._waiting(self.rank), "")
                if waited >= self.deadline:
                    raise self._lost_rank(self._missing(), "it has not answered within the deadline")
            if said:  # it was late, and lost later it is not to count as one that waits
                self._store.delete_key(self._waiting(self.rank))
        except RuntimeError as error:  # gloo's word for a connection that broke
            raise self._broken(error) from error
        finally:
            self.seconds += time.monotonic() - began

    def _broken(self, error: RuntimeError) -> RankLost:
        return self._lost_rank(self._watch.ended(DEATH_SECONDS), f"its connection is broken: {error}")

    def _lost_rank(self, rank: int | None, reason: str) -> RankLost:
        """Of several ranks, the first that was named: the others left because of it, as this one does."""
        if rank is not None:
            rank = int(self._store.compare_set(FIRST, "", str(rank)))
        elif self._store.check([FIRST]):
            rank = int(self._store.get(FIRST))
        self._lost = RankLost(rank, reason)
        return self._lost

    def _ended(self, work: Work) -> bool:
        """Waits for a moment; raises what the operation does."""
        began = time.monotonic()
        try:
            work.wait(POLL)
        except RuntimeError:
            if time.monotonic() - began < POLL.total_seconds():
                raise  # it was not the time that was up
            return False
        return True

    def _waiting(self, rank: int) -> str:
        return f"waiting/{rank}"

    def _missing(self) -> int | None:
        """The one rank that does not say it waits, as the others do; None where there are several."""
        until = time.monotonic() + ROLL_CALL * self.deadline
        while True:
            silent = [rank for rank in range(self.ranks) if not self._store.check([self._waiting(rank)])]
            if len(silent) <= 1 or time.monotonic() >= until:
                return silent[0] if len(silent) == 1 else None
            time.sleep(ROLL_CALL * self.deadline / 20)

    def close(self) -> None:
        """Waits that are asked for later raise RankLost."""
        self._lost = self._lost or RankLost(self.rank, "its groups are closed")
        self._watch.close()
