"""What a rank with a device of its own does, but the leader: loads its share, keeps its heads' KV, computes its part.

It computes what it is given, in the leader's order, and knows nothing of sequences. KV leaves it and comes beside the
steps, on threads of its own.

Shapes: R rows of the batch whose logits or hidden states are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

from serving.batch.ragged import RaggedBatch
from serving.channel import Channel
from serving.device_memory import CudaMemory
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import RankLost
from serving.forward.choose import make_forward
from serving.forward.forward import EagerForward, Forward
from serving.loader.loading import LoadedModel
from serving.parallel.joining import ParallelRank
from serving.rank_group.beside import serve_lane
from serving.rank_group.device_messages import LoadOnDevice, MakeForward, RankKV, ReadMemory, RunOnDevice
from serving.rank_group.layout_messages import LayoutDone, Meet, Ready
from serving.rank_group.layout_rank import connect, load_layout_share
from serving.rank_group.loading import ANSWER_SECONDS, loaded_share
from serving.rank_group.parts import unpack
from serving.streams import recorded, streams_of
from serving.temporary import also_ours

NO_ROWS = np.empty(0, np.uint8)  # every rank has what the leader has


def compute(forward: Forward, batch: RaggedBatch, *, head: bool, launched: bool) -> None:
    """A step as the leader's forward pass computes it, for what it exchanges and writes."""
    layer_done = _nobody_asks if launched else None
    if head:
        forward.logits(batch, layer_done)
    else:
        forward.hidden(batch, layer_done)


def _nobody_asks(layer: int) -> None:
    """A step that tells of its layers is launched, as the leader's is."""


class DeviceRank:
    """A rank but the leader, connected to the others."""

    def __init__(self, loaded: LoadedModel, ranks: ParallelRank) -> None:
        self.loaded, self.ranks = loaded, ranks
        self.device = ranks.device
        self.forward: Forward | None = None
        self.kv: RankKV | None = None

    def does(self, word: Any) -> object:
        """The answer to one of the leader's words. Raises RankLost."""
        match word:
            case RunOnDevice():
                return self.run(word)
            case MakeForward():
                return self.make(word)
            case ReadMemory():
                return CudaMemory().reading()
        raise AssertionError(f"the leader says {word!r}")

    def make(self, order: MakeForward) -> Ready:
        self.forward = self.kv = None
        if self.device.type == "cuda":
            CudaMemory().reading()  # which gives back what it took, graphs too
        try:
            self.kv = order.keep(self.device)
            self.forward = make_forward(self.loaded, self.kv.planes, order.config, order.max_position)
            if isinstance(self.forward, EagerForward):
                self.ranks.wait_on_host()  # its attention waits for the device in every layer
        except (ValueError, torch.OutOfMemoryError) as error:
            return Ready(error=str(error))
        return Ready()

    @torch.inference_mode()
    def run(self, step: RunOnDevice) -> LayoutDone:
        assert self.forward is not None, "MakeForward comes first"
        try:
            compute(self.forward, unpack(step.batch, self.device), head=step.head, launched=step.launched)
        except RankLost:
            self.ranks.abort()
            raise
        self._finish()
        return LayoutDone(step.number, NO_ROWS, self.ranks.bytes_sent)

    def _finish(self) -> None:
        self.ranks.finish(recorded(streams_of(self.device)))

    def beside(self, word: Any) -> None:
        """What is asked of the rank's KV, on any thread."""
        assert self.kv is not None, "MakeForward comes first"
        self.kv.does(word)


def serve_on_device(channel: Channel, lanes: Sequence[Channel], order: LoadOnDevice) -> None:
    """Do what the leader says until it closes the channel, and beside it what comes by the lanes.

    Raises ChannelClosed, RankLost.
    """
    torch.set_num_threads(order.threads)
    loaded = loaded_share(channel, lambda: load_layout_share(order))
    rank = None if loaded is None else _met(channel, loaded, order)
    if rank is not None:
        for number, lane in enumerate(lanes):
            Thread(target=serve_lane, args=(lane, rank.beside), name=f"lane-{number}", daemon=True).start()
    while rank is not None:
        answer = rank.does(channel.receive(None))
        channel.send(answer, ANSWER_SECONDS)
        if isinstance(answer, Ready) and answer.error is not None:
            return


def _met(channel: Channel, loaded: LoadedModel, order: LoadOnDevice) -> DeviceRank | None:
    """The rank ready for a forward pass; None where the leader has been told why it is not."""
    meeting: Meet = channel.receive(None)
    also_ours(meeting.store.parent)
    try:
        store = FileStore(str(meeting.store), order.layout.ranks)
        ranks = connect(loaded.model, order.layout, order.rank, store, meeting.deadline)
    except (RankLost, StoreUnavailable, ValueError) as error:
        channel.send(Ready(error=str(error)), ANSWER_SECONDS)
        return None
    channel.send(Ready(), ANSWER_SECONDS)
    return DeviceRank(loaded, ranks)
