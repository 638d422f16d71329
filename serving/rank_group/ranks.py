"""The leader's hold on the other ranks of its group: starts them, has them take part in each step, and ends them.

A rank that dies or is late is lost, and with it the group: `RankGroup.lost` is the one place that says so. It knows no
sequences and no model's modules.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch._C._distributed_c10d import FileStore

from serving.child_process import helper_environ, module_command
from serving.expert_parallel.exchange import ExchangeTraffic, ExpertExchange, RankLost
from serving.kvspec import LayerKV
from serving.model.decoder import Planes
from serving.rank_group.channel import Channel, ChannelClosed, ChannelLate
from serving.rank_group.messages import (
    GroupMet,
    LoadShare,
    MeetGroup,
    PackedBatch,
    RunStep,
    ShareLoaded,
    StepDone,
    UsePlanes,
)
from serving.rank_group.share import LEADER
from serving.rank_group.shared_planes import SharedPlanes
from serving.temporary import temporary_folder

log = logging.getLogger(__name__)

RANK_MODULE = "serving.rank_group.rank_process"
LOAD_SECONDS = 600.0  # that a rank may take to load its share
MEETING_SECONDS = 60.0  # that it may take to be ready for steps then
STOP_SECONDS = 2.0  # that it may take to leave
ALSO_NEEDED = ("CXX", "XDG_CACHE_HOME", "OMP_WAIT_POLICY")  # by which kernels are found, and threads wait

Word = TypeVar("Word")
Join = Callable[[FileStore], ExpertExchange]  # raises RankLost, ValueError


class RankProcess:
    """One of the other ranks, as a child process with nothing of our environment that it does not need."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.channel, theirs = Channel.pair()
        with theirs:
            self.process = self._start(theirs)
        self.pidfd = os.pidfd_open(self.process.pid)

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        known = {name: value for name in ALSO_NEEDED if (value := os.environ.get(name)) is not None}
        return subprocess.Popen(  # noqa: S603 - our own module
            [*module_command(RANK_MODULE), str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            env=helper_environ(os.environ) | known,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the leader, which ends its ranks
        )

    def say(self, word: object, seconds: float) -> None:
        """Raises RankLost."""
        with self._heard(seconds):
            self.channel.send(word, seconds)

    def answer(self, kind: type[Word], seconds: float) -> Word:
        """Its next word. Raises RankLost."""
        with self._heard(seconds):
            word = self.channel.receive(seconds)
        assert isinstance(word, kind), f"rank {self.rank} says {word!r}"
        return word

    @contextmanager
    def _heard(self, seconds: float) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as error:
            raise RankLost(self.rank, "its process has ended") from error
        except ChannelLate as error:
            raise RankLost(self.rank, f"it has not answered within {seconds:g} s") from error

    def end(self, until: float) -> None:
        """It leaves as its channel has closed, or is killed at this time of the monotonic clock."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()  # also one that is stopped
            self.process.wait()
        os.close(self.pidfd)


class RankGroup:
    """All ranks but the leader, whose process this is. `deadline` are the seconds of a step's every wait.

    `lost` is set once a rank is lost, or a step has been left unfinished; from then on every step raises it.
    """

    def __init__(self, ranks: int, deadline: float) -> None:
        """Starts their processes."""
        self.size = ranks
        self.deadline = deadline
        self.lost: RankLost | None = None
        self.traffic = ExchangeTraffic()  # of all ranks so far
        self.exchange: ExpertExchange | None = None  # the leader's own part
        self._kv: SharedPlanes | None = None
        self._plane_sets = 0
        self._steps = 0
        self._watching: asyncio.AbstractEventLoop | None = None
        self.others: list[RankProcess] = []
        started = False
        try:
            self.others += (RankProcess(rank) for rank in range(1, ranks))
            started = True
        finally:
            if not started:
                self.close()

    # ---- until the first step ----------------------------------------------------------------------------------

    def load(self, path: Path, dtype: str) -> None:
        """Have every rank begin to load its share of the model, each with as many threads as this process has."""
        threads = torch.get_num_threads()
        level = logging.getLogger().getEffectiveLevel()
        for other in self.others:
            order = LoadShare(
                path=path, dtype=dtype, rank=other.rank, ranks=self.size, threads=threads, log_level=level
            )
            other.say(order, MEETING_SECONDS)

    def loaded(self) -> None:
        """Wait until all have. Raises RankLost, and ValueError with what a rank could not load."""
        for other in self.others:
            word = other.answer(ShareLoaded, LOAD_SECONDS)
            if word.error is not None:
                raise ValueError(f"rank {other.rank}: {word.error}")
            log.info("rank %d holds %.0f MB of weights", other.rank, word.weight_bytes / 1e6)

    def share_planes(self, specs: Sequence[LayerKV], num_blocks: int, block_size: int) -> list[Planes]:
        """KV planes that every rank will map."""
        self._kv = SharedPlanes(specs, num_blocks, block_size)
        return self._kv.planes

    def meet(self, max_tokens: int, join: Join) -> ExpertExchange:
        """The leader's part in the group's exchange, made by `join`, which the others join as well.

        `max_tokens` is the most rows of one step. Raises RankLost and ValueError where the group does not come about.
        """
        assert self._kv is not None, "share_planes comes first"
        with temporary_folder(Path(tempfile.gettempdir())) as folder:
            order = MeetGroup(
                segment=self._kv.segment.details,
                store=folder / "store",
                max_tokens=max_tokens,
                deadline=self.deadline,
            )
            for other in self.others:
                other.say(order, MEETING_SECONDS)
            self.exchange = join(FileStore(str(order.store), self.size))
            for other in self.others:
                word = other.answer(GroupMet, 2 * MEETING_SECONDS)
                if word.error is not None:
                    raise ValueError(f"rank {other.rank}: {word.error}")
        return self.exchange

    def use_planes(self, planes: Sequence[Planes]) -> int:
        """Tell all ranks of planes, views of the shared ones; the number by which steps name them."""
        assert self._kv is not None
        for other in self.others:
            other.say(UsePlanes(self._kv.places(planes)), self.deadline)
        self._plane_sets += 1
        return self._plane_sets - 1

    # ---- steps -------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, planes: int, parts: Sequence[PackedBatch | None]) -> Iterator[list[StepDone]]:
        """Have the other ranks compute `parts`, in their order, while the leader computes its own inside.

        What they have done is in the list when it is left. Raises RankLost; also inside, where the exchange finds out.
        A step that the leader does not finish leaves the others at a place of their own: then the group is lost.
        """
        if self.lost is not None:
            raise self.lost
        finished = False
        done: list[StepDone] = []
        try:
            self._steps += 1
            for other, part in zip(self.others, parts, strict=True):
                other.say(RunStep(self._steps, planes, part), self.deadline)
            yield done
            done += (other.answer(StepDone, self.deadline) for other in self.others)
            assert all(one.number == self._steps for one in done), "a rank answers to another step"
            finished = True
        except RankLost as lost:
            self._lose(lost)
            raise
        finally:
            if not finished and self.lost is None:
                self._lose(RankLost(LEADER, "it has left a step unfinished"))
        assert self.exchange is not None
        self.traffic = sum((one.traffic for one in done), self.exchange.traffic)

    def _lose(self, lost: RankLost) -> None:
        log.error("%s", lost)
        self.lost = lost

    # ---- the end -----------------------------------------------------------------------------------------------

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` on the running event loop when a rank ends, also between steps."""
        self._watching = asyncio.get_running_loop()
        for other in self.others:
            self._watching.add_reader(other.pidfd, self._ended, other, on_lost)

    def _ended(self, other: RankProcess, on_lost: Callable[[], object]) -> None:
        assert self._watching is not None
        self._watching.remove_reader(other.pidfd)
        if self.lost is None:
            self._lose(RankLost(other.rank, "its process has ended"))
        on_lost()

    def close(self) -> None:
        """End all ranks. Call when no step runs, on the loop that watches; safe to repeat."""
        others, self.others = self.others, []
        for other in others:
            if self._watching is not None:
                self._watching.remove_reader(other.pidfd)
            other.channel.close()
        until = time.monotonic() + (STOP_SECONDS if self.lost is None else 0.0)
        for other in others:
            other.end(until)
        if self.lost is None and self.exchange is not None:  # else somebody may still be in it
            self.exchange.close()
        if self._kv is not None:
            self._kv.segment.close()
            self._kv = None
