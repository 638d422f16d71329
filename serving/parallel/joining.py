"""How the ranks of a layout meet: one store, one watch over all processes, and a process group for each form.

Groups are made ahead, before any is needed. Of the model it knows nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Thread
from typing import Protocol, Self

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from serving.expert_parallel.all_to_all import connected, host_key
from serving.expert_parallel.bounded import Overdue, StoreUnavailable, within
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.meeting import MEETING_SECONDS, exchanged
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.waits import BoundedWaits
from serving.parallel.collective import Collective
from serving.parallel.device_groups import StreamWaits, connected_by_nccl, passed
from serving.parallel.layout import ParallelLayout
from serving.streams import Event, Streams, recorded, streams_of

CPU = torch.device("cpu")
ABORT_SECONDS = 2.0  # that groups may take to end what is under way on a device
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRank:
    """One rank's groups: None where a form has one rank. A link is a group of this stage and one beside it."""

    layout: ParallelLayout
    rank: int
    device: torch.device
    waits: BoundedWaits
    tensor: Collective | None
    sequence: Collective | None
    pipeline: Collective | None
    previous: Collective | None
    following: Collective | None

    @classmethod
    def join(
        cls,
        layout: ParallelLayout,
        rank: int,
        store: Store,
        *,
        deadline: float,
        meeting: float = MEETING_SECONDS,
        device: torch.device = CPU,
        connect: Connect | None = None,
    ) -> Self:
        """Meet the other ranks in `store` within `meeting` seconds, and connect to them: by gloo, or by `connect`.

        Tensors are on `device`: this process's CUDA device, where NCCL connects them. `deadline` is the longest wait
        for any of them, in seconds. Raises RankLost for one that does not come, StoreUnavailable for a store that does
        not answer, ValueError where torch has no NCCL.
        """
        own = f"{host_key()} {os.getpid()}"
        words = exchanged(store, "process", rank, layout.ranks, own.encode(), meeting)
        processes = {other: word.decode().rsplit(" ", 1) for other, word in enumerate(words) if other != rank}
        near = {other: int(pid) for other, (host, pid) in processes.items() if host == host_key()}
        watch, on_one_host = ProcessWatch(near), len(near) == len(processes)
        waits = BoundedWaits(store, rank, layout.ranks, watch, deadline)
        connect = connect or (by_nccl if device.type == "cuda" else partial(by_gloo, on_one_host=on_one_host))
        stages = layout.pipeline_group(rank)
        stage = layout.place(rank).stage

        made: list[Collective] = []

        def group(form: str, ranks: Sequence[int]) -> Collective | None:
            if len(ranks) < 2:
                return None
            beneath = PrefixStore(f"{form}/{'-'.join(map(str, ranks))}", store)
            made.append(connect(beneath, ranks.index(rank), len(ranks), waits))
            return made[-1]

        try:
            joined = cls(
                layout=layout,
                rank=rank,
                device=device,
                waits=waits,
                tensor=group("tensor", layout.tensor_group(rank)),
                sequence=group("sequence", layout.sequence_group(rank)),
                pipeline=group("pipeline", stages),
                previous=group("link", stages[stage - 1 : stage + 1] if stage else ()),
                following=group("link", stages[stage : stage + 2]),
            )
            joined.warm_up(meeting)
            return joined
        except (RankLost, StoreUnavailable, ValueError):
            waits.close()
            for one in made:
                one.close()
            raise

    @property
    def groups(self) -> list[Collective]:
        every = (self.tensor, self.sequence, self.pipeline, self.previous, self.following)
        return [group for group in every if group is not None]

    @property
    def bytes_sent(self) -> int:
        return sum(group.bytes_sent for group in self.groups)

    def warm_up(self, seconds: float) -> None:
        """One small exchange in each group, in one order on all ranks: NCCL connects where it is first used, which no
        capture of a graph may be. It waits for the others then, for `seconds` at most. Raises RankLost.
        """
        if self.device.type == "cpu":
            return
        self.finish(self.waits.begin(partial(self._exchanged, seconds)))

    def _exchanged(self, seconds: float) -> Event:
        """The end of a byte's exchange in each group. Raises RuntimeError where NCCL does not connect in time."""
        try:
            return within(seconds, partial(self._exchange, streams_of(self.device)))
        except Overdue as error:
            raise RuntimeError(f"{error} of NCCL") from error

    def _exchange(self, streams: Streams) -> Event:
        """By the streams of the thread that asks: another's current device may be another."""
        for group in self.groups:
            group.gathered(streams.room(1))
        return recorded(streams)

    def finish(self, step: Event) -> None:
        """Wait until the device has passed this end of a step, as every rank does after each step.

        The deadline is that of each exchange of a step that was launched, and of a replay as a whole. Raises RankLost
        where the device does not pass one within it, or a rank has ended; then whatever the device does with others
        ends, and the groups are of no use any more.
        """
        try:
            for place in chain.from_iterable(group.passed() for group in self.groups):
                self.waits.until(partial(passed, place))
            self.waits.until(partial(passed, step))
        except RankLost:
            self.abort()
            raise

    def wait_on_host(self) -> None:
        """From now on the host waits for each exchange of a step, as over gloo: what waits for the device in the middle
        of a step never waits for another rank there, and raises RankLost instead.
        """
        for group in self.groups:
            group.wait_on_host()

    def abort(self) -> None:
        """Whatever the device does with others ends, where the library can end it within ABORT_SECONDS.

        All groups at once: what frees one may wait for what another has on the device. NCCL goes on trying while a
        graph that was captured with the group is left, so who has any drops them before the next is joined.
        """
        ending = [Thread(target=_quietly, args=(group.abort,), name="abort", daemon=True) for group in self.groups]
        for one in ending:
            one.start()
        until = time.monotonic() + ABORT_SECONDS
        for one in ending:
            one.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        self.waits.close()
        for group in self.groups:
            group.close()


class Connect(Protocol):
    """Connects rank `rank` of `ranks`, which all call it with stores of one prefix. Raises as `ParallelRank.join`."""

    def __call__(self, store: Store, rank: int, ranks: int, waits: BoundedWaits) -> Collective: ...


def by_gloo(store: Store, rank: int, ranks: int, waits: BoundedWaits, *, on_one_host: bool) -> Collective:
    # gloo's own limit only ends what these waits have given up long before.
    group = connected(store, rank, ranks, 2 * waits.deadline, on_one_host=on_one_host)
    return Collective(group, ranks, waits)


def by_nccl(store: Store, rank: int, ranks: int, waits: BoundedWaits) -> Collective:
    group = connected_by_nccl(store, rank, ranks, waits.deadline)
    streams = streams_of(torch.device("cuda", torch.cuda.current_device()))
    return Collective(group, ranks, StreamWaits(waits, streams), abort=group.abort)


def _quietly(abort: Callable[[], None]) -> None:
    """A group that cannot be aborted hides no rank that is lost."""
    try:
        abort()
    except RuntimeError as error:
        log.warning("a group of ranks does not end what it has on the device: %s", error)
