"""A rank of a group but its leader: `python -m serving.rank_group.rank_process DESCRIPTOR LEADER`.

It does what the leader, process LEADER, says on the socket it inherits, and leaves when that closes or the process
ends; signals that ask a process to leave are the leader's to hear. It holds no sequences and draws no tokens.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading

import torch
from torch._C._distributed_c10d import FileStore

from serving.expert_parallel.exchange import ExchangeUnavailable, ExpertExchange, RankLost
from serving.expert_parallel.layer import apply_expert_parallel, exchange_shape, idle_step
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.loader.loading import LoadedModel
from serving.logs import setup_logging
from serving.malloc import keep_freed_memory
from serving.model.decoder import Decoder, Planes
from serving.rank_group.channel import Channel, ChannelClosed
from serving.rank_group.layout_messages import LoadLayout
from serving.rank_group.layout_rank import serve_layout
from serving.rank_group.messages import GroupMet, LoadShare, MeetGroup, RunStep, ShareLoaded, StepDone, UsePlanes
from serving.rank_group.parts import unpack
from serving.rank_group.share import even_placements, load_share
from serving.rank_group.shared_planes import MappedPlanes
from serving.shared_memory import SegmentUnavailable
from serving.temporary import remove_temporary_folders

log = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0  # the leader reads answers as they come, or has ended
LEADER_SECONDS = 0.2  # a broken connection is seen before the end of the process that held it
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def join_exchange(model: Decoder, rank: int, ranks: int, store: FileStore, order: MeetGroup) -> ExpertExchange:
    """Meet the other ranks, and let the experts of `model` take part. Raises RankLost, ExchangeUnavailable."""
    placements = even_placements(model.spec, ranks)
    shape = exchange_shape(model, placements[0], order.max_tokens)
    exchange = SharedMemoryExchange.join(shape, rank, store, deadline=order.deadline)
    apply_expert_parallel(model, placements, exchange)
    return exchange


class FollowingRank:
    """A loaded rank that has met the others: computes its part of each step."""

    def __init__(self, model: Decoder, exchange: ExpertExchange, kv: MappedPlanes) -> None:
        self.model, self.exchange, self.kv = model, exchange, kv
        self.planes: list[list[Planes]] = []

    @torch.inference_mode()
    def run(self, step: RunStep) -> StepDone:
        """Raises RankLost."""
        hidden = self.model.norm.weight.new_empty(0)
        if step.part is None:
            idle_step(self.model)
        else:
            batch = unpack(step.part)
            hidden = self.model(batch, self.planes[step.planes])[batch.logits_rows]
        return StepDone(step.number, hidden.flatten().view(torch.uint8).numpy(), self.exchange.traffic)


def serve(channel: Channel) -> None:
    """Do what the leader says until it closes the channel. Raises ChannelClosed, RankLost."""
    order: LoadShare | LoadLayout = channel.receive(None)
    if isinstance(order, LoadLayout):
        serve_layout(channel, order)
        return
    setup_logging(f"rank-{order.rank}", logging.getLevelName(order.log_level))
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


def _loaded(channel: Channel, order: LoadShare) -> LoadedModel | None:
    """The share of the model; None where the leader has been told why there is none."""
    try:
        loaded = load_share(order.path, order.dtype, order.rank, order.ranks)
    except (ValueError, OSError) as error:
        channel.send(ShareLoaded(error=str(error)), ANSWER_SECONDS)
        return None
    channel.send(ShareLoaded(sum(one.nbytes for one in loaded.model.parameters())), ANSWER_SECONDS)
    return loaded


def _met(channel: Channel, model: Decoder, order: LoadShare) -> FollowingRank | None:
    """The rank ready for steps; None where the leader has been told why it is not."""
    meeting: MeetGroup = channel.receive(None)
    try:
        kv = MappedPlanes(meeting.segment)
        exchange = join_exchange(model, order.rank, order.ranks, FileStore(str(meeting.store), order.ranks), meeting)
    except (RankLost, ExchangeUnavailable, SegmentUnavailable) as error:
        channel.send(GroupMet(error=str(error)), ANSWER_SECONDS)
        return None
    channel.send(GroupMet(), ANSWER_SECONDS)
    return FollowingRank(model, exchange, kv)


def leave_with(parent: int) -> threading.Thread | None:
    """End this process when that one ends, whatever it does then; the thread that sees to it, None where it is late."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return None
    if os.getppid() != parent:  # asked when it is watched: the number may be somebody else's by now
        os.close(watched)
        return None

    def watch() -> None:
        select.select([watched], [], [])
        remove_temporary_folders()
        os._exit(1)

    watching = threading.Thread(target=watch, name="leader", daemon=True)
    watching.start()
    return watching


def main() -> int:
    for number in ENDING:  # who ends a whole service tells all its processes: the leader still has requests to finish
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    watching = leave_with(int(sys.argv[2]))
    if watching is None:
        return 0
    try:
        serve(channel)
    except ChannelClosed:  # the leader has left, maybe without a chance to remove what it made
        remove_temporary_folders()
        return 0
    except RankLost as lost:
        log.error("this rank leaves: %s", lost)
        watching.join(LEADER_SECONDS)  # it may be the leader that is lost
    return 1


if __name__ == "__main__":
    sys.exit(main())
