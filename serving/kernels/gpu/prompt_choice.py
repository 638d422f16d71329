"""Chooses what attends the prompts of launched steps: Triton's kernel, or FlashInfer where that is quicker here.

Tried and measured once for each device, shape and version, and kept (prompt_verdicts), failures too. What does not
build, or gives other numbers, is left alone, and one line says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch

from serving.kernels.gpu.launch import device_kind
from serving.kernels.gpu.prompt_trial import WORTH, LibraryTrial, NotUsed, PromptWork, gains, least_worth, tried
from serving.kernels.gpu.prompt_verdicts import LibraryVerdict, Verdicts
from serving.kernels.gpu.prompts import LargeSteps, PromptAttention, PromptShape, TritonPrompts

log = logging.getLogger(__name__)

TRITON, FLASHINFER = "triton", "flashinfer"
TAKES = (torch.bfloat16, torch.float16)
SOURCES = (
    "prompt_choice.py",
    "prompt_trial.py",
    "prompt_attention.py",
    "prompts.py",
    "planes.py",
    "flashinfer_prompts.py",
)
MOST_CRASHES = 2  # of those that tried it, in a row: one may have been ended by somebody, or for want of memory


@torch.inference_mode()
def choose_prompts(
    backend: str, work: PromptWork, device: torch.device, clock: Callable[[], float] = perf_counter
) -> PromptAttention:
    """What `backend` (triton, flashinfer, or auto: the quicker one) names, ready for every step of `work`.

    Raises ValueError for flashinfer where it cannot be had.
    """
    if backend == TRITON:
        return TritonPrompts()
    verdicts = Verdicts.of(_kind(device))
    try:
        _refuse(work.shape)
        if backend == FLASHINFER:
            made, told = _demanded(work, device, verdicts), ", as asked for"
        else:
            made, told = _quicker(work, device, verdicts, clock)
    except NotUsed as error:
        if backend == FLASHINFER:
            raise ValueError(f"--attention-backend flashinfer: {error}; choose --attention-backend auto") from error
        log.info("Triton's kernel attends prompts: %s", error)
        return TritonPrompts()
    log.info("FlashInfer attends the prompts of launched steps%s", told)
    return made


def _refuse(shape: PromptShape) -> None:
    """Raises NotUsed where FlashInfer cannot be."""
    if shape.dtype not in TAKES:
        raise NotUsed(f"FlashInfer takes bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}")
    if find_spec(FLASHINFER) is None:
        raise NotUsed("FlashInfer is not installed (the extra `flashinfer`)")


def _demanded(work: PromptWork, device: torch.device, verdicts: Verdicts) -> PromptAttention:
    """FlashInfer. Where it has failed before, and does not now, it is measured again when nobody demands it."""
    made = tried(work, device)
    with verdicts.held() as kept:
        known = kept.get(str(work.key))
        if known is not None and known.failed:
            del kept[str(work.key)]
        verdicts.forget_crashes(str(work.key))
    return made


def _quicker(
    work: PromptWork, device: torch.device, verdicts: Verdicts, clock: Callable[[], float]
) -> tuple[PromptAttention, str]:
    """FlashInfer for the steps where it gains enough, and how much. Raises NotUsed where that is none."""
    name, made = str(work.key), None
    with ExitStack() as trying:
        with verdicts.held() as kept:
            known = _known(kept, name, verdicts)
            if known is None or known.least is not None:
                trying.enter_context(verdicts.trying(name))
            if known is None:
                with _failures_in(kept, name):
                    made = tried(work, device)
                    with LibraryTrial():
                        kept[name] = known = _judged(gains(made, work, device, clock))
        if known.least is None:
            raise NotUsed(known.reason)
        if made is None:
            made = _tried_again(work, device, verdicts)
    verdicts.forget_crashes(name)
    return LargeSteps(made, known.least), f" of {known.least} tokens and more, {known.reason}"


def _known(kept: dict[str, LibraryVerdict], name: str, verdicts: Verdicts) -> LibraryVerdict | None:
    """What was found before; a library that ends processes has failed. Raises NotUsed where it has."""
    if verdicts.crashes(name) >= MOST_CRASHES:
        reason = f"FlashInfer does not run here: {MOST_CRASHES} times processes have ended while they tried it"
        kept[name] = LibraryVerdict(None, reason, failed=True)
        verdicts.forget_crashes(name)
    known = kept.get(name)
    if known is not None and known.failed:
        again = f"--attention-backend flashinfer tries it again, and so does a start without {verdicts.path}"
        raise NotUsed(f"{known.reason}, when it was tried before; {again}")
    return known


def _tried_again(work: PromptWork, device: torch.device, verdicts: Verdicts) -> PromptAttention:
    """FlashInfer, which was found to be worth it: other processes may try it at the same time."""
    try:
        return tried(work, device)
    except NotUsed as error:
        with verdicts.held() as kept, _failures_in(kept, str(work.key)):
            raise error


@contextmanager
def _failures_in(kept: dict[str, LibraryVerdict], name: str) -> Iterator[None]:
    """What would fail again is kept."""
    try:
        yield
    except NotUsed as error:
        if error.lasting:
            kept[name] = LibraryVerdict(None, str(error), failed=True)
        raise


def _judged(gained: Mapping[int, float]) -> LibraryVerdict:
    """`gained`: how many times as quick it is, by the new tokens of a step."""
    least, largest = least_worth(gained), gained[max(gained)]
    if least is None:
        return LibraryVerdict(
            None, f"FlashInfer was measured to be {largest:.2f} times as quick here, worth it from {WORTH} on"
        )
    return LibraryVerdict(least, f"measured to be {largest:.2f} times as quick as Triton's kernel in the largest")


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
