"""The order of work on a device: its streams, the events between them, pinned memory, and what makes the host wait.

Whatever orders work by hand reaches CUDA through here alone, so that tests can put another device in its place
(tests.gpu.fake_cuda). It knows no model and no KV.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

DEFAULT = "default"  # the name of the stream that steps are computed on

Outputs = TypeVar("Outputs")


class Event(Protocol):
    """A place in a stream, as `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> object:
        """Behind all that has been given to the stream; without one, to the thread's current stream."""

    def synchronize(self) -> object:
        """The host waits until the device has passed the last place recorded; not at all if there is none."""

    def query(self) -> bool:
        """True if the device has passed it, or there is none. Nothing waits."""
        ...


class Stream(Protocol):
    """Work of one device, done in order, as `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> object:
        """What is given to the stream from here on begins after the place the event has recorded last."""

    def wait_stream(self, stream: Any) -> object:
        """What is given to this stream from here on begins after all that has been given to the other one."""


class Graph(Protocol):
    """Launches that are given to a stream as one, as `torch.cuda.CUDAGraph`."""

    def replay(self) -> object:
        """All of them, on the thread's current stream."""


class Captures(Protocol):
    """Makes graphs that share their memory: what one has put out is gone once another is replayed."""

    def warm_up(self, step: Callable[[], object]) -> None:
        """Call `step` as it will be captured, before that: libraries make room where they are used first."""

    def capture(self, step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        """Call `step`, whose launches are done by replays alone, and what it returns: memory that each replay writes.

        It must not wait for the device.
        """
        ...


class Streams(Protocol):
    """Streams, events and memory of one device. Only `Event.synchronize` makes the host wait."""

    def current(self) -> Stream:
        """The calling thread's: what it launches goes there."""
        ...

    def make(self, name: str) -> Stream:
        """A new stream, which no other one waits for."""
        ...

    def event(self, *, sleeps: bool = True) -> Event:
        """An event whose waiting threads sleep, or spin: then they are sooner awake, and take a core until then."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """What the calling thread launches meanwhile goes to this stream."""
        ...

    def pinned(self, count: int) -> Tensor:
        """Host memory that the device copies from and to by itself: uint8 [count]."""
        ...

    def pin(self, tensor: Tensor) -> None:
        """Make host memory as `pinned` gives it, until the process ends. Raises ValueError where it cannot be."""
        ...

    def room(self, count: int) -> Tensor:
        """Memory of the device, whatever it holds: uint8 [count]."""
        ...

    def uploaded(self, host: Tensor) -> Tensor:
        """`host`, from `pinned`, on the device: copied behind what the current stream has been given."""
        ...

    def address(self, tensor: Tensor) -> int:
        """Where the tensor's first number lies, as kernels on the device find it."""
        ...

    def launch(self, kernel: Callable[..., object], *tensors: Tensor) -> None:
        """Call a kernel with tensors of the device, on the current stream."""
        ...

    def captures(self) -> Captures:
        """Raises ValueError where launches are no more than calls."""
        ...

    def capturing(self) -> bool:
        """True while what the calling thread launches goes into a graph."""
        ...


class CudaStreams(Streams):
    """A CUDA device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def make(self, name: str) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def event(self, *, sleeps: bool = True) -> Event:
        return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def pin(self, tensor: Tensor) -> None:
        code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(code) != 0:
            reason = f"cannot be locked for --host-kv-memory (CUDA {code})"
            raise ValueError(f"{tensor.nbytes} bytes of host memory {reason}")

    def room(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def uploaded(self, host: Tensor) -> Tensor:
        return host.to(self.device, non_blocking=True)

    def address(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def launch(self, kernel: Callable[..., object], *tensors: Tensor) -> None:
        kernel(*tensors)

    def captures(self) -> Captures:
        return CudaCaptures(self.device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class CudaCaptures(Captures):
    """All on one stream: libraries keep memory of their own for each stream they have been used on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, step: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)

    def capture(self, step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile: KV leaves and arrives on streams of its own.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._memory, stream=self._side, capture_error_mode=mode):
            outputs = step()
        return graph, outputs


class Immediate(Streams, Stream, Event):
    """A device where what was called is done: the CPU. There is one stream, and nothing to wait for."""

    def record(self, stream: Any = None) -> None:
        """Passed at once."""

    def synchronize(self) -> None:
        """Passed already."""

    def query(self) -> bool:
        return True

    def wait_event(self, event: Any) -> None:
        """Passed already."""

    def wait_stream(self, stream: Any) -> None:
        """Done already."""

    def current(self) -> Stream:
        return self

    def make(self, name: str) -> Stream:
        return self

    def event(self, *, sleeps: bool = True) -> Event:
        return self

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def pin(self, tensor: Tensor) -> None:
        """There is no other device to copy it."""

    def room(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def uploaded(self, host: Tensor) -> Tensor:
        return host

    def address(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def launch(self, kernel: Callable[..., object], *tensors: Tensor) -> None:
        kernel(*tensors)

    def captures(self) -> Captures:
        raise ValueError("CUDA graphs need a CUDA device")

    def capturing(self) -> bool:
        return False


IMMEDIATE = Immediate()
_made: dict[torch.device, Streams] = {}


def streams_of(device: torch.device | str) -> Streams:
    """The one `Streams` of this device."""
    device = torch.device(device)
    if device.type != "cuda":
        return IMMEDIATE
    if device not in _made:
        whole = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        _made[device] = _made[whole] = _made.get(whole) or CudaStreams(whole)
    return _made[device]


def recorded(streams: Streams) -> Event:
    """An event behind all that the calling thread has launched; who waits for it spins."""
    event = streams.event(sleeps=False)
    event.record(streams.current())
    return event
