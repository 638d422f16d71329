"""CUDA graphs: one graph for each padded size of a step, replayed with the step's batch copied in.

It knows a step as a callable over a RaggedBatch, and nothing of models or schedules. Plain decode steps have sizes of
their own, by (sequences, context); those of steps with prompts among them are in `mixed_graphs`.

Shapes: B sequences of the step, N sequences of the graph it is padded to, M blocks of the graph's longest table, R rows
of the step whose logits are wanted.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from serving.batch.device_copy import on_device
from serving.batch.ragged import RaggedBatch
from serving.forward.mixed_graphs import MixedSizes
from serving.forward.padding import TOKENS, reads_only_tensors, static
from serving.streams import Captures, Graph, streams_of

log = logging.getLogger(__name__)

Step = Callable[[RaggedBatch], tuple[Tensor, ...]]
Size = tuple[int, int]  # (sequences, tokens of context)
S = TypeVar("S", bound=tuple[int, ...])  # a size: the second number is the context
Held = TypeVar("Held", bound=tuple[int, ...], contravariant=True)

WARM_UP_STEPS = 2  # before a capture: kernels are compiled and tuned in the first, libraries make room in both
PADDING = TOKENS | {"context_lens": 0}  # what rows that pad a decode step hold
SHORT_CONTEXTS = (1024, 4096)  # tokens, for which graphs launch fewer programs than for any longer one
LOG_EVERY = 10  # captures between lines of the log


class Static(Protocol[Held]):
    """The tensors that captured steps read, at addresses that never change."""

    def fill(self, batch: RaggedBatch, size: Held) -> None:
        """Copy a step in, padded to a size that holds it. Nothing here waits for the device."""

    def clear(self, size: Held) -> None:
        """Make all of a step of this size padding."""

    def view(self, size: Held) -> RaggedBatch:
        """The step a graph of this size is captured over, the largest that it may be replayed with."""
        ...


class Sizes(Protocol[S]):
    """Which sizes are captured."""

    def size_of(self, batch: RaggedBatch) -> S | None:
        """The size a step is replayed in; None for one that no graph computes."""

    def all(self) -> list[S]:
        """Largest first: the memory of a larger graph serves the smaller ones."""
        ...

    def static(self, block_size: int, device: torch.device | str) -> Static[S]:
        """Memory for steps of all of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Which decode steps are captured: every pair of these, each ascending. ValueError if there is none or they do not.

    `mixed` are the sizes of steps with prompts among them; None: such steps are launched.
    """

    sequences: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens: kernels launch programs for this much context, however little a step has
    mixed: MixedSizes | None = None

    def __post_init__(self) -> None:
        for name, sizes in (("sequences", self.sequences), ("contexts", self.contexts)):
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name}: {sizes} is not an ascending list of positive sizes")

    @staticmethod
    def up_to(sequences: int, context: int, tokens: int = 0) -> GraphSizes:
        """1, 2, 4, then steps of 8 to 64, of 32 to 256, then of 128; contexts of 1,024, 4,096 and all longer ones.

        Beyond that attention launches no more programs, whatever the context (serving.kernels.gpu.decode_attention).
        With `tokens`, the most of a step, also the mixed sizes up to that.
        """
        ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, sequences, 128)]
        contexts = (*(length for length in SHORT_CONTEXTS if length < context), max(context, 1))
        return GraphSizes(
            sequences=(*(n for n in ladder if n < sequences), sequences),
            contexts=contexts,
            mixed=MixedSizes.up_to(sequences, contexts, tokens) if tokens else None,
        )

    def size_of(self, batch: RaggedBatch) -> Size | None:
        """The size a plain decode step is replayed in; None for another step, or where none holds it."""
        return self.fit(len(batch.query_lens), max(batch.context_lens_list)) if replayable(batch) else None

    def static(self, block_size: int, device: torch.device | str) -> StaticBatch:
        return StaticBatch(self, block_size, device)

    def fit(self, sequences: int, context: int) -> Size | None:
        """The smallest size that holds a step of this many sequences and this longest context; None: none does."""
        n, c = bisect_left(self.sequences, sequences), bisect_left(self.contexts, context)
        if n == len(self.sequences) or c == len(self.contexts):
            return None
        return self.sequences[n], self.contexts[c]

    def all(self) -> list[Size]:
        """Largest first: the memory of a larger graph serves the smaller ones."""
        return [(n, c) for n in reversed(self.sequences) for c in reversed(self.contexts)]


def replayable(batch: RaggedBatch) -> bool:
    """True for a plain decode step: one query a sequence, and each one's logits wanted."""
    return (
        reads_only_tensors(batch)
        and all(count == 1 for count in batch.query_lens)
        and len(batch.logits_rows) == len(batch.query_lens) > 0
    )


class StaticBatch:
    """Of decode steps: see `Static`."""

    def __init__(self, sizes: GraphSizes, block_size: int, device: torch.device | str) -> None:
        most, width = sizes.sequences[-1], -(-sizes.contexts[-1] // block_size)
        self.block_size = block_size
        self.rows: dict[str, Any] = {
            name: static((most,), value, torch.int32 if name == "context_lens" else torch.int64, device)
            for name, value in PADDING.items()
        }
        self.block_tables = static((most, width), 0, torch.int32, device)
        self.query_start = on_device(range(most + 1), torch.int32, device)
        self.logits_rows = on_device(range(most), torch.int64, device)
        self._used = 0  # rows from here on are padding

    def fill(self, batch: RaggedBatch, size: Size) -> None:
        """Copy a step in: rows from B on write no KV and have no context. The step must fit the size.

        Nothing here waits for the device.
        """
        count = len(batch.query_lens)
        width = min(batch.block_tables.shape[1], -(-size[1] // self.block_size))
        assert count <= size[0] and max(batch.context_lens_list) <= size[1], f"{count} sequences do not fit {size}"
        assert batch.block_size == self.block_size
        for name, rows in self.rows.items():
            rows[:count].copy_(getattr(batch, name))
        self.block_tables[:count, :width].copy_(batch.block_tables[:, :width])
        self.pad(count)

    def pad(self, first: int) -> None:
        """Make the rows from `first` on padding. Their block tables stay as they are: without context none is read."""
        if first < self._used:
            for name, rows in self.rows.items():
                rows[first : self._used].fill_(PADDING[name])
        self._used = first

    def clear(self, size: Size) -> None:
        self.pad(0)

    def view(self, size: Size) -> RaggedBatch:
        """The step a graph of this size is captured over: its contexts are all the longest it may be replayed with."""
        n, context = size
        return RaggedBatch(
            **{name: rows[:n] for name, rows in self.rows.items()},
            query_start=self.query_start[: n + 1],
            block_tables=self.block_tables[:n, : -(-context // self.block_size)],
            block_size=self.block_size,
            query_lens=(1,) * n,
            context_lens_list=(context,) * n,
            logits_rows=self.logits_rows[:n],
        )


class CudaGraphs(Generic[S]):
    """`step` with its launches replayed: the same results for [R, ...] outputs, without the time Python takes.

    `step` must read nothing from the device, and must let rows with slot -1 write no KV and rows without context see
    nothing, as serving.kernels.gpu does. ValueError where the device has no graphs.
    """

    def __init__(
        self, step: Step, sizes: Sizes[S], block_size: int, device: torch.device, captures: Captures | None = None
    ) -> None:
        """`captures` are those of other graphs that compute one after the other with these, and share their memory."""
        self.captures = captures or streams_of(device).captures()
        self.step = step
        self.sizes = sizes
        self.static = sizes.static(block_size, device)
        self._graphs: dict[S, tuple[Graph, tuple[Tensor, ...]]] = {}
        self._warmed: set[tuple[int, ...]] = set()  # sizes that have run: what those of another context need is there

    @torch.inference_mode()
    def __call__(self, batch: RaggedBatch) -> tuple[Tensor, ...] | None:
        """The step's outputs [R, ...], in memory that the next call overwrites; None where no size holds the batch.

        Captures each size once. Nothing else here waits for the device.
        """
        size = self.sizes.size_of(batch)
        if size is None:
            return None
        if size not in self._graphs:
            self._capture(size)
        graph, outputs = self._graphs[size]
        self.static.fill(batch, size)
        graph.replay()
        return tuple(output[: len(batch.logits_rows)] for output in outputs)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture every size now, so that no step waits for it."""
        sizes = self.sizes.all()
        for number, size in enumerate(sizes, 1):
            if size not in self._graphs:
                self._capture(size)
            if number % LOG_EVERY == 0 or number == len(sizes):
                log.info("capturing CUDA graphs: %d of %d", number, len(sizes))

    def _capture(self, size: S) -> None:
        self.static.clear(size)
        step = partial(self.step, self.static.view(size))
        rows = size[0], *size[2:]
        if rows not in self._warmed:
            self._warmed.add(rows)
            for _ in range(WARM_UP_STEPS):
                self.captures.warm_up(step)
        self._graphs[size] = self.captures.capture(step)
