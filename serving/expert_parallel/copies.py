"""How the weights of experts come from the ranks that hold them into spare buffers, beside the steps of all ranks.

One method, `run`, whatever carries the bytes. It is called by a thread of its own on every rank, for the same stages
in the same order; what it may not know is when they are switched.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from serving.expert_parallel.all_to_all import AllToAllGroup, connected, let_go
from serving.expert_parallel.arena import ExpertArena, ExpertFormat, arena_bytes
from serving.expert_parallel.exchange import ExchangeUnavailable, RankLost
from serving.expert_parallel.meeting import MEETING_SECONDS, exchanged
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.stages import WeightTransfer
from serving.expert_parallel.waits import ended
from serving.shared_memory import FIRST_BYTE, Bytes, Segment, SegmentUnavailable, available, mapped

CHUNK = 1 << 20  # bytes that are copied at once

Pace = Callable[[int], None]


class ExpertCopies(Protocol):
    """One rank's part. `arena` is its own."""

    @property
    def arena(self) -> ExpertArena: ...

    def run(self, layer: int, transfers: Sequence[WeightTransfer], pace: Pace) -> int:
        """Fill this rank's buffers of a stage, and let the others fill theirs from here: bytes that came in.

        `pace(bytes)` is called before so many are copied, and now and then while one waits; what it raises ends the
        copy. Raises RankLost.
        """

    def close(self) -> None:
        """Give back memory and connections that are not the arena's own."""


def parts(size: int) -> list[slice]:
    return [slice(first, min(first + CHUNK, size)) for first in range(0, size, CHUNK)]


class SharedMemoryCopies:
    """Between ranks of one host: each reads from the arenas of the others, which need not know."""

    def __init__(self, arena: ExpertArena, memories: Sequence[Bytes], rank: int) -> None:
        """`memories` are those of all ranks' arenas, as long as the own."""
        self.arena, self._memories, self._rank = arena, list(memories), rank

    @classmethod
    def join(
        cls, form: ExpertFormat, layers: int, slots: int, rank: int, ranks: int, store: Store,
        *, meeting: float = MEETING_SECONDS, processes: Mapping[int, int] = MappingProxyType({}),
    ) -> Self:  # fmt: skip
        """Meet the other ranks in `store`; `processes` of them, where they are known, are not waited for once they end.

        Raises ExchangeUnavailable where memory cannot be shared, RankLost.
        """
        if not available():
            raise ExchangeUnavailable("this system has no anonymous files to share memory by")
        segment, watch = Segment(arena_bytes(form, layers, slots), "millrace-weights"), ProcessWatch(processes)
        try:
            offers = exchanged(store, "arena", rank, ranks, segment.details, meeting, watch)
            memories = [
                (segment.memory if other == rank else mapped(offer, writable=False))[FIRST_BYTE:]
                for other, offer in enumerate(offers)
            ]
            exchanged(store, "arena mapped", rank, ranks, b"", meeting, watch)
        except SegmentUnavailable as error:
            raise ExchangeUnavailable(str(error)) from error
        finally:
            watch.close()
            segment.close()
        return cls(ExpertArena(form, layers, slots, torch.from_numpy(memories[rank])), memories, rank)

    def run(self, layer: int, transfers: Sequence[WeightTransfer], pace: Pace) -> int:
        came = 0
        for transfer in transfers:
            if transfer.rank == self._rank:
                first = self.arena.offset(layer, transfer.source_buffer)
                target = self.arena.buffer(layer, transfer.buffer)
                source = self._memories[transfer.source][first : first + len(target)]
                for part in parts(len(target)):
                    pace(part.stop - part.start)
                    # The interpreter is free meanwhile: the step beside this needs it.
                    ctypes.memmove(target[part].data_ptr(), source[part].ctypes.data, part.stop - part.start)
                came += len(target)
        return came

    def close(self) -> None:
        self._memories = []


class AllToAllCopies:
    """Between any hosts: chunk by chunk an all-to-all of a group of its own, over gloo."""

    def __init__(self, arena: ExpertArena, group: AllToAllGroup, ranks: int, deadline: float) -> None:
        """`deadline`: seconds that another rank may be late with a chunk."""
        self.arena, self._rank, self._ranks, self._deadline = arena, group.rank(), ranks, deadline
        self._group: AllToAllGroup | None = group

    @classmethod
    def join(
        cls, form: ExpertFormat, layers: int, slots: int, rank: int, ranks: int, store: Store,
        *, deadline: float = MEETING_SECONDS,
    ) -> Self:  # fmt: skip
        """Meet the other ranks in `store` and connect to them. Raises RankLost for one that does not come."""
        group = connected(store, rank, ranks, 2 * deadline)
        memory = torch.zeros(arena_bytes(form, layers, slots), dtype=torch.uint8)
        return cls(ExpertArena(form, layers, slots, memory), group, ranks, deadline)

    def run(self, layer: int, transfers: Sequence[WeightTransfer], pace: Pace) -> int:
        sent = {one.rank: one.source_buffer for one in transfers if self._rank == one.source != one.rank}
        own = next((one for one in transfers if one.rank == self._rank), None)
        if own is not None and own.source == self._rank:
            pace(self.arena.form.size)
            self.arena.buffer(layer, own.buffer).copy_(self.arena.buffer(layer, own.source_buffer))
        if all(one.source == one.rank for one in transfers):
            return 0
        came = None if own is None or own.source == self._rank else own
        incoming = torch.empty(self.arena.form.size if came else 0, dtype=torch.uint8)
        for part in parts(self.arena.form.size):
            size = part.stop - part.start
            pace(size * max(len(sent), 1 if came else 0))
            chunks = [self.arena.buffer(layer, sent[rank])[part] for rank in sorted(sent)]
            outgoing = torch.cat(chunks) if chunks else incoming[:0]
            from_ranks = [size if came and came.source == rank else 0 for rank in range(self._ranks)]
            to_ranks = [size if rank in sent else 0 for rank in range(self._ranks)]
            self._exchange(incoming[part], outgoing, from_ranks, to_ranks, pace)
        if came:
            self.arena.buffer(layer, came.buffer).copy_(incoming)
        return len(incoming)

    def _exchange(
        self, incoming: Tensor, outgoing: Tensor, from_ranks: list[int], to_ranks: list[int], pace: Pace
    ) -> None:
        if self._group is None:
            raise RankLost(self._rank, "its connection is closed")
        until = time.monotonic() + self._deadline
        try:
            work = self._group.alltoall_base(incoming, outgoing, from_ranks, to_ranks)
            while not ended(work):
                pace(0)
                if time.monotonic() > until:
                    raise RankLost(None, "weights have not come within the deadline")
        except RuntimeError as error:  # gloo's word for a connection that broke
            raise RankLost(None, f"the connection for weights is broken: {error}") from error

    def close(self) -> None:
        if self._group is not None:
            held: list[object] = [self._group]
            self._group = None
            let_go(held)


class CheckpointCopies:
    """From the files of the model, which every rank reads for itself: the ranks' own memory and links stay free."""

    def __init__(self, arena: ExpertArena, rank: int, read: Callable[[int, int], nn.Module]) -> None:
        """`read(layer, expert)` is the expert as the ranks hold it, of the MoE layer counted from the first one."""
        self.arena, self._rank, self._read = arena, rank, read

    def run(self, layer: int, transfers: Sequence[WeightTransfer], pace: Pace) -> int:
        came = 0
        for transfer in transfers:
            if transfer.rank == self._rank:
                pace(self.arena.form.size)
                expert = self._read(layer, transfer.expert)
                if ExpertFormat.of([expert]) != self.arena.form:  # copied, its numbers would be taken for others
                    raise ValueError("the checkpoint's experts have another type or shape than those that compute")
                for field in self.arena.form.fields:
                    field.view(self.arena.buffer(layer, transfer.buffer)).copy_(expert.get_parameter(field.name))
                came += self.arena.form.size
        return came

    def close(self) -> None:
        """It holds nothing but the arena."""
