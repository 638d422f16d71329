"""How the ranks of a group find each other: each leaves a word in a store that all reach, and waits for the others'.

The store is one of `torch.distributed`'s, kept by a process that is none of the ranks, so that it outlives them.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from serving.expert_parallel.exchange import RankLost

MEETING_SECONDS = 60.0  # ranks begin one after the other, and load a model before they meet


def exchanged(store: Store, topic: str, rank: int, ranks: int, word: bytes, seconds: float) -> list[bytes]:
    """What every rank has said on `topic`, by rank. Raises RankLost for one that has said nothing within `seconds`."""
    store.set(f"{topic}/{rank}", word.hex())
    try:
        store.wait([f"{topic}/{other}" for other in range(ranks)], timedelta(seconds=seconds))
    except DistError as error:
        raise RankLost(_silent(store, topic, ranks), f"it has not come within {seconds:g} s") from error
    return [bytes.fromhex(store.get(f"{topic}/{other}").decode()) for other in range(ranks)]


def _silent(store: Store, topic: str, ranks: int) -> int | None:
    return next((other for other in range(ranks) if not store.check([f"{topic}/{other}"])), None)
