"""A FakeCuda whose launches can be captured and replayed; and what counts the launches of Triton's kernels on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from serving.streams import Captures, Graph, Outputs
from tests.gpu.fake_cuda import POISON, FakeCuda, FakeStream, Task, flat, inner, installed, poisoned

MADE = {torch.empty, torch.tensor, torch.arange, torch.zeros, torch.full}  # where a device may be named


class GraphingCuda(FakeCuda):
    """See the module. What a captured step launches is done by replays alone; that it waits is a mistake."""

    def __init__(self, seed: int = 0, eager: float = 0.0) -> None:
        super().__init__(seed, eager)
        self._capturing = threading.local()

    @property
    def recorded(self) -> list[Callable[[], object]] | None:
        """What the thread has launched since it began to capture."""
        return getattr(self._capturing, "recorded", None)

    def captures(self) -> FakeCaptures:
        return FakeCaptures(self)

    def capturing(self) -> bool:
        return self.recorded is not None

    def queue(self, stream: FakeStream, work: Callable[[], object], after: tuple[Task, ...] = ()) -> Task:
        if self.recorded is None:
            return super().queue(stream, work, after)
        assert not after, "a captured step waits for another stream"
        self.recorded.append(work)
        return Task(stream, work, done=True)

    def count(self, what: str, stream: FakeStream) -> None:
        if self.recorded is None:
            super().count(what, stream)

    def host_waits(self, place: Task | None, what: str) -> None:
        assert self.recorded is None, f"a captured step waits: {what}"
        super().host_waits(place, what)


class FakeCaptures(Captures):
    """See serving.streams.Captures: a replay writes over what all graphs have put out."""

    def __init__(self, cuda: GraphingCuda) -> None:
        self.cuda = cuda
        self.side = cuda.make("capture")
        self.outputs: list[Tensor] = []

    def warm_up(self, step: Callable[[], object]) -> None:
        current = self.cuda.current()
        self.side.wait_stream(current)
        with self.cuda.on(self.side):
            step()
        current.wait_stream(self.side)

    def capture(self, step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        recorded = self.cuda._capturing.recorded = []
        try:
            outputs = step()
        finally:
            del self.cuda._capturing.recorded
        self.outputs += [inner(one) for one in flat(outputs) if isinstance(one, Tensor)]
        return FakeGraph(self, recorded), outputs


class FakeGraph:
    """See serving.streams.Graph."""

    def __init__(self, captures: FakeCaptures, works: list[Callable[[], object]]) -> None:
        self.captures = captures
        self.works = works

    def replay(self) -> None:
        cuda = self.captures.cuda
        cuda.queue(cuda.current(), self._poison)
        for work in self.works:
            if isinstance(work, Again):
                work.launch()
            else:
                cuda.queue(cuda.current(), work)
        cuda.count("replay", cuda.current())

    def _poison(self) -> None:
        for output in self.captures.outputs:
            output.view(torch.uint8).fill_(POISON)


@dataclass(frozen=True, slots=True)
class Again:
    """What a replay launches anew, since it depends on others than this stream."""

    launch: Callable[[], object]

    def __call__(self) -> None:
        raise AssertionError("it is launched, not done")


class MadeOnDevice(TorchFunctionMode):
    """Tensors that are made on a CUDA device are the FakeCuda's."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in MADE or torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        made = func(*args, **(kwargs | {"device": "cpu"}))
        if func is torch.empty:
            return self.cuda.adopted(poisoned(made.shape, made.stride(), made.dtype))
        self.cuda.count("launch", self.cuda.current())
        return self.cuda.adopted(made)


@contextmanager
def counting_triton(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """The product finds this device, and each launch of a Triton kernel is counted and left out."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from serving.kernels.gpu.decoder import TritonDecoder

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        cuda.count("launch", cuda.current())

    with installed(cuda), pytest.MonkeyPatch.context() as patch, MadeOnDevice(cuda):
        for kernels in (JITFunction, Autotuner):  # the latter would time kernels that are left out
            patch.setattr(kernels, "run", run)
        patch.setattr(TritonDecoder, "tune", lambda self, most_rows: None)
        yield cuda
