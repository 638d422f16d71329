"""Attention of prompts by FlashInfer over pages where they lie: planned for each step and window, run for each layer.

The door to the library: importing this needs it, the extra `flashinfer`. FlashInfer plans on the host, from the lengths
of a step, so a step that uses it cannot be captured in a graph. Nothing here waits for the device, unless the host is a
whole plan ahead of it.

Shapes: T new tokens, B sequences with M blocks in the longest table, S sequences from the step's first prompt to its
last, P pages that these see, Hq query heads, Hkv key-value heads, D head dimensions.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import flashinfer
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from serving.batch.device_copy import all_on_device
from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.prompts import PromptShape
from serving.streams import Streams, streams_of

WORKSPACE = 128 << 20  # bytes of the device for partial sums: what FlashInfer recommends


class Planner:
    """FlashInfer's wrapper for layers of one window, and what tells that the device has its last plan."""

    def __init__(self, workspace: Tensor, streams: Streams) -> None:
        self.wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._streams = streams
        self._taken = streams.event(sleeps=False)

    def plan(self, **arguments: Any) -> None:
        """A plan goes to the device from memory that the next one is written to, so that one is waited for."""
        if not self._taken.query():
            self._taken.synchronize()
        self.wrapper.plan(**arguments)
        self._taken.record(self._streams.current())


class FlashInferPrompts:
    """Attends the prompts of one step after the other (serving.kernels.gpu.prompts.PromptAttention)."""

    def __init__(self, shape: PromptShape, device: torch.device) -> None:
        self.shape = shape
        self.streams = streams_of(device)
        self._workspace = self.streams.room(WORKSPACE)
        self._planners: dict[int | None, Planner] = {}

    def step(self, batch: RaggedBatch) -> FlashInferStep:
        return FlashInferStep(self, batch)

    def planner(self, window: int | None) -> Planner:
        if window not in self._planners:
            self._planners[window] = Planner(self._workspace, self.streams)
        return self._planners[window]


class FlashInferStep:
    """See `serving.kernels.gpu.prompts.PromptStep`: it attends all sequences from the first prompt to the last."""

    def __init__(self, prompts: FlashInferPrompts, batch: RaggedBatch) -> None:
        self._prompts = prompts
        self._batch = batch
        self._planned: dict[int | None, Any] = {}  # FlashInfer's wrapper by window

    def attend(self, q: Tensor, paged: Paged, scale: float, window: int | None, out: Tensor) -> None:
        wrapper = self._planned.get(window)
        if wrapper is None:
            planner = self._prompts.planner(window)
            # FlashInfer's window does not count a query's own token.
            planner.plan(**self._plan, sm_scale=scale, window_left=-1 if window is None else window - 1)
            wrapper = self._planned[window] = planner.wrapper
        wrapper.run(q[self._rows], (paged.k, paged.v), out=out[self._rows])

    @cached_property
    def _sequences(self) -> range:
        many = [b for b, count in enumerate(self._batch.query_lens) if count > 1]
        return range(many[0], many[-1] + 1)

    @cached_property
    def _rows(self) -> slice:
        """Of the T, those of these sequences."""
        lens, chosen = self._batch.query_lens, self._sequences
        first = sum(lens[: chosen.start])
        return slice(first, first + sum(lens[chosen.start : chosen.stop]))

    @cached_property
    def _plan(self) -> dict[str, Any]:
        """Arguments of FlashInfer's plan. Lengths are in pinned memory, which it reads, and copies without waiting."""
        shape, chosen = self._prompts.shape, slice(self._sequences.start, self._sequences.stop)
        counts = np.array(self._batch.query_lens[chosen])
        contexts = np.array(self._batch.context_lens_list[chosen])
        pages = -(-contexts // shape.block_size)
        return {
            "qo_indptr": self._pinned([0, *np.cumsum(counts)]),
            "paged_kv_indptr": self._pinned([0, *np.cumsum(pages)]),
            "paged_kv_indices": self._pages(pages),
            "paged_kv_last_page_len": self._pinned(contexts - (pages - 1) * shape.block_size),
            "seq_lens": self._pinned(contexts),
            "max_token_per_sequence": int(counts.max()),
            "num_qo_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_dim_qk": shape.head_dim,
            "page_size": shape.block_size,
            "causal": True,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }

    def _pages(self, counts: NDArray[np.int64]) -> Tensor:
        """The blocks [P] int32 of these sequences' contexts, one sequence after the other, out of the batch's table."""
        tables = self._batch.block_tables
        width = tables.shape[1]
        places = [np.arange(b * width, b * width + n) for b, n in zip(self._sequences, counts, strict=True)]
        (chosen,) = all_on_device([np.concatenate(places).astype(np.int32)], tables.device)
        return tables.reshape(-1).index_select(0, chosen)

    def _pinned(self, values: ArrayLike) -> Tensor:
        host = torch.from_numpy(np.asarray(values, dtype=np.int32))
        return self._prompts.streams.pinned(host.nbytes).view(torch.int32).copy_(host)
