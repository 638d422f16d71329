"""How a leader and its ranks come to hold a model together: each loads its share, and either all have or none is left.

It does not know what a share is, nor what the ranks do with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Protocol, TypeVar

from serving.channel import Channel
from serving.expert_parallel.exchange import RankLost
from serving.loader.loading import LoadedModel
from serving.rank_group.messages import ShareLoaded

ANSWER_SECONDS = 60.0  # the leader reads answers as they come, or has ended

Shared = TypeVar("Shared", bound=LoadedModel)


class LoadingRanks(Protocol):
    """The leader's hold on its ranks, until all have loaded their shares."""

    def load(self, path: Path, dtype: str) -> None: ...
    def loaded(self) -> None: ...
    def close(self) -> None: ...


def load_together(
    ranks: LoadingRanks, path: Path, dtype: str, own: Callable[[], LoadedModel], make: Callable[..., Shared]
) -> Shared:
    """What `make` makes of the fields of the leader's `own` share, once all ranks have loaded theirs beside it.

    Else the ranks are ended. Raises ValueError as `own` does, and where a rank cannot load its share.
    """
    shared: Shared | None = None
    try:
        ranks.load(path, dtype)
        share = own()
        ranks.loaded()
        shared = make(**{one.name: getattr(share, one.name) for one in fields(share)})
        return shared
    except RankLost as lost:
        raise ValueError(f"the model is not loaded: {lost}") from lost
    finally:
        if shared is None:
            ranks.close()


def loaded_share(channel: Channel, load: Callable[[], LoadedModel]) -> LoadedModel | None:
    """A rank's share; None where the leader has been told why there is none."""
    try:
        loaded = load()
    except (ValueError, OSError, RuntimeError) as error:  # a device that is not there, or has no room, among others
        channel.send(ShareLoaded(error=str(error)), ANSWER_SECONDS)
        return None
    channel.send(ShareLoaded(sum(one.nbytes for one in loaded.model.parameters())), ANSWER_SECONDS)
    return loaded
