"""The waits of one rank for the others of its group: each ends within a deadline, and a lost rank is named.

All process groups of a rank share them: whoever waits for a rank that waits for a lost one names the lost one. It does
not know what is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import Store, Work

from serving.expert_parallel.bounded import BoundedStore, StoreUnavailable
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import ProcessWatch

Begun = TypeVar("Begun")

POLL = timedelta(milliseconds=5)  # between looks at the processes of the others
WAITING = 0.25  # of the deadline: how long a rank waits before it says so
ROLL_CALL = 0.75  # of the deadline: how long, at most, a rank that has given up waits to hear who else waits
FIRST = "lost"  # under which the store has the rank that was lost first
LEAVING_SECONDS = 1.0  # that a rank which leaves takes, at most, to say so
DEATH_SECONDS = 0.05  # a broken connection is seen before the end of the process that held it


def ended(work: Work) -> bool:
    """Waits for a moment; raises what the operation does."""
    began = time.monotonic()
    try:
        work.wait(POLL)
    except RuntimeError:
        if time.monotonic() - began < POLL.total_seconds():
            raise  # it was not the time that was up
        return False
    return True


class BoundedWaits:
    """Waits of `rank`, one of `ranks`. After a RankLost every later wait raises one that says the same."""

    def __init__(self, store: Store, rank: int, ranks: int, watch: ProcessWatch, deadline: float) -> None:
        """`store` is where ranks that have waited for `deadline` seconds find out for whom; it has as long to answer.

        Where it does not, as when it ends with one of the ranks, a rank names the one that it misses itself.
        """
        self.rank, self.ranks, self.deadline = rank, ranks, deadline
        self.seconds = 0.0  # spent in waits, so far
        self._store, self._watch = BoundedStore(store, deadline), watch
        self._left: set[int] = set()  # ranks that have said so: what they sent before may still be on its way
        self._lost: tuple[int | None, str] | None = None  # the rank and the reason: an error would hold what it ended

    def check(self) -> None:
        """Raises the RankLost that there was, or that tells of the end."""
        if self._lost is not None:
            raise RankLost(*self._lost)

    def begin(self, start: Callable[[], Begun]) -> Begun:
        """What `start` gives, as an operation that is to be finished. Raises RankLost where it raises RuntimeError: its
        connection is broken already.
        """
        self.check()
        try:
            return start()
        except RuntimeError as error:
            raise self._broken(error) from error

    def finish(self, work: Work) -> None:
        """Wait until the operation is done. Raises RankLost."""
        self.until(partial(ended, work))

    def wait_on_host(self) -> None:
        """These do."""

    def passed(self) -> tuple[()]:
        """What is finished is done: no device is to pass it."""
        return ()

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait until this, which takes a moment to answer, is so; it raises RuntimeError where a connection has broken.

        Raises RankLost.
        """
        self.check()
        began, said = time.monotonic(), False
        try:
            while not reached():
                if (dead := self._dead()) is not None:
                    raise self._lost_rank(dead, "its process has ended")
                waited = time.monotonic() - began
                if not said and waited >= WAITING * self.deadline:
                    said = True
                    self._store.ask(lambda store: store.set(_waiting(self.rank), ""))
                if waited >= self.deadline:
                    raise self._lost_rank(self._missing(), "it has not answered within the deadline")
            if said:  # it was late, and lost later it is not to count as one that waits
                self._store.ask(lambda store: store.delete_key(_waiting(self.rank)))
        except StoreUnavailable as error:
            dead = self._watch.ended(besides=self._left)  # a connection to one that left would have broken
            self._lost = dead, f"it has not answered, nor does the store that could tell which: {error}"
            raise RankLost(*self._lost) from error
        except RuntimeError as error:  # gloo's word for a connection that broke
            raise self._broken(error) from error
        finally:
            self.seconds += time.monotonic() - began

    def _dead(self, wait_seconds: float = 0.0) -> int | None:
        """The lowest rank whose process ended without a word. A connection to one that left breaks if it is missed."""
        while (dead := self._watch.ended(wait_seconds, besides=self._left)) is not None:
            if not self._said_to_leave(dead):
                return dead
            self._left.add(dead)
        return None

    def _said_to_leave(self, rank: int) -> bool:
        try:
            return self._store.ask(lambda store: store.check([_leaving(rank)]))
        except StoreUnavailable:
            return False

    def _broken(self, error: RuntimeError) -> RankLost:
        told = str(error).partition(". ")[0]  # gloo goes on with advice
        dead = self._dead(DEATH_SECONDS)
        missed = dead if dead is not None else self._watch.ended()  # one that left too early
        return self._lost_rank(missed, f"its connection is broken: {told}")

    def _lost_rank(self, rank: int | None, reason: str) -> RankLost:
        """Of several ranks, the first that was named: the others left because of it, as this one does."""
        self._lost = rank, reason
        try:
            self._lost = self._store.ask(lambda store: _first(store, rank)), reason
        except StoreUnavailable as error:
            self._lost = rank, f"{reason}; {error}"
        return RankLost(*self._lost)

    def _missing(self) -> int | None:
        """The one rank that does not say it waits, as the others do; None where there are several.

        One that was late to begin, by as much as this deadline and a half, is heard: only then are several missing.
        """
        return self._store.ask(self._one_silent, ROLL_CALL * self.deadline)

    def _one_silent(self, store: Store) -> int | None:
        until = time.monotonic() + ROLL_CALL * self.deadline
        while not store.check([FIRST]):
            silent = [rank for rank in range(self.ranks) if not store.check([_waiting(rank)])]
            if len(silent) <= 1 or time.monotonic() >= until:
                return silent[0] if len(silent) == 1 else None
            time.sleep(ROLL_CALL * self.deadline / 40)
        return None  # whom the first to give up has named

    def close(self) -> None:
        """Say that this rank leaves, unless it has lost another. Waits that are asked for later raise RankLost."""
        if self._lost is None:
            self._lost = self.rank, "its exchange is closed"
            with suppress(StoreUnavailable, RuntimeError):  # it may have been another's, and gone with that one
                leaving = BoundedStore(self._store.store, LEAVING_SECONDS)
                leaving.ask(lambda store: store.set(_leaving(self.rank), ""))
        self._watch.close()


def _waiting(rank: int) -> str:
    """Under which name a rank says that it waits for others: long before it gives up, since others begin later."""
    return f"waiting/{rank}"


def _leaving(rank: int) -> str:
    """Under which name a rank says that it leaves of its own accord."""
    return f"left/{rank}"


def _first(store: Store, rank: int | None) -> int | None:
    if rank is not None:
        return int(store.compare_set(FIRST, "", str(rank)))
    return int(store.get(FIRST)) if store.check([FIRST]) else None
