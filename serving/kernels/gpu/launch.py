"""What all Triton kernels share: the decorator, element types, and where they can run. It knows no operation.

Kernels run on a CUDA device, or on the CPU when `TRITON_INTERPRET=1` was set before this was first imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.interpreted import let_scalars_bound_loops

INTERPRETED = bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    let_scalars_bound_loops()

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

MULTIPROCESSORS_UNKNOWN = 132  # what splits are chosen for where there is no device to ask: the interpreter


def kernel_of_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, with a type that checkers can follow, of a kernel that is the same whatever these arguments are.

    Else it would be compiled anew, in the middle of serving, for a 1 and for multiples of 16. These are the numbers
    that differ from step to step.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(numbers))

    return decorate


kernel = kernel_of_any()  # one that may be compiled anew for any of its arguments


def runs_on(device: torch.device) -> bool:
    """True if kernels can run on tensors of this device."""
    return device.type == "cuda" or INTERPRETED


def require(condition: bool, message: str) -> None:
    """Raises ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_device(*tensors: Tensor) -> None:
    """Raises ValueError unless all tensors are on one device that runs kernels."""
    device = tensors[0].device
    require(runs_on(device), f"Triton kernels run on CUDA devices, not on {device}")
    require(all(tensor.device == device for tensor in tensors), "all tensors must be on the same device")


def require_float(name: str, tensor: Tensor) -> None:
    require(tensor.dtype in FLOATS, f"{name} must be float32, bfloat16 or float16, not {tensor.dtype}")


def dot_type(dtype: torch.dtype) -> Any:
    """The element type `tl.dot` multiplies in. The interpreter knows no bfloat16 products: it gets their float32."""
    if dtype is torch.bfloat16:
        return tl.float32 if INTERPRETED else tl.bfloat16
    return tl.float16 if dtype is torch.float16 else tl.float32


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n ≥ 1."""
    return 1 << (n - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS_UNKNOWN
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def device_kind(device: torch.device) -> dict[str, str]:
    """What measurements of kernels on this device hold for, but for their source: the device, and Triton."""
    named = {"device": device.type, "capability": "", "triton": str(triton.__version__)}
    if device.type != "cuda":
        return named
    found = torch.cuda.get_device_properties(device)
    return named | {"device": found.name, "capability": f"{found.major}.{found.minor}"}
