"""Ranks on streams of one FakeCuda, exchanging as over NCCL: an operation is done once every rank's device has come to
it, in an order that nothing else fixes, and the host waits for none.

One thread plays as many hosts as there are ranks: each launches what it has before the next one does. A host that waits
for its device inside a step waits for ranks that have launched nothing, which the FakeCuda tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.gpu.fake_cuda import FakeStream, Task, inner
from tests.gpu.fake_graphs import Again, GraphingCuda


@dataclass
class Meeting:
    """One operation, by what each rank's device has brought to it: (output, input, elements it sends to each rank)."""

    ranks: int
    done: Task
    here: dict[int, tuple[Tensor, Tensor, list[int]]] = field(default_factory=dict)

    def arrive(self, rank: int, out: Tensor, given: Tensor, to: list[int]) -> None:
        self.here[rank] = out, given, to
        if len(self.here) < self.ranks:
            return
        for receiver, (received, _, _) in self.here.items():
            at = 0
            for sender in range(self.ranks):
                _, sent, counts = self.here[sender]
                first, count = sum(counts[:receiver]), counts[receiver]
                received.view(-1)[at : at + count] = sent.view(-1)[first : first + count]
                at += count
            assert at == received.numel(), "ranks that do not mean the same exchange"
        self.done.done = True


class FakeNccl:
    """The ranks of one group. `lost` are those that launch nothing more."""

    def __init__(self, cuda: GraphingCuda, ranks: int) -> None:
        self.cuda = cuda
        self.ranks = [FakeNcclRank(self, rank, ranks) for rank in range(ranks)]
        self.meetings: list[Meeting] = []
        self.aborted = False

    def meeting(self, number: int) -> Meeting:
        while len(self.meetings) <= number:
            self.meetings.append(Meeting(len(self.ranks), Task(self.cuda.default, lambda: None)))
        return self.meetings[number]

    def abort(self) -> None:
        self.aborted = True
        for meeting in self.meetings:
            meeting.done.done = True


class FakeNcclRank:
    """See serving.parallel.device_groups.DeviceGroup."""

    def __init__(self, nccl: FakeNccl, rank: int, ranks: int) -> None:
        self.nccl, self.number, self.ranks = nccl, rank, ranks
        self.computing: FakeStream = nccl.cuda.make(f"rank {rank}")
        self.exchanging: FakeStream = nccl.cuda.make(f"nccl {rank}")
        self.launched = 0

    def rank(self) -> int:
        return self.number

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]) -> Any:
        cuda = self.nccl.cuda
        to = input_splits or [input.numel() // self.ranks] * self.ranks
        assert sum(to) == input.numel() and sum(output_splits or [output.numel()]) == output.numel()
        if cuda.recorded is not None:  # the stream that exchanges joins the capture, and is joined again
            cuda.recorded.append(Again(lambda: self._launch(output, input, to).wait()))
            return Captured()
        return self._launch(output, input, to)

    def _launch(self, output: Tensor, input: Tensor, to: list[int]) -> FakeWork:
        cuda, current = self.nccl.cuda, self.current()
        meeting = self.nccl.meeting(self.launched)
        self.launched += 1
        self.exchanging.wait_stream(current)
        out, given = inner(output), inner(input)
        cuda.queue(self.exchanging, lambda: meeting.arrive(self.number, out, given, to))
        cuda.count("exchange", current)
        return FakeWork(cuda, current, cuda.queue(self.exchanging, lambda: None, (meeting.done,)))

    def current(self) -> FakeStream:
        """The thread's; in a thread that plays no rank, whose stream would be every rank's, this rank's own."""
        current = self.nccl.cuda.current()
        return self.computing if current is self.nccl.cuda.default else current

    def abort(self) -> None:
        self.nccl.abort()


@dataclass(frozen=True, slots=True)
class FakeWork:
    """`wait` is what ProcessGroupNCCL's is: the current stream waits, and the host goes on."""

    cuda: GraphingCuda
    current: FakeStream
    task: Task

    def wait(self) -> bool:
        self.cuda.queue(self.current, lambda: None, (self.task,))
        return True


class Captured:
    """An operation inside a capture: its end is part of the graph."""

    def wait(self) -> bool:
        return True
