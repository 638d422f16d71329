"""What attends the prompts of a step: the seam between a decoder's layers and the kernels, Triton's or a library's.

Shapes: T new tokens, Hq query heads, Hkv key-value heads, D head dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.prompt_attention import prompt_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptShape:
    """What attention is over: planes [num_blocks, block_size, Hkv, D] of the queries' own type."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


class PromptStep(Protocol):
    """Attention over the prompts of one step, the same for each layer. Nothing waits for the device."""

    def attend(self, q: Tensor, paged: Paged, scale: float, window: int | None, out: Tensor) -> None:
        """The rows of `out` [T, Hq, D] of every sequence with more than one query; see `paged_attention`.

        May write those of others too: these are attended afterwards.
        """


class PromptAttention(Protocol):
    """Makes a `PromptStep` of each step, whether it has prompts or not; one is used up before the next is made."""

    def step(self, batch: RaggedBatch) -> PromptStep: ...


class TritonPrompts:
    """By the kernel of this package, for every type of KV; such steps can be captured in graphs."""

    def step(self, batch: RaggedBatch) -> PromptStep:
        return TritonStep(batch)


@dataclass(frozen=True, slots=True)
class LargeSteps:
    """`large` for steps of `least` new tokens and more, Triton's kernel for smaller ones."""

    large: PromptAttention
    least: int

    def step(self, batch: RaggedBatch) -> PromptStep:
        return self.large.step(batch) if len(batch.tokens) >= self.least else TritonStep(batch)


@dataclass(frozen=True, slots=True)
class TritonStep:
    batch: RaggedBatch

    def attend(self, q: Tensor, paged: Paged, scale: float, window: int | None, out: Tensor) -> None:
        prompt_attention(q, paged, self.batch, scale, window, out)
