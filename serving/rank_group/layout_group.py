"""The leader's hold on ranks that share a model with it: starts them, has them compute each step, and ends them.

A rank that dies or is late is lost, and with it the group: no other has what it holds. It knows no sequences.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from serving.expert_parallel.exchange import RankLost
from serving.kvspec import LayerKV
from serving.model.decoder import Planes
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from serving.rank_group.child import RankProcess
from serving.rank_group.layout_messages import LayoutDone, LoadLayout, Meet, MeetLayout, Ready, RunLayout
from serving.rank_group.messages import PackedBatch, ShareLoaded, UsePlanes
from serving.rank_group.ranks import LOAD_SECONDS, MEETING_SECONDS, STOP_SECONDS
from serving.rank_group.share import LEADER
from serving.rank_group.shared_planes import SharedPlanes
from serving.temporary import temporary_folder

log = logging.getLogger(__name__)


def _nobody_watches() -> None: ...


class LayoutGroup:
    """All ranks of a layout but the leader, whose process this is. `deadline` are the seconds of a step's every wait.

    `lost` is set once a rank is lost, or a step has been left unfinished; from then on every step raises it.
    """

    def __init__(self, layout: ParallelLayout, deadline: float) -> None:
        """Starts their processes."""
        self.layout, self.size, self.deadline = layout, layout.ranks, deadline
        self.lost: RankLost | None = None
        self.bytes_sent = 0  # by all ranks to each other, so far
        self._own: ParallelRank | None = None
        self._meeting = ExitStack()  # holds the folder of the store that ranks meet in, and name a lost one by
        self._kv: SharedPlanes | None = None
        self._plane_sets = self._steps = 0
        self._watched: dict[int, asyncio.AbstractEventLoop] = {}
        self._tell: Callable[[], object] = _nobody_watches
        self.others: list[RankProcess] = []
        started = False
        try:
            self.others += (self._started(rank) for rank in range(1, self.size))
            started = True
        finally:
            if not started:
                self.close()

    def _started(self, rank: int) -> RankProcess:
        return RankProcess(rank)

    # ---- until the first step ----------------------------------------------------------------------------------

    def load(self, path: Path, dtype: str) -> None:
        """Have every rank begin to load its share of the model, each with as many threads as this process has."""
        for other in self.others:
            other.ask(self.share_of(other.rank, path, dtype), MEETING_SECONDS)

    def share_of(self, rank: int, path: Path, dtype: str) -> LoadLayout:
        """What this rank is to load."""
        threads = torch.get_num_threads()
        return LoadLayout(path=path, dtype=dtype, rank=rank, layout=self.layout, threads=threads)

    def loaded(self) -> None:
        """Wait until all have. Raises RankLost, and ValueError with what a rank could not load."""
        for other in self.others:
            word = other.answer(ShareLoaded, LOAD_SECONDS)
            if word.error is not None:
                raise ValueError(f"rank {other.rank}: {word.error}")
            log.info("rank %d holds %.0f MB of weights", other.rank, word.weight_bytes / 1e6)

    def share_planes(self, specs: Sequence[LayerKV], num_blocks: int, block_size: int) -> list[Planes]:
        """KV planes of the whole model, of which every rank will map its part."""
        self._kv = SharedPlanes(specs, num_blocks, block_size)
        return self._kv.planes

    def meet(self, join: Callable[[FileStore], ParallelRank]) -> None:
        """Have all ranks meet, this one by `join`. Raises RankLost, and ValueError where a rank cannot."""
        store = self._meeting.enter_context(temporary_folder(Path(tempfile.gettempdir()))) / "store"
        order = self._meet(store)
        for other in self.others:
            other.ask(order, MEETING_SECONDS)
        self._own = join(FileStore(str(store), self.size))
        self._ready(2 * MEETING_SECONDS)

    def _meet(self, store: Path) -> Meet:
        assert self._kv is not None, "share_planes comes first"
        return MeetLayout(segment=self._kv.segment.details, store=store, deadline=self.deadline)

    def _ready(self, seconds: float) -> None:
        """Wait until all ranks are. Raises RankLost, and ValueError where one cannot be."""
        for other in self.others:
            word = other.answer(Ready, seconds)
            if word.error is not None:
                raise ValueError(f"rank {other.rank}: {word.error}")

    def use_planes(self, share: Callable[[int], Sequence[Planes]]) -> int:
        """Tell each rank of its `share` of KV, views of the shared planes; the number by which steps name it."""
        assert self._kv is not None
        for other in self.others:
            other.say(UsePlanes(self._kv.places(share(other.rank))), self.deadline)
        self._plane_sets += 1
        return self._plane_sets - 1

    # ---- steps -------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, planes: int, batch: PackedBatch, *, head: bool) -> Iterator[list[LayoutDone]]:
        """Have the other ranks compute `batch`, while the leader computes its share of it inside; see `computing`."""
        with self.computing(lambda number: RunLayout(number, planes, batch, head)) as done:
            yield done

    @contextmanager
    def computing(self, order: Callable[[int], object]) -> Iterator[list[LayoutDone]]:
        """Have the other ranks do what `order` says of a step's number, while the leader does its own part inside.

        What they have done is in the list when it is left. Raises RankLost; also inside, where the exchange finds out.
        A step that the leader does not finish leaves the others at a place of their own: then the group is lost.
        """
        if self.lost is not None:
            raise self.lost
        finished = False
        done: list[LayoutDone] = []
        try:
            self._steps += 1
            for other in self.others:
                other.ask(order(self._steps), self.deadline)
            yield done
            done += (other.answer(LayoutDone, self.deadline) for other in self.others)
            assert all(one.number == self._steps for one in done), "a rank answers to another step"
            finished = True
        except RankLost as lost:
            self._lose(lost)
            raise
        finally:
            if not finished and self.lost is None:
                self._lose(RankLost(LEADER, "it has left a step unfinished"))
        assert self._own is not None
        self.bytes_sent = self._own.bytes_sent + sum(one.bytes_sent for one in done)

    def _lose(self, lost: RankLost) -> None:
        log.error("%s", lost)
        self.lost = lost

    # ---- the end -----------------------------------------------------------------------------------------------

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` on the running event loop when a rank ends, also between steps."""
        loop = asyncio.get_running_loop()
        self._tell = partial(loop.call_soon_threadsafe, on_lost)
        for other in self.others:
            pidfd = os.pidfd_open(other.process.pid)
            self._watched[pidfd] = loop
            loop.add_reader(pidfd, self._ended, pidfd, other.rank, on_lost)

    def _ended(self, pidfd: int, rank: int, on_lost: Callable[[], object]) -> None:
        self._watched[pidfd].remove_reader(pidfd)
        if self.lost is None:
            self._lose(RankLost(rank, "its process has ended"))
        on_lost()

    def close(self) -> None:
        """End all ranks. Call when no step runs, on the loop that watches; safe to repeat."""
        for pidfd, loop in self._watched.items():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()
        self._tell = _nobody_watches
        others, self.others = self.others, []
        for other in others:
            other.channel.close()
        until = time.monotonic() + (STOP_SECONDS if self.lost is None else 0.0)
        for other in others:
            other.end(until)
        if self.lost is None and self._own is not None:  # else somebody may still be in it
            self._own.close()
        if self._kv is not None:
            self._kv.segment.close()
            self._kv = None
        self._meeting.close()
