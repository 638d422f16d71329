"""What the ranks of a group tell each other about a round of rebalancing: their counts, and the plan of rank 0.

It goes through a store that all reach (see `meeting`), over a connection of its own, polled: no step waits for it.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import Store

from serving.expert_parallel.bounded import BoundedStore

POLL_SECONDS = 0.02


class RoundsEnded(Exception):
    """The rank takes part in no further round."""


class RoundBoard:
    """One rank's view. What waits raises RoundsEnded once `closing` is set, everything StoreUnavailable.

    Rounds count from 0.
    """

    def __init__(self, store: Store, rank: int, ranks: int, closing: threading.Event) -> None:
        own: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
        self._store, self.rank, self._ranks, self._closing = BoundedStore(own), rank, ranks, closing

    def tell_counts(self, number: int, counts_LE: Tensor) -> None:
        word = counts_LE.numpy().tobytes().hex()
        self._store.ask(lambda store: store.set(f"counts/{number}/{self.rank}", word))

    def all_counts(self, number: int) -> NDArray[np.int64]:
        """The sum of all ranks' counts, flat; for rank 0, once a round."""
        total = np.zeros(1, dtype=np.int64)
        for rank in range(self._ranks):
            total = total + np.frombuffer(self._taken(f"counts/{number}/{rank}"), dtype=np.int64)
            self._forget(f"counts/{number}/{rank}")
        if number:  # whoever has told counts of this round has read the plan of the last
            self._forget(f"plan/{number - 1}")
        return total

    def tell_plan(self, number: int, plan: bytes) -> None:
        self._store.ask(lambda store: store.set(f"plan/{number}", plan.hex()))

    def plan(self, number: int) -> bytes:
        return self._taken(f"plan/{number}")

    def _forget(self, key: str) -> None:
        self._store.ask(lambda store: store.delete_key(key))

    def _taken(self, key: str) -> bytes:
        while not self._store.ask(lambda store: store.check([key])):
            if self._closing.wait(POLL_SECONDS):
                raise RoundsEnded
        return bytes.fromhex(self._store.ask(lambda store: store.get(key)).decode())
