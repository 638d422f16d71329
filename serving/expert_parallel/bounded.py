"""Calls that end in time: of a store whose process may have stopped, of a disk that may hang.

`torch.distributed`'s stores promise a limit for `wait` alone, and a TCPStore keeps not even that one: it has its server
end the wait, and waits for the answer. So each call runs in a thread that is left behind when its time is up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from serving.expert_parallel.exchange import RankLost

STORE_SECONDS = 5.0  # that a store may take to answer

Answer = TypeVar("Answer")


class Overdue(Exception):
    """A call has not come back in time. Its thread goes on until it does, and ends with the process."""


class StoreUnavailable(Exception):
    """The store that ranks meet in does not answer, or is gone."""


def within(seconds: float, act: Callable[[], Answer]) -> Answer:
    """What `act` gives or raises, by a thread of its own; Overdue after so many seconds.

    Of `act`, RuntimeError, ValueError, OSError and RankLost are passed on; other errors are mistakes of ours, which
    the thread reports, and it counts as overdue.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except (RuntimeError, ValueError, OSError, RankLost) as error:
            answer.set_exception(error)

    Thread(target=run, name="bounded", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():  # the error of `act` itself
            raise
        raise Overdue(f"no answer within {seconds:g} s") from error


class BoundedStore:
    """A store of `torch.distributed` that answers within `patience` seconds, or is given up for good."""

    def __init__(self, store: Store, patience: float = STORE_SECONDS) -> None:
        self.store = store
        self.patience = patience
        self._lost: list[StoreUnavailable] = []  # shared by all prefixes: a client that hangs does so for all

    def under(self, prefix: str) -> BoundedStore:
        """The same store, all keys with this before them."""
        found = BoundedStore(PrefixStore(prefix, self.store), self.patience)
        found._lost = self._lost
        return found

    def ask(self, act: Callable[[Store], Answer], seconds: float = 0.0) -> Answer:
        """What `act` finds out, of its own accord within `seconds`. Raises StoreUnavailable `patience` after that."""
        if self._lost:
            raise StoreUnavailable(str(self._lost[0]))
        try:
            return within(seconds + self.patience, lambda: act(self.store))
        except (Overdue, DistNetworkError) as error:
            self._lost.append(StoreUnavailable(f"the store that ranks meet in does not answer: {error}"))
            raise self._lost[0] from error
