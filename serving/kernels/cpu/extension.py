"""The compiled kernels as functions over torch tensors: loading the library, a team of threads, one call an operation.

It may not know any model. Tensors are on the CPU and contiguous; every function blocks and releases the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from serving.host_memory import HostMemory
from serving.kernels.cpu.build import BuildError, build, cpu_has_amx, find_compiler, prebuilt_path
from serving.kernels.cpu.structures import Finish, Kind, declare, operations
from serving.kernels.cpu.weights import HALF, PANEL, HeadScreen, PackedExperts, PackedLinear, pad

log = logging.getLogger("millrace.kernels")

WEIGHTS_MAPPED = 64 << 20  # bytes of weights that lie in one mapping
SCREENED_AT_ONCE = 1 << 18  # weights of a head, while it is screened: what is made of them stays in the second cache
ROUNDING = 2.0**-22  # of a sum in float32, for each of what it adds: more than that takes off a length
SMALLEST = 2.0**-126  # below it products of bfloat16 may take a weight for 0


def default_threads() -> int:
    """The CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def open_library(progress: Callable[[str], None] = log.info) -> ctypes.CDLL | None:
    """The compiled library, prebuilt or built on first use; None, and a log line saying why, where there is none."""
    prebuilt = prebuilt_path()
    compiler = None if prebuilt.exists() else find_compiler()
    if compiler is None and not prebuilt.exists():
        log.warning("no C++ compiler found: the CPU runs the slower torch kernels")
        return None
    try:
        library = ctypes.CDLL(str(prebuilt if compiler is None else build(compiler, progress)))
    except (BuildError, OSError) as error:
        log.warning("the CPU kernels cannot be built, the CPU runs the slower torch kernels: %s", error)
        return None
    declare(library)
    return library


def forms(library: ctypes.CDLL) -> list[str]:
    """Names of the forms this CPU runs, best first."""
    found: list[str] = []
    while name := library.millrace_form_name(len(found)):
        found.append(name.decode())
    return found


def amx_unused(library: ctypes.CDLL) -> str | None:
    """Why no form uses the AMX that this CPU has; None where it has none, or one does."""
    if "avx512_amx" in forms(library) or not cpu_has_amx():
        return None
    if hasattr(library, "millrace_linear_avx512_amx"):
        return (
            "the system refuses this process its tiles: a seccomp profile may forbid arch_prctl, or a thread's"
            " alternate signal stack be too small for them"
        )
    return "the compiler that made the kernels, or its assembler, does not know it (GCC 11 and Clang 12 do)"


class Kernels:
    """One form of the kernels on a team of threads of its own. Calls from several threads take turns.

    The threads sleep between calls. torch's own OpenMP threads spin after each parallel torch operation, so a process
    that steps with these kernels should give torch one thread.
    """

    def __init__(self, library: ctypes.CDLL, *, threads: int | None = None, form: str | None = None):
        """`form` names one of `forms()`; the best by default. Raises ValueError for one this CPU does not run."""
        known = forms(library)
        if form is not None and form not in known:
            reason = amx_unused(library) if form == "avx512_amx" else None
            told = f"this CPU runs the forms {', '.join(known)}, not {form}"
            raise ValueError(told if reason is None else f"{told}: {reason}")
        self.library = library
        self.form = form or known[0]
        self.threads = threads or default_threads()
        self.context = library.millrace_create(self.threads)
        self._operations = operations(library, self.form)
        self._memory = HostMemory(WEIGHTS_MAPPED)
        self._close = weakref.finalize(self, library.millrace_destroy, self.context)

    def close(self) -> None:
        """Ends the threads. Nothing may be called afterwards."""
        self._close()

    def run(self, operation: str, *arguments: object) -> None:
        """One of `structures.OPERATIONS`. Its arguments must stay alive until it returns."""
        self._operations[operation](self.context, *arguments)

    def pack(
        self, weight: Tensor, *, scale: Tensor | None = None, bias: Tensor | None = None, rotation: int = 0
    ) -> PackedLinear:
        """`weight` [outputs, inputs] in panels, once for many calls.

        `scale` [outputs] belongs to int8 weights and to no others (ValueError). With `rotation` they are weights of
        inputs that were transformed, so many at a time (`int8.linear`).
        """
        kind = Kind.of(weight.dtype)
        if (scale is not None) != (kind is Kind.INT8):
            raise ValueError("int8 weights, and only they, come with one scale per output channel")
        outputs, inputs = weight.shape
        if rotation and (scale is None or inputs % rotation or rotation & (rotation - 1) or rotation < 16):
            raise ValueError(f"{inputs} inputs cannot be transformed {rotation} at a time before they are quantized")
        root = rotation**0.5 or 1.0  # what transforms leave undivided
        padded, words = -(-outputs // PANEL) * PANEL, -(-inputs * weight.itemsize // 4)
        packed = self._memory.take(padded * words * 4).view(torch.int32).view(padded // PANEL, words, PANEL)
        source = weight.contiguous()
        self.library.millrace_pack(source.data_ptr(), outputs, inputs, weight.itemsize, packed.data_ptr())
        return PackedLinear(
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            packed=packed,
            scale=None if scale is None else pad(scale.float().reshape(outputs) / root, padded),
            sums=None if scale is None else pad(weight.sum(dim=1, dtype=torch.int32) * 128, padded),
            bias=None if bias is None else pad(bias.float(), padded),
            rotation=rotation,
        )

    def screen(self, weight: Tensor) -> HeadScreen:
        """What finds the best of a head's scores, of its weights [outputs, inputs] bfloat16."""
        assert weight.dtype is torch.bfloat16, "other heads are read whole"
        outputs, inputs = weight.shape
        padded, at_once = -(-outputs // PANEL) * PANEL, max(SCREENED_AT_ONCE // inputs, 1)
        rounded, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(outputs)
        missed, kept = torch.full((padded,), torch.inf), torch.zeros(padded)
        above, lost = 1 + inputs * ROUNDING, inputs**0.5 * SMALLEST
        for first in range(0, outputs, at_once):
            rows = slice(first, min(first + at_once, outputs))
            exact = weight[rows].float()
            top = exact.abs().amax(dim=1)
            scale[rows] = (top / 127).where(top.isfinite(), 0.0)
            exact = exact.div_(scale[rows, None]).nan_to_num_(0.0, 0.0, 0.0)  # in units of what int8 holds
            held = exact.round().clamp_(-127, 127)
            rounded[rows] = held.to(torch.int8)
            kept[rows] = held.norm(dim=1) * scale[rows] * above
            unheld = exact.sub_(held).norm(dim=1) * scale[rows] * above + kept[rows] * ROUNDING + lost
            missed[rows] = unheld.where(top.isfinite(), torch.inf)
        return HeadScreen(coarse=self.pack(rounded, scale=scale), missed=missed, kept=kept)

    def linear(self, x: Tensor, w: PackedLinear, *, finish: Finish = Finish.STORE, out: Tensor | None = None) -> Tensor:
        """x [M, inputs] float32 to float32 [M, outputs], or [M, padded outputs / 2] with the SwiGLU finish.

        `out` is written, or added to with the ADD finish, which needs it.
        """
        rows = x.shape[0]
        if x.shape[1] != w.inputs or x.dtype != torch.float32:
            raise ValueError(f"x must be float32 [M, {w.inputs}], got {x.dtype} {tuple(x.shape)}")
        columns = w.packed.shape[0] * HALF if finish is Finish.SWIGLU else w.outputs
        if out is None:
            out = torch.empty(rows, columns)
        assert out.shape == (rows, columns) and out.is_contiguous()
        x = x.contiguous()
        self.run("linear", w.as_c(), int(finish), x.data_ptr(), rows, out.data_ptr())
        return out

    def experts(self, x: Tensor, experts: PackedExperts, out: Tensor) -> None:
        """out [T, hidden] += what the experts that each row of x [T, hidden] is routed to make of it; both float32."""
        _check_rows(x, experts, out)
        self.run("experts", experts.as_c(), x.data_ptr(), len(x), out.data_ptr())

    def expert_rows(self, x: Tensor, chosen: Tensor, experts: PackedExperts, out: Tensor) -> None:
        """out [N, hidden] += what expert `chosen` [N] int32 makes of each row of x [N, hidden]; x and out float32.

        Without router or weights: for rows that were routed elsewhere. Raises ValueError for experts there are not.
        """
        _check_rows(x, experts, out)
        chosen = chosen.to(torch.int32).contiguous()
        if len(chosen) != len(x) or (len(x) and not 0 <= chosen.min() <= chosen.max() < len(experts.weights.experts)):
            raise ValueError(f"each of {len(x)} rows needs one of {len(experts.weights.experts)} experts")
        self.run("expert_rows", experts.as_c(), x.data_ptr(), chosen.data_ptr(), len(x), out.data_ptr())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension of x [M, n] float32."""
        x, weight, out = x.contiguous(), weight.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, n = x.shape
        self.run("rms_norm", x.data_ptr(), weight.data_ptr(), rows, n, eps, out.data_ptr())
        return out


def _check_rows(x: Tensor, experts: PackedExperts, out: Tensor) -> None:
    """Raises ValueError for rows the kernels cannot read: they see addresses only."""
    for rows in (x, out):
        if rows.shape != (len(x), experts.hidden) or rows.dtype != torch.float32 or not rows.is_contiguous():
            raise ValueError(f"rows must be contiguous float32 [T, {experts.hidden}], alike in and out")
