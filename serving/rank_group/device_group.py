"""The leader's hold on ranks that share a model with it and have a device each.

They are started, told and ended as other ranks are (layout_group); what is theirs is KV on their own devices, which
`lanes` reach beside the steps, and a forward pass that is made on all of them at once. It knows no sequences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import torch
from torch._C._distributed_c10d import FileStore

from serving.device_memory import DeviceMemory, MemoryReading
from serving.expert_parallel.exchange import RankLost
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from serving.rank_group.beside import Lanes
from serving.rank_group.child import RankProcess
from serving.rank_group.device_messages import LoadOnDevice, MakeForward, ReadMemory, RunOnDevice
from serving.rank_group.layout_group import LayoutGroup
from serving.rank_group.layout_messages import LoadLayout, Meet, Ready
from serving.rank_group.messages import PackedBatch
from serving.rank_group.ranks import LOAD_SECONDS, MEETING_SECONDS
from serving.streams import recorded, streams_of

LANES = 4  # how many copies of KV may be under way at once
LOOK_SECONDS = 0.1  # between looks whether a rank has ended, while graphs are captured
MEMORY_SECONDS = 60.0  # that a rank may take to say what its device holds
# What libraries on devices are told by: names that begin so go to the ranks as they are here.
TOLD_BY = ("CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "PYTORCH_", "TRITON_", "FLASHINFER_")

Made = TypeVar("Made")


class GroupOnDevices(LayoutGroup):
    """All ranks of a layout but the leader, each with the `device` of its process: the one of `gpus` with its number.

    Without `gpus` each has that of this process, as a CPU.
    """

    def __init__(self, layout: ParallelLayout, deadline: float, device: str, gpus: Sequence[str] = ()) -> None:
        """Starts their processes."""
        self.device, self.gpus = device, gpus
        super().__init__(layout, deadline)
        lanes = [[other.lanes[number] for other in self.others] for number in range(LANES)]
        self.lanes = Lanes(lanes, deadline, self._lost_beside)

    def _started(self, rank: int) -> RankProcess:
        return RankProcess(rank, self._environ(rank), LANES)

    def _environ(self, rank: int) -> Mapping[str, str]:
        told = {name: value for name, value in os.environ.items() if name.startswith(TOLD_BY)}
        return told | ({"CUDA_VISIBLE_DEVICES": self.gpus[rank]} if self.gpus else {})

    def _lost_beside(self, lost: RankLost) -> None:
        """Between steps too who watches hears of it: a rank that is late need not end, and no step may come."""
        self._lose(lost)
        with suppress(RuntimeError):  # a loop that has ended meanwhile
            self._tell()

    # ---- until the first step ----------------------------------------------------------------------------------

    def share_of(self, rank: int, path: Path, dtype: str) -> LoadLayout:
        threads, layout = torch.get_num_threads(), self.layout
        return LoadOnDevice(path=path, dtype=dtype, rank=rank, layout=layout, threads=threads, device=self.device)

    def meet(self, join: Callable[[FileStore], ParallelRank]) -> None:
        """Unless they have: there is one meeting for all forward passes that are made."""
        if self._own is None:
            super().meet(join)

    def _meet(self, store: Path) -> Meet:
        return Meet(store=store, deadline=self.deadline)

    def make_forward(self, orders: Mapping[int, MakeForward], make: Callable[[], Made]) -> Made:
        """What `make` makes here, while each other rank does what `orders` say for it, by rank; all of it is computed.

        Raises RankLost, and ValueError where a rank, or this one, cannot.
        """
        try:
            for other in self.others:
                other.ask(orders[other.rank], MEETING_SECONDS)
            with self._ending_with_others():
                made = make()
                self._ready(LOAD_SECONDS)  # one may compile long after the others: only then a deadline begins
            self.finish()
        except RankLost as lost:
            self._lose(lost)
            self._told_why()
            raise
        return made

    def _told_why(self) -> None:
        """Raises ValueError with what a rank that has left could not do, if it has said so."""
        for other in self.others:
            with suppress(RankLost):
                word = other.answer(Ready, LOOK_SECONDS) if other.owed else Ready()
                if word.error is not None:
                    raise ValueError(f"rank {other.rank}: {word.error}")

    @contextmanager
    def _ending_with_others(self) -> Iterator[None]:
        """Inside, what the device does with other ranks ends once one of them has ended.

        Graphs are captured there, and each begins with a wait of the host for all that the device was given.
        """
        over, own = Event(), self._own
        assert own is not None, "the ranks have met"

        def look() -> None:
            while not over.wait(LOOK_SECONDS):
                if any(other.ending for other in self.others):
                    own.abort()
                    return

        looking = Thread(target=look, name="ranks", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()

    @property
    def memories(self) -> list[DeviceMemory]:
        """Of the other ranks' devices."""
        return [RankMemory(other) for other in self.others]

    # ---- steps -------------------------------------------------------------------------------------------------

    @contextmanager
    def run(self, batch: PackedBatch, *, head: bool, launched: bool) -> Iterator[None]:
        """Have the other ranks compute `batch`, while the leader launches its own share inside.

        All is computed when it is left. Raises RankLost. Where the leader fails in between, what its device waits for
        from the others would have no end: it is ended, and the group is lost.
        """
        assert self._own is not None, "the ranks have met"

        def order(number: int) -> RunOnDevice:
            return RunOnDevice(number=number, batch=batch, head=head, launched=launched)

        with self.computing(order):
            try:
                yield
            except BaseException:  # a lost rank's too, where the host has waited for it
                self._own.abort()
                raise
            self.finish()

    def wait_on_host(self) -> None:
        """From now on this process waits for each exchange of a step: its forward pass waits for its device anyway."""
        assert self._own is not None, "the ranks have met"
        self._own.wait_on_host()

    def finish(self) -> None:
        """Wait until this rank's device has computed what it was given. Raises RankLost."""
        assert self._own is not None, "the ranks have met"
        self._own.finish(recorded(streams_of(self._own.device)))


class RankMemory(DeviceMemory):
    """That of another rank's device."""

    def __init__(self, rank: RankProcess) -> None:
        self.rank = rank

    def reading(self) -> MemoryReading:
        """Raises ValueError where the rank is lost: this is asked while a worker starts."""
        try:
            self.rank.ask(ReadMemory(), MEMORY_SECONDS)
            return self.rank.answer(MemoryReading, MEMORY_SECONDS)
        except RankLost as lost:
            raise ValueError(f"{lost}, while the memory of its device was measured") from lost
