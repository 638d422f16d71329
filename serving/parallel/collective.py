"""What the ranks of one process group do together: gather, exchange and sum tensors, in host memory or on devices.

All of it is `torch.distributed`'s all-to-all, and sums are made here, in the order of ranks: their bits are the same on
every rank and from run to run, whatever the group's library would do.

Shapes: n ranks of the group, T rows, W a width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from serving.expert_parallel.all_to_all import AllToAllGroup, let_go
from serving.streams import Event

GATHERED = 1 << 16  # elements up to which a sum of more than two ranks takes one exchange, not two of fewer bytes


class Waits(Protocol):
    """How a rank waits for the operations of its groups. Everything raises RankLost once a rank is lost."""

    def check(self) -> None:
        """Only that."""

    def begin(self, start: Callable[[], Work]) -> Work:
        """An operation that is to be finished."""
        ...

    def finish(self, work: Work) -> None:
        """What follows finds it done."""

    def wait_on_host(self) -> None:
        """From now on `finish` returns when the operation is done, and raises RankLost where it will not be."""

    def passed(self) -> Iterable[Event]:
        """What the device is still to pass of what was finished; each is told once."""
        ...


class Collective:
    """One rank's part in a group. All its ranks call the same methods in the same order, with shapes that fit.

    Every method raises RankLost for a rank that is known to be lost: over host memory also for one that has not taken
    part within the deadline (BoundedWaits), while on a device the step's end tells (device_groups.StreamWaits).
    """

    def __init__(self, group: AllToAllGroup, size: int, waits: Waits, abort: Callable[[], None] | None = None) -> None:
        """`abort` ends what is under way at once; of a group without it, operations end by themselves."""
        self.rank, self.size = group.rank(), size
        self.bytes_sent = 0  # to other ranks, so far
        self._group: AllToAllGroup | None = group
        self._waits = waits
        self._abort = abort
        self._sending: tuple[Work, Tensor] | None = None  # and what it reads from

    def gathered(self, x: Tensor) -> Tensor:
        """x of every rank, [n, *x.shape], by rank; the shapes are equal."""
        if not x.numel():
            return x.new_empty(self.size, *x.shape)
        out = x.new_empty(self.size, *x.shape)
        given = x.contiguous().expand(self.size, *x.shape).contiguous()
        self._run(out.view(-1), given.view(-1), [], [])
        return out

    def gathered_rows(self, x_TW: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of every rank, [sum(counts), W], by rank; `counts` says how many each has."""
        flat = x_TW.contiguous().view(-1)
        width, others = x_TW.shape[1], self.size
        out = self.exchanged(flat.repeat(others), [flat.numel()] * others, [count * width for count in counts])
        return out.view(-1, width)

    def exchanged(self, flat: Tensor, to: Sequence[int], came: Sequence[int]) -> Tensor:
        """The elements of `flat`, `to[r]` of them to each rank r in turn; `came[r]` elements of each in turn."""
        out = flat.new_empty(sum(came))
        if flat.numel() or out.numel():
            self._run(out, flat, list(came), list(to))
        return out

    def exchange(self, out: Tensor, given: Tensor) -> None:
        """As many parts of `given` as there are ranks, of one size, to each in turn; theirs into `out`, in turn."""
        if out.numel():
            self._run(out.view(-1), given.view(-1), [], [])

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in x's shape and type. Floating point is added in float32, rank 0 first."""
        if self.size == 2 or x.numel() <= GATHERED:
            return added(self.gathered(x)).to(x.dtype)
        each = -(-x.numel() // self.size)
        flat = x.new_zeros(self.size * each)
        flat[: x.numel()] = x.reshape(-1)
        part = x.new_empty(self.size, each)
        self._run(part.view(-1), flat, [], [])
        return self.gathered(added(part).to(x.dtype)).view(-1)[: x.numel()].view(x.shape)

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks."""
        return self.gathered(x).amax(0)

    def send(self, x: Tensor, to: int) -> None:
        """Begin to send x; it has gone when the next is sent, and stays as it is until then."""
        if self._sending is not None:
            sent, self._sending = self._sending[0], None
            self._waits.finish(sent)
        flat = x.contiguous().view(-1)
        if flat.numel():
            counts = [flat.numel() if rank == to else 0 for rank in range(self.size)]
            self._sending = self._begin(flat.new_empty(0), flat, [0] * self.size, counts), flat

    def receive(self, out: Tensor, sender: int) -> Tensor:
        """Fill `out`, contiguous, with what rank `sender` sends."""
        if out.numel():
            counts = [out.numel() if rank == sender else 0 for rank in range(self.size)]
            self._run(out.view(-1), out.new_empty(0), counts, [0] * self.size)
        return out

    def shared(self, x: Tensor, root: int) -> Tensor:
        """x of rank `root`, on all; what the others give says its shape and type alone."""
        if self.rank == root:
            flat = x.contiguous().view(-1)
            counts = [0 if rank == root else flat.numel() for rank in range(self.size)]
            given = flat.repeat(self.size - 1)
            self.exchanged(given, counts, [0] * self.size)
            return x
        return self.receive(torch.empty_like(x), root)

    def _run(self, out: Tensor, given: Tensor, came: list[int], to: list[int]) -> None:
        self._waits.finish(self._begin(out, given, came, to))

    def _begin(self, out: Tensor, given: Tensor, came: list[int], to: list[int]) -> Work:
        self._waits.check()
        group = self._group
        assert group is not None
        own = to[self.rank] if to else given.numel() // self.size
        self.bytes_sent += (given.numel() - own) * given.element_size()
        return self._waits.begin(lambda: group.alltoall_base(out, given, came, to))

    def check(self) -> None:
        """Raises the RankLost that there was, where what follows would not ask: a graph that is replayed does not."""
        self._waits.check()

    def wait_on_host(self) -> None:
        """As the waits do."""
        self._waits.wait_on_host()

    def passed(self) -> Iterable[Event]:
        """As the waits tell."""
        return self._waits.passed()

    def abort(self) -> None:
        """Let nothing wait any more for a rank that is lost. The group is of no use after that."""
        if self._abort is not None:
            self._abort()

    def close(self) -> None:
        if self._group is not None:
            held: list[object] = [self._group, self._sending]
            self._group = self._sending = self._abort = None  # it is the group's own method, and holds it
            let_go(held)


def added(parts: Tensor) -> Tensor:
    """The sum over the first axis, one after the other: of integers exact, else in float32."""
    total = parts[0].float() if parts.is_floating_point() else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total
