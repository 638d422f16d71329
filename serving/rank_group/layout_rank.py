"""What a rank that shares a model with others does, the leader included: loads its share, and connects it to theirs.

It computes what it is given, and knows nothing of sequences.
"""

from __future__ import annotations

from functools import partial

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
from serving.rank_group.layout_messages import LayoutDone, LoadLayout, MeetLayout, Ready, RunLayout
from serving.rank_group.loading import ANSWER_SECONDS, loaded_share
from serving.rank_group.messages import UsePlanes
from serving.rank_group.parts import unpack
from serving.rank_group.shared_planes import MappedPlanes
from serving.shared_memory import SegmentUnavailable
from serving.temporary import also_ours


def load_layout_share(order: LoadLayout, quantization: str | None = None) -> LoadedModel:
    """The rank's rows, columns and layers of a model. Raises ValueError as `load` does."""
    layout = partial(hold_share, layout=order.layout, rank=order.rank)
    return load(order.path, order.dtype, order.device, quantization, layout=layout)


def connect(model: Decoder, layout: ParallelLayout, rank: int, store: FileStore, deadline: float) -> ParallelRank:
    """Meet the other ranks by way of the device of `model`, and let it compute with theirs.

    Raises RankLost, StoreUnavailable, and ValueError where torch has no NCCL for a device.
    """
    device = next(model.parameters()).device
    ranks = ParallelRank.join(layout, rank, store, deadline=deadline, device=device)
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
    loaded = loaded_share(channel, lambda: load_layout_share(order))
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


def _met(channel: Channel, model: Decoder, order: LoadLayout) -> LayoutRank | None:
    """The rank ready for steps; None where the leader has been told why it is not."""
    meeting: MeetLayout = channel.receive(None)
    also_ours(meeting.store.parent)
    try:
        kv, store = MappedPlanes(meeting.segment), FileStore(str(meeting.store), order.layout.ranks)
        ranks = connect(model, order.layout, order.rank, store, meeting.deadline)
    except (RankLost, SegmentUnavailable, StoreUnavailable) as error:
        channel.send(Ready(error=str(error)), ANSWER_SECONDS)
        return None
    channel.send(Ready(), ANSWER_SECONDS)
    return LayoutRank(model, ranks, kv)
