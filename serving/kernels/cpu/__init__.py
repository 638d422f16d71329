"""CPU kernels in C++: INT8, bfloat16 and float32 linear layers, paged attention, whole decoder steps, and sampling.

They are compiled on first use and cached; where that cannot be, `load` says so once and returns None.

How a result stays the same whatever runs beside it. Each output of a linear layer is one accumulator over the inputs
in order (exact integers for INT8), wherever the tile, the panel or the block of rows is cut. A row's norm,
quantization and rotation are functions of that row. Attention takes keys in chunks of 128 counted from position 0,
each chunk's softmax on its own, and joins the chunks in order; prefill and decode run the same code with more or
fewer rows, and splitting a long context over threads happens at chunk borders and joins in the same order.
Contraction of a * b + c is off, so one formula rounds alike wherever the compiler inlines it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

from serving.kernels.cpu.decoder import CpuDecoder, DecoderShape, KvPlanes, StepOutput
from serving.kernels.cpu.extension import Kernels, amx_unused, default_threads, forms, open_library
from serving.kernels.cpu.form_choice import quickest_form
from serving.kernels.cpu.sampling import ORDER, Logprobs, logprobs, sample
from serving.kernels.cpu.structures import Finish, Kind
from serving.kernels.cpu.weights import HeadScreen, PackedExperts, PackedLinear, interleave

__all__ = [
    "ORDER",
    "CpuDecoder",
    "DecoderShape",
    "Finish",
    "HeadScreen",
    "Kernels",
    "Kind",
    "KvPlanes",
    "Logprobs",
    "PackedExperts",
    "PackedLinear",
    "StepOutput",
    "amx_unused",
    "default_threads",
    "forms",
    "interleave",
    "load",
    "logprobs",
    "sample",
    "shared_library",
]

_log = logging.getLogger("millrace.kernels")


_opened: dict[str, ctypes.CDLL | None] = {}


def shared_library(progress: Callable[[str], None] = _log.info) -> ctypes.CDLL | None:
    """The library, opened (and built, with a line to `progress`) once a process; None where it cannot be had."""
    if "library" not in _opened:
        _opened["library"] = open_library(progress)
    return _opened["library"]


def load(
    *,
    threads: int | None = None,
    form: str | None = None,
    measured: bool = False,
    progress: Callable[[str], None] = _log.info,
) -> Kernels | None:
    """Kernels on a team of `threads` (default: the CPUs this process may use), or None where they cannot be had.

    Without a `form` they are of the best that the CPU has by its flags, or of the quickest one as `measured`.
    `progress` receives a line before and after a build. Raises ValueError for a form this CPU does not run.
    """
    library = shared_library(progress)
    if library is None:
        return None
    if form is None and measured:
        form = quickest_form(library, threads or default_threads())
    return Kernels(library, threads=threads, form=form)
