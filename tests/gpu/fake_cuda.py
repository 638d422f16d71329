"""A CUDA device made of CPU tensors: what is given to a stream is done late, in any order that nothing forbids.

Tensors of it are `DeviceTensor`s. An operation on them is queued on the thread's current stream, and its result holds
old bytes until it has been done. A seeded adversary chooses what is done when, bound by streams, events and by what the
host waits for alone. The host waits where it would on CUDA: for an event, for a number (`item`, `tolist`), for a copy
into memory that is not pinned. Launches, copies and waits are counted by thread and stream.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from serving import streams
from serving.streams import DEFAULT, Streams

POISON = 0xA5  # each byte of memory that nothing has been written to
DEVICE = torch.device("cuda", 0)
ATEN = torch.ops.aten
ROOM = {ATEN.new_empty, ATEN.empty_like, ATEN.new_empty_strided}  # nothing is launched for it
WAITING = {ATEN.nonzero, ATEN.masked_select, ATEN.equal, ATEN.is_nonzero}  # the shape or value goes to the host


@dataclass(slots=True)
class Task:
    """One thing a stream does; `after` are the tasks of other streams that come first."""

    stream: FakeStream
    work: Callable[[], object]
    after: tuple[Task, ...] = ()
    done: bool = False


@dataclass(eq=False)
class FakeStream:
    """See serving.streams.Stream."""

    cuda: FakeCuda
    name: str
    tasks: deque[Task] = field(default_factory=deque)
    last: Task | None = None

    def wait_event(self, event: FakeEvent) -> None:
        with self.cuda.lock:
            if event.place is not None:
                self.cuda.queue(self, lambda: None, (event.place,))

    def wait_stream(self, stream: FakeStream) -> None:
        with self.cuda.lock:
            if stream.last is not None:
                self.cuda.queue(self, lambda: None, (stream.last,))


class FakeEvent:
    """See serving.streams.Event."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.place: Task | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        with self.cuda.lock:
            self.place = self.cuda.queue(stream or self.cuda.current(), lambda: None)

    def synchronize(self) -> None:
        if self.place is not None:
            self.cuda.host_waits(self.place, "event")

    def query(self) -> bool:
        with self.cuda.lock:
            return self.place is None or self.place.done


@dataclass(frozen=True, slots=True)
class Counted:
    """What of the device was used: by which thread, on which stream."""

    what: str
    thread: str
    stream: str


class FakeCuda(Streams):
    """See the module. `eager` is how likely the device does something whenever it is given something."""

    def __init__(self, seed: int = 0, eager: float = 0.0) -> None:
        self.device = DEVICE
        self.choice = random.Random(seed)
        self.eager = eager
        self.lock = threading.RLock()
        self.counts: Counter[Counted] = Counter()
        self.default = FakeStream(self, DEFAULT)
        self.all = [self.default]
        self._current = threading.local()
        self._pinned: list[Tensor] = []

    # ---- serving.streams.Streams -------------------------------------------------------------------------------

    def current(self) -> FakeStream:
        found: FakeStream = getattr(self._current, "stream", self.default)
        return found

    def make(self, name: str) -> FakeStream:
        with self.lock:
            self.all.append(FakeStream(self, name))
            return self.all[-1]

    def event(self, *, sleeps: bool = True) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def pinned(self, count: int) -> Tensor:
        self._pinned.append(poisoned((count,), (1,), torch.uint8))
        return self._pinned[-1]

    def pin(self, tensor: Tensor) -> None:
        self._pinned.append(tensor)

    def room(self, count: int) -> Tensor:
        return DeviceTensor(poisoned((count,), (1,), torch.uint8), self)

    def uploaded(self, host: Tensor) -> Tensor:
        made = DeviceTensor(poisoned(tuple(host.shape), host.stride(), host.dtype), self)
        made.copy_(host, non_blocking=True)
        return made

    def address(self, tensor: Tensor) -> int:
        return inner(tensor).data_ptr()

    def launch(self, kernel: Callable[..., object], *tensors: Tensor) -> None:
        given = [inner(tensor) for tensor in tensors]
        self.queue(self.current(), lambda: kernel(*given))
        self.count("launch", self.current())

    def capturing(self) -> bool:
        return False

    # ---- the device ----------------------------------------------------------------------------------------------

    def tensor(self, host: Tensor) -> Tensor:
        """A tensor of the device that holds this from the beginning."""
        return DeviceTensor(host.clone(), self)

    def adopted(self, host: Tensor) -> Tensor:
        """`tensor`, in this very memory."""
        return DeviceTensor(host, self)

    def peek(self, tensor: Tensor) -> Tensor:
        """What lies in the device's memory now, whatever is still to be done."""
        with self.lock:
            return inner(tensor).clone()

    def count(self, what: str, stream: FakeStream) -> None:
        name = threading.current_thread().name
        with self.lock:
            self.counts[Counted(what, "copying" if name.startswith("asyncio_") else name, stream.name)] += 1

    def total(self, what: str) -> int:
        return sum(count for counted, count in self.counts.items() if counted.what == what)

    def queue(self, stream: FakeStream, work: Callable[[], object], after: tuple[Task, ...] = ()) -> Task:
        with self.lock:
            task = Task(stream, work, after)
            stream.tasks.append(task)
            stream.last = task
            while self.choice.random() < self.eager and self._advance():
                pass
            return task

    def host_waits(self, place: Task | None, what: str) -> None:
        """The host goes on once the device has passed this place; it may be further than that."""
        with self.lock:
            self.count(f"wait: {what}", place.stream if place is not None else self.current())
            while place is not None and not place.done:
                assert self._advance(), "streams that wait for each other"

    def finish(self) -> None:
        """All is done."""
        with self.lock:
            while self._advance():
                pass

    def _advance(self) -> bool:
        """Do one task of any stream that may go on; False if none may."""
        ready = [one for one in self.all if one.tasks and all(task.done for task in one.tasks[0].after)]
        if not ready:
            return False
        task = self.choice.choice(ready).tasks.popleft()
        with torch.inference_mode():
            task.work()
        task.done = True
        return True

    # ---- operations of torch -------------------------------------------------------------------------------------

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        packet = func.overloadpacket
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if composite and packet is not ATEN.where:  # which would make a number's tensor, of no memory
            return func.decompose(*args, **kwargs)  # inference mode leaves that to us
        if packet is ATEN.copy_:
            return self._copy(args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
        if packet is ATEN._to_copy and torch.device(kwargs.get("device") or DEVICE).type == "cpu":
            return self._to_host(func, args, kwargs)
        if packet is ATEN._local_scalar_dense or packet in WAITING:
            self.host_waits(self.current().last, str(packet.__name__))
            found = func(*self._inner(args), **self._inner(kwargs))
            return DeviceTensor(found, self) if isinstance(found, Tensor) else found
        if "device" in kwargs:
            kwargs = kwargs | {"device": None}
        assert not hosts(args), f"{func} is given memory of the host"
        if func.is_view:
            return tree_map(self._wrapped, func(*self._inner(args), **self._inner(kwargs)))
        if packet in ROOM and not func._schema.is_mutable:
            return self._late(func, self._inner(args), self._inner(kwargs), fills=False)
        self.count("launch", self.current())
        if func._schema.is_mutable:
            given, named = self._inner(args), self._inner(kwargs)
            self.queue(self.current(), lambda: func(*given, **named))
            return args[0] if "out" not in kwargs else kwargs["out"]
        return self._late(func, self._inner(args), self._inner(kwargs))

    def _late(self, func: Any, given: Any, named: Any, *, fills: bool = True) -> Any:
        """The result of an operation, which holds old bytes until that is done; for good if it `fills` nothing."""
        shapes = func(*tree_map(as_meta, given), **(tree_map(as_meta, named) | device_of(func)))
        results = tree_map(lambda t: poisoned(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t, shapes)

        def work() -> None:
            found = func(*given, **named)
            for result, value in zip(flat(results), flat(found), strict=True):
                result.copy_(value)

        if fills:
            self.queue(self.current(), work)
        return tree_map(self._wrapped, results)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        host = next((one for one in (target, source) if not isinstance(one, DeviceTensor)), None)
        into, given = inner(target), inner(source)
        if host is None or (non_blocking and self._is_pinned(host)):
            self.queue(self.current(), lambda: into.copy_(given))
            self.count("launch" if host is None else "copy", self.current())
            return target
        self.count("copy", self.current())
        if into is target:
            self._drained(given)
            into.copy_(given)
        else:
            snapshot = given.clone()
            self.queue(self.current(), lambda: into.copy_(snapshot))
            self._drained(given)
        return target

    def _to_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        self._drained(inner(args[0]))
        found: Tensor = func(*self._inner(args), **self._inner(kwargs))
        return found

    def _drained(self, copied: Tensor) -> None:
        """CUDA waits for the stream before a copy of pageable memory is done; one of nothing waits for nothing."""
        if copied.numel():
            self.host_waits(self.current().last, "copy")

    def _is_pinned(self, tensor: Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == place for one in self._pinned)

    def _inner(self, tree: Any) -> Any:
        return tree_map(lambda one: inner(one) if isinstance(one, Tensor) else one, tree)

    def _wrapped(self, one: Any) -> Any:
        return DeviceTensor(one, self) if isinstance(one, Tensor) else one


class DeviceTensor(torch.Tensor):
    """Memory of a FakeCuda: says that it is of a CUDA device, and lies in the CPU tensor `late`."""

    late: Tensor
    cuda: FakeCuda

    @staticmethod
    def __new__(cls, late: Tensor, cuda: FakeCuda) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            late.shape,
            strides=late.stride(),
            storage_offset=late.storage_offset(),
            dtype=late.dtype,
            device="meta",  # for what asks in C++: it has no memory of its own
        )
        return made

    def __init__(self, late: Tensor, cuda: FakeCuda) -> None:
        self.late = late
        self.cuda = cuda

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = next(one for one in flat((args, kwargs or {})) if isinstance(one, DeviceTensor))
        return owner.cuda.operation(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def inner(tensor: Tensor) -> Tensor:
    """The CPU tensor behind a tensor of the device."""
    return tensor.late if isinstance(tensor, DeviceTensor) else tensor


def poisoned(shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    room = torch.frombuffer(bytearray([POISON]) * max(1, made.untyped_storage().nbytes()), dtype=torch.uint8)
    made.untyped_storage().copy_(room.untyped_storage()[: made.untyped_storage().nbytes()])
    return made


def as_meta(one: Any) -> Any:
    return one.to("meta") if isinstance(one, Tensor) else one


def device_of(func: Any) -> dict[str, Any]:
    """What makes an operation that may be told its device give a tensor without memory."""
    return {"device": "meta"} if any(argument.name == "device" for argument in func._schema.arguments) else {}


def flat(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def hosts(args: Any) -> bool:
    """True if there is a tensor of the host among them that is more than a single number."""
    return any(isinstance(one, Tensor) and not isinstance(one, DeviceTensor) and one.dim() for one in flat(args))


@contextmanager
def installed(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """The product finds this device where it looks for a CUDA device."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.device("cuda"), DEVICE):
            patch.setitem(streams._made, device, cuda)
        yield cuda
