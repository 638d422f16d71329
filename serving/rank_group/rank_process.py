"""A rank of a group but its leader: `python -m serving.rank_group.rank_process DESCRIPTOR LEADER [LANE …]`.

It does what the leader, process LEADER, says on the sockets it inherits, and leaves when the first closes or the
process ends; signals that ask a process to leave are the leader's to hear. It holds no sequences and draws no tokens.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from serving.channel import Channel, ChannelClosed
from serving.collecting import collect_seldom
from serving.errors import MISTAKES
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import ExchangeUnavailable, RankLost
from serving.expert_parallel.surviving import ExpertsLost
from serving.loader.loading import LoadedModel
from serving.logs import setup_helper
from serving.malloc import keep_freed_memory
from serving.rank_group.compiled import compiled_computing
from serving.rank_group.computing import RankSteps
from serving.rank_group.device_messages import LoadOnDevice
from serving.rank_group.device_rank import serve_on_device
from serving.rank_group.host_bridge import serve_bridge
from serving.rank_group.host_messages import AwaitHost
from serving.rank_group.layout_messages import LoadLayout
from serving.rank_group.layout_rank import serve_layout
from serving.rank_group.loading import ANSWER_SECONDS, loaded_share
from serving.rank_group.member import EpochMember, loader_of
from serving.rank_group.messages import (
    BeginEpoch,
    EndEpoch,
    EpochBegun,
    EpochEnded,
    ExpertsHeld,
    HoldExperts,
    KVMapped,
    LoadShare,
    MapKV,
    Outcome,
    RunStep,
    StepDone,
    StepDropped,
    StepFailed,
    UsePlanes,
)
from serving.rank_group.parts import unpack
from serving.rank_group.share import load_share
from serving.rank_group.shared_planes import MappedPlanes
from serving.shared_memory import SegmentUnavailable
from serving.temporary import also_ours, remove_temporary_folders

log = logging.getLogger(__name__)

LEADER_SECONDS = 0.2  # a broken connection is seen before the end of the process that held it
LOADING_SECONDS = 60.0  # for experts that nobody holds any more
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class FollowingRank:
    """A loaded rank that has mapped the group's KV: takes part in epochs, and computes its part of each step."""

    def __init__(self, member: EpochMember, kv: MappedPlanes) -> None:
        self.member, self.kv = member, kv
        self.steps: list[RankSteps] = []  # by the number of their planes

    def does(self, word: Any) -> object:
        """The answer to one of the leader's words; None where it wants none."""
        match word:
            case RunStep():
                return self.run(word)
            case UsePlanes():
                self.steps.append(self.member.computing.over(self.kv.at(word.places)))
                return None
            case EndEpoch():
                return EpochEnded(self.member.end())
            case HoldExperts():
                return self.hold(word)
            case BeginEpoch():
                return self.begin(word)
        raise AssertionError(f"the leader says {word!r}")

    @torch.inference_mode()
    def run(self, step: RunStep) -> Outcome:
        try:
            self.member.begin_step()
            steps, rows = self.steps[step.planes], self.member.computing.new_rows(0)
            if step.part is None:
                steps.idle()
            else:
                rows = steps.rows(unpack(step.part), None)
        except RankLost as lost:
            self.member.leave()  # others that still wait for this rank hear of it
            return StepDropped(step.number, lost.rank, lost.reason)
        except MISTAKES as error:
            log.exception("a mistake over rows of step %d", step.number)
            self.member.leave()
            return StepFailed(step.number, f"{type(error).__name__}: {error}")
        return StepDone(step.number, rows.flatten().view(torch.uint8).numpy(), self.member.totals)

    def hold(self, order: HoldExperts) -> ExpertsHeld:
        try:
            return ExpertsHeld(self.member.hold(order.placements, order.rank, LOADING_SECONDS))
        except ExpertsLost as lost:
            return ExpertsHeld(lost=lost.experts, reason=lost.reason)

    def begin(self, order: BeginEpoch) -> EpochBegun:
        also_ours(order.store.parent)
        try:
            self.member.begin(order)
        except RankLost as lost:
            self.member.leave()
            return EpochBegun(str(lost), lost=True)
        except (ExchangeUnavailable, StoreUnavailable, RuntimeError, ValueError, OSError) as error:
            return EpochBegun(str(error))
        return EpochBegun()


def serve(channel: Channel, lanes: Sequence[Channel] = ()) -> None:
    """Do what the leader says until it closes the channel, and beside it what comes by its `lanes`.

    Raises ChannelClosed; RankLost of a group with a layout.
    """
    order: LoadShare | LoadLayout | LoadOnDevice | AwaitHost = channel.receive(None)
    if isinstance(order, AwaitHost):
        serve_bridge(channel, order)
        return
    if isinstance(order, LoadOnDevice):
        serve_on_device(channel, lanes, order)
        return
    if isinstance(order, LoadLayout):
        serve_layout(channel, order)
        return
    torch.set_num_threads(order.threads)
    share = partial(load_share, order.path, order.dtype, order.rank, order.ranks, order.redundant)
    loaded = loaded_share(channel, share)
    rank = None if loaded is None else _mapped(channel, loaded, order)
    if rank is None:
        return
    while True:
        answer = rank.does(channel.receive(None))
        if answer is not None:
            channel.send(answer, ANSWER_SECONDS)
        if isinstance(answer, EpochBegun) and answer.error is not None and not answer.lost:
            log.error("this rank leaves: %s", answer.error)
            return


def _mapped(channel: Channel, loaded: LoadedModel, order: LoadShare) -> FollowingRank | None:
    """The rank ready for an epoch; None where the leader has been told why it is not."""
    kv: MapKV = channel.receive(None)
    try:
        planes = MappedPlanes(kv.segment)
        computing = None if kv.compiled is None else compiled_computing(loaded.model, kv.compiled, leads=False)
    except (SegmentUnavailable, ValueError) as error:
        channel.send(KVMapped(error=str(error)), ANSWER_SECONDS)
        return None
    load = loader_of(order.path, order.dtype)
    member = EpochMember(loaded.model, load, kv.most_rows, kv.deadline, kv.balancing, computing, bridged=kv.bridged)
    keep_freed_memory()
    collect_seldom()  # before it may be taken in: all ranks would wait for this one meanwhile, in the middle of a step
    channel.send(KVMapped(), ANSWER_SECONDS)
    return FollowingRank(member, planes)


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
    setup_helper(os.environ)
    theirs, parent, *beside = map(int, sys.argv[1:])
    channel, *lanes = (Channel(socket.socket(fileno=file)) for file in (theirs, *beside))
    watching = leave_with(parent)
    if watching is None:
        return 0
    try:
        serve(channel, lanes)
    except ChannelClosed:  # the leader has left, maybe without a chance to remove what it made
        remove_temporary_folders()
        return 0
    except RankLost as lost:
        log.error("this rank leaves: %s", lost)
        watching.join(LEADER_SECONDS)  # it may be the leader that is lost
    return 1


if __name__ == "__main__":
    sys.exit(main())
