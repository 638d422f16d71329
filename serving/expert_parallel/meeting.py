"""How the ranks of a group find each other: each leaves a word in a store that all reach, and waits for the others'.

The store is one of `torch.distributed`'s, kept by a process that is none of the ranks, so that it outlives them.
"""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store

from serving.expert_parallel.bounded import BoundedStore
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import ProcessWatch

MEETING_SECONDS = 60.0  # ranks begin one after the other, and load a model before they meet
POLL_SECONDS = 0.002  # between looks at the store


def exchanged(
    store: Store | BoundedStore,
    topic: str,
    rank: int,
    ranks: int,
    word: bytes,
    seconds: float,
    watch: ProcessWatch | None = None,
) -> list[bytes]:
    """What every rank has said on `topic`, by rank.

    Raises RankLost for one that has said nothing within `seconds`, or whose process has ended before, as far as `watch`
    has it; StoreUnavailable where it is the store that does not answer.
    """
    bounded = store if isinstance(store, BoundedStore) else BoundedStore(store)
    return bounded.ask(lambda asked: _exchanged(asked, topic, rank, ranks, word, seconds, watch), seconds)


def _exchanged(
    store: Store, topic: str, rank: int, ranks: int, word: bytes, seconds: float, watch: ProcessWatch | None
) -> list[bytes]:
    store.set(f"{topic}/{rank}", word.hex())
    until = time.monotonic() + seconds
    for other in range(ranks):
        # The store's own `wait` keeps everybody else from the store in the meantime.
        while not store.check([f"{topic}/{other}"]):
            if watch is not None and (ended := watch.ended()) is not None:
                raise RankLost(ended, "its process has ended")
            if time.monotonic() >= until:
                raise RankLost(other, f"it has not come within {seconds:g} s")
            time.sleep(POLL_SECONDS)
    return [bytes.fromhex(store.get(f"{topic}/{other}").decode()) for other in range(ranks)]
