"""What a rank that shares a model with others does, the leader included: loads its share, and connects it to theirs.

It computes what it is given, and knows nothing of sequences.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from serving.channel import Channel
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import RankLost
from serving.loader.loading import LoadedModel, load
from serving.malloc import keep_freed_memory
from serving.model.decoder import Decoder, Planes
from serving.parallel.applying import apply_parallel
from serving.parallel.holding import hold_share
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from serving.rank_group.layout_forward import gives_rows
from serving.rank_group.layout_messages import LayoutDone, LayoutMet, LoadLayout, MeetLayout, RunLayout
from serving.rank_group.messages import ShareLoaded, UsePlanes
from serving.rank_group.parts import unpack
from serving.rank_group.shared_planes import MappedPlanes
from serving.shared_memory import SegmentUnavailable
from serving.temporary import also_ours

ANSWER_SECONDS = 60.0  # the leader reads answers as they come, or has ended


def load_layout_share(
    path: Path, dtype: str, layout: ParallelLayout, rank: int, quantization: str | None = None
) -> LoadedModel:
    """The rank's rows, columns and layers of the model at `path`. Raises ValueError as `load` does."""
    return load(path, dtype, quantization=quantization, layout=partial(hold_share, layout=layout, rank=rank))


def connect(model: Decoder, layout: ParallelLayout, rank: int, store: FileStore, deadline: float) -> ParallelRank:
    """Meet the other ranks, and let `model` compute with theirs. Raises RankLost, StoreUnavailable."""
    ranks = ParallelRank.join(layout, rank, store, deadline=deadline)
    apply_parallel(model, ranks)
    return ranks


class LayoutRank:
    """A rank but the leader, connected to the others: computes its share of each step."""

    def __init__(self, model: Decoder, ranks: ParallelRank, kv: MappedPlanes) -> None:
        self.model, self.ranks, self.kv = model, ranks, kv
        self.planes: list[list[Planes]] = []
        self._gives_rows = gives_rows(ranks.layout) == ranks.rank

    @torch.inference_mode()
    def run(self, step: RunLayout) -> LayoutDone:
        """Raises RankLost."""
        batch = unpack(step.batch)
        out = self.model(batch, self.planes[step.planes])[batch.logits_rows]
        if step.head:
            self.model.logits(out)
        given = out if self._gives_rows and not step.head else out.new_empty(0)
        return LayoutDone(step.number, given.flatten().view(torch.uint8).numpy(), self.ranks.bytes_sent)


def serve_layout(channel: Channel, order: LoadLayout) -> None:
    """Do what the leader says until it closes the channel. Raises ChannelClosed, RankLost."""
    torch.set_num_threads(order.threads)
    loaded = _loaded(channel, order)
    rank = None if loaded is None else _met(channel, loaded.model, order)
    if rank is None:
        return
    keep_freed_memory()
    while True:
        word = channel.receive(None)
        if isinstance(word, UsePlanes):
            rank.planes.append(rank.kv.at(word.places))
        else:
            channel.send(rank.run(word), ANSWER_SECONDS)


def _loaded(channel: Channel, order: LoadLayout) -> LoadedModel | None:
    """The share of the model; None where the leader has been told why there is none."""
    try:
        loaded = load_layout_share(order.path, order.dtype, order.layout, order.rank)
    except (ValueError, OSError) as error:
        channel.send(ShareLoaded(error=str(error)), ANSWER_SECONDS)
        return None
    channel.send(ShareLoaded(sum(one.nbytes for one in loaded.model.parameters())), ANSWER_SECONDS)
    return loaded


def _met(channel: Channel, model: Decoder, order: LoadLayout) -> LayoutRank | None:
    """The rank ready for steps; None where the leader has been told why it is not."""
    meeting: MeetLayout = channel.receive(None)
    also_ours(meeting.store.parent)
    try:
        kv, store = MappedPlanes(meeting.segment), FileStore(str(meeting.store), order.layout.ranks)
        ranks = connect(model, order.layout, order.rank, store, meeting.deadline)
    except (RankLost, SegmentUnavailable, StoreUnavailable) as error:
        channel.send(LayoutMet(error=str(error)), ANSWER_SECONDS)
        return None
    channel.send(LayoutMet(), ANSWER_SECONDS)
    return LayoutRank(model, ranks, kv)
