"""Chooses what attends the prompts of launched steps: Triton's kernel, or FlashInfer where that is quicker here.

Measured once for each device, shape and version, over the steps a worker computes, and kept beside the tuned tiles.
FlashInfer is tried before it is used: what does not build, or gives other numbers, is left alone, and one line says so.

Shapes: T new tokens, Hq query heads, D head dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.launch import device_kind
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.prompts import PromptAttention, PromptShape, TritonPrompts
from serving.kernels.tuned_tiles import TunedTiles
from serving.streams import recorded, streams_of

log = logging.getLogger(__name__)

TRITON, FLASHINFER = "triton", "flashinfer"
TAKES = (torch.bfloat16, torch.float16)
WORTH = 1.1  # times as quick as Triton's kernel FlashInfer must be
CLOSE = 2e-2  # ‖difference‖ / ‖output‖ of two kernels that round to bfloat16
ROUNDS = 3  # of each kernel, in turn; the quickest counts
LONGEST = 16_384  # tokens of context that are measured at most
EARLIER = 4  # times its new tokens is the context of a chunk that is measured beside a prompt's first
SOURCES = ("prompt_choice.py", "prompt_attention.py", "planes.py", "flashinfer_prompts.py")
SHORT = 3  # tokens of the sequences that a measured step has beside a long one


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptWork:
    """What a worker attends with: `windows` of all its layers, steps of up to `most_tokens` and `longest` contexts."""

    shape: PromptShape
    windows: tuple[int | None, ...]
    most_tokens: int
    longest: int

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(new tokens, tokens of context) of the steps that are measured: a prompt's first chunk, and a later one."""
        longest = min(self.longest, LONGEST)
        tokens = max(2, min(self.most_tokens, longest))
        return [(tokens, tokens), (tokens, max(tokens, min(EARLIER * tokens, longest)))]

    @property
    def key(self) -> tuple[Any, ...]:
        shape = self.shape
        numbers = shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, str(shape.dtype)
        return *numbers, str(self.windows), str(self.cases)


@dataclass(slots=True)
class PromptChoice:
    """What was measured to be quicker, by `PromptWork.key` (serving.kernels.tuned_tiles.Tuner)."""

    configs: list[Any] = field(default_factory=lambda: [TRITON, FLASHINFER])
    cache: dict[tuple[Any, ...], Any] = field(default_factory=dict)


class NotUsed(Exception):
    """Why FlashInfer is not used."""


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


@torch.inference_mode()
def choose_prompts(
    backend: str, work: PromptWork, device: torch.device, clock: Callable[[], float] = perf_counter
) -> PromptAttention:
    """What `backend` (triton, flashinfer, or auto: the quicker one) names, ready for every step of `work`.

    Raises ValueError for flashinfer where it cannot be had.
    """
    if backend == TRITON:
        return TritonPrompts()
    try:
        _refuse(work.shape)
        if backend == FLASHINFER:
            made, told = _tried(work, device), "as asked for"
        else:
            made, told = _quicker(work, device, clock)
    except NotUsed as error:
        if backend == FLASHINFER:
            raise ValueError(f"--attention-backend flashinfer: {error}; choose --attention-backend auto") from error
        log.info("Triton's kernel attends prompts: %s", error)
        return TritonPrompts()
    log.info("FlashInfer attends the prompts of launched steps, %s", told)
    return made


def _refuse(shape: PromptShape) -> None:
    """Raises NotUsed where FlashInfer cannot be."""
    if shape.dtype not in TAKES:
        raise NotUsed(f"FlashInfer takes bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}")
    if find_spec(FLASHINFER) is None:
        raise NotUsed("FlashInfer is not installed (the extra `flashinfer`)")


def _quicker(work: PromptWork, device: torch.device, clock: Callable[[], float]) -> tuple[PromptAttention, str]:
    """FlashInfer, and how much that gains. Raises NotUsed unless it gains enough."""
    choice = PromptChoice()
    kept = TunedTiles({"prompt attention": choice}, _kind(device))
    kept.restore()
    known = choice.cache.get(work.key)
    if known == TRITON:
        raise NotUsed("FlashInfer was measured, and is not quick enough here to be worth it")
    made = _tried(work, device)
    if known is not None:
        return made, "as was measured before"
    with LibraryTrial():
        gain = _gain(made, work, device, clock)
    choice.cache[work.key] = FLASHINFER if gain >= WORTH else TRITON
    kept.keep()
    if gain < WORTH:
        raise NotUsed(f"FlashInfer is {gain:.2f} times as quick here, and worth it from {WORTH} on")
    return made, f"{gain:.2f} times as quick as Triton's kernel"


def _tried(work: PromptWork, device: torch.device) -> PromptAttention:
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
                    raise NotUsed(f"FlashInfer's numbers are {apart:.2g} from those of Triton's kernel")
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
        raise NotUsed(f"FlashInfer does not run here: {type(error).__name__}: {line}") from error


def _gain(made: PromptAttention, work: PromptWork, device: torch.device, clock: Callable[[], float]) -> float:
    """How many times as quick as Triton's kernel, over all cases together."""
    own = theirs = 0.0
    for tokens, context in work.cases:
        sample = PromptSample.of(work.shape, tokens, context, device)
        rounds = [
            [sample.seconds(prompts, work.windows, clock) for prompts in (TritonPrompts(), made)] for _ in range(ROUNDS)
        ]
        own += min(first for first, _ in rounds)
        theirs += min(second for _, second in rounds)
    return own / theirs


def _kind(device: torch.device) -> dict[str, str]:
    """What a measurement holds for."""
    here = Path(__file__).parent
    sources = b"".join((here / name).read_bytes() for name in SOURCES)
    libraries = {"torch": str(torch.__version__), "flashinfer": _version(), "source": sha256(sources).hexdigest()}
    return device_kind(device) | libraries


def _version() -> str:
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "unknown"  # built from its source
