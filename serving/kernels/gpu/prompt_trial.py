"""Tries FlashInfer before it is used, and measures it beside Triton's kernel over the steps that a worker computes.

Whatever the library ends with, it is not used, and says why. It chooses nothing, and keeps nothing.

Shapes: T new tokens, Hq query heads, D head dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from subprocess import TimeoutExpired
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.prompts import PromptAttention, PromptShape, TritonPrompts
from serving.streams import recorded, streams_of

WORTH = 1.1  # times as quick as Triton's kernel FlashInfer must be
CLOSE = 2e-2  # ‖difference‖ / ‖output‖ of two kernels that round to bfloat16
ROUNDS = 3  # of each kernel, in turn; the quickest counts
LONGEST = 16_384  # tokens of context that are measured at most
EARLIER = 4  # times the tokens of the largest step is the context of a chunk that is measured beside a prompt's first
PARTS = (1, 4, 16)  # the largest step, and these parts of it, are measured
# What may be otherwise at the next start: a device or a host that others use too, or a link.
PASSING = (MemoryError, TimeoutError, TimeoutExpired, ConnectionError)
PASSING_WORDS = (
    "out of memory",
    "busy or unavailable",
    "device busy",
    "device or resource busy",
    "timed out",
    "no space",
)
SHORT = 3  # tokens of the sequences that a measured step has beside a long one, which has no fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptWork:
    """What a worker attends with: `windows` of all its layers, steps of up to `most_tokens` and `longest` contexts."""

    shape: PromptShape
    windows: tuple[int | None, ...]
    most_tokens: int
    longest: int

    @property
    def sizes(self) -> list[int]:
        """New tokens of the steps that are measured, largest first."""
        most = max(SHORT, min(self.most_tokens, self.longest, LONGEST))
        return sorted({max(SHORT, most // part) for part in PARTS}, reverse=True)

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(new tokens, tokens of context) of these: of each size a prompt's first chunk, and a later one."""
        sizes = self.sizes
        later = max(sizes[0], min(EARLIER * sizes[0], self.longest, LONGEST))
        return [(tokens, context) for tokens in sizes for context in (tokens, later)]

    @property
    def key(self) -> tuple[Any, ...]:
        shape = self.shape
        numbers = shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, str(shape.dtype)
        return *numbers, str(self.windows), str(self.cases)


class NotUsed(Exception):
    """Why FlashInfer is not used. `lasting`: it would not be next time either, of the same versions here."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class PromptSample:
    """A step over pages of random numbers in no order: a long sequence between two short ones.

    One of them is the end of as long a context. Rows that decode are the decode kernel's, whoever attends prompts.
    """

    batch: RaggedBatch
    q: Tensor  # [T, Hq, D]
    paged: Paged

    @staticmethod
    def of(shape: PromptShape, tokens: int, context: int, device: torch.device) -> PromptSample:
        """The long one has so many new tokens, the last ones of the context."""
        new, contexts = (SHORT, tokens, SHORT), (context, context, SHORT)
        needed = [-(-each // shape.block_size) for each in contexts]
        blocks = sum(needed)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks)).tolist()
        ends = list(accumulate(needed))
        batch = RaggedBatch.build(
            tokens=[[0] * count for count in new],
            starts=[whole - count for whole, count in zip(contexts, new, strict=True)],
            block_tables=[order[end - count : end] for end, count in zip(ends, needed, strict=True)],
            block_size=shape.block_size,
            device=device,
        )
        pages = (blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        rows = (sum(new), shape.heads, shape.head_dim)
        k, v, q = (torch.randn(size, dtype=shape.dtype, device=device) for size in (pages, pages, rows))
        return PromptSample(batch, q, Paged(k, v, None, None))

    def attended(self, prompts: PromptAttention, windows: Iterable[int | None]) -> Tensor:
        """By layers of these windows, one after the other; what the last one gives [T, Hq, D]."""
        out, step = torch.empty_like(self.q), prompts.step(self.batch)
        for window in windows:
            step.attend(self.q, self.paged, self.q.shape[2] ** -0.5, window, out)
        return out

    def seconds(self, prompts: PromptAttention, windows: Iterable[int | None], clock: Callable[[], float]) -> float:
        """Launched and computed, on a device that has nothing else to do."""
        streams = streams_of(self.q.device)
        recorded(streams).synchronize()
        begun = clock()
        self.attended(prompts, windows)
        recorded(streams).synchronize()
        return clock() - begun


def tried(work: PromptWork, device: torch.device) -> PromptAttention:
    """FlashInfer, whose kernels are built, and give Triton's numbers. Raises NotUsed where they do not."""
    with LibraryTrial():
        from serving.kernels.gpu.flashinfer_prompts import FlashInferPrompts  # it may not be installed

        made = FlashInferPrompts(work.shape, device)
        for tokens, context in work.cases:
            sample = PromptSample.of(work.shape, tokens, context, device)
            for window in set(work.windows):
                own = sample.attended(TritonPrompts(), [window]).float()
                apart = float((sample.attended(made, [window]).float() - own).norm() / own.norm())
                if not apart < CLOSE:
                    reason = f"FlashInfer's numbers are {apart:.2g} from those of Triton's kernel"
                    raise NotUsed(reason, lasting=True)
    return made


class LibraryTrial:
    """The library is called: whatever it ends with, it is not used. It compiles when it is first called, may be of
    another version, and may find a device or a machine that it does not know. Raises NotUsed in the place of that.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, NotUsed):
            return
        line = (str(error).splitlines() or [""])[0]
        reason = f"FlashInfer does not run here: {type(error).__name__}: {line}"
        passing = isinstance(error, PASSING) or any(words in str(error).lower() for words in PASSING_WORDS)
        raise NotUsed(reason, lasting=not passing) from error


def gains(
    made: PromptAttention, work: PromptWork, device: torch.device, clock: Callable[[], float] = perf_counter
) -> dict[int, float]:
    """How many times as quick as Triton's kernel, by the new tokens of a step, over its cases together."""
    own, theirs = dict.fromkeys(work.sizes, 0.0), dict.fromkeys(work.sizes, 0.0)
    for tokens, context in work.cases:
        sample = PromptSample.of(work.shape, tokens, context, device)
        rounds = [
            [sample.seconds(prompts, work.windows, clock) for prompts in (TritonPrompts(), made)] for _ in range(ROUNDS)
        ]
        own[tokens] += min(first for first, _ in rounds)
        theirs[tokens] += min(second for _, second in rounds)
    return {tokens: own[tokens] / theirs[tokens] for tokens in work.sizes}


def least_worth(gains: Mapping[int, float]) -> int | None:
    """The fewest tokens from which on every step that was measured gains enough; None: not even the largest does."""
    least = None
    for tokens in sorted(gains, reverse=True):
        if not gains[tokens] >= WORTH:
            break
        least = tokens
    return least
