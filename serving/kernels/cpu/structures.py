"""The C structures of abi.h and orders.h for ctypes, read from those headers, and the signatures of its functions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch


class Kind(IntEnum):
    """What a stored number is, and with it which products it takes part in."""

    INT8 = 1
    BF16 = 2
    F32 = 3

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @staticmethod
    def of(dtype: torch.dtype) -> Kind:
        """Raises ValueError for a dtype the kernels do not know."""
        kind = _KINDS.get(dtype)
        if kind is None:
            raise ValueError(f"the CPU kernels know int8, bfloat16 and float32, not {dtype}")
        return kind


_DTYPES = {Kind.INT8: torch.int8, Kind.BF16: torch.bfloat16, Kind.F32: torch.float32}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}


class Finish(IntEnum):
    """What a linear layer does with its outputs."""

    STORE = 0
    ADD = 1  # to what is there
    SWIGLU = 2  # silu(gate) * up over panels that interleave 16 channels of each


def _read_structures() -> dict[str, type[Structure]]:
    """The structs of abi.h and orders.h by name, each field a line `type name;`. A pointer is taken as an address."""
    numbers: dict[str, type[ctypes._SimpleCData[Any]]] = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float}
    known: dict[str, type[Structure]] = {}
    for header in ("abi.h", "orders.h"):
        source = re.sub(r"//.*", "", (Path(__file__).parent / header).read_text(encoding="utf-8"))
        for struct, body in re.findall(r"struct (\w+) \{(.*?)\};", source, re.DOTALL):
            if struct == "Order":  # packed with `struct`: see ORDER in sampling.py
                continue
            fields = [line.split() for line in body.split(";") if line.strip()]
            types = [c_void_p if "*" in field[-2] else (numbers | known)[field[-2]] for field in fields]
            members = list(zip((field[-1] for field in fields), types, strict=True))
            known[struct] = type(struct, (Structure,), {"_fields_": members})
    return known


STRUCTURES = _read_structures()
_LAYER: list[object] = [POINTER(STRUCTURES["Model"]), c_int, POINTER(STRUCTURES["Batch"])]
OPERATIONS: dict[str, list[object]] = {
    "linear": [POINTER(STRUCTURES["Linear"]), c_int, c_void_p, c_long, c_void_p],
    "experts": [POINTER(STRUCTURES["Experts"]), c_void_p, c_long, c_void_p],
    "expert_rows": [POINTER(STRUCTURES["Experts"]), c_void_p, c_void_p, c_long, c_void_p],
    "grouped": [POINTER(STRUCTURES["Grouped"])],
    "rms_norm": [c_void_p, c_void_p, c_long, c_long, c_float, c_void_p],
    "rotate_and_write": [*_LAYER, c_void_p, c_void_p],
    "attention": [*_LAYER, c_void_p, c_void_p],
    "attend_range": [*_LAYER, POINTER(STRUCTURES["KVRange"]), c_void_p],
    "step": [POINTER(STRUCTURES["Model"]), POINTER(STRUCTURES["Batch"]), POINTER(STRUCTURES["Results"])],
    "sample": [POINTER(STRUCTURES["Samples"])],
    "logprobs": [POINTER(STRUCTURES["Logprobs"])],
}
"""What the operations of a form take after the context; see KERNEL in form.cpp."""


def declare(library: ctypes.CDLL) -> None:
    """Gives the functions of exports.cpp their C signatures."""
    library.millrace_form_name.restype, library.millrace_form_name.argtypes = c_char_p, [c_int]
    library.millrace_create.restype, library.millrace_create.argtypes = c_void_p, [c_int]
    library.millrace_destroy.restype, library.millrace_destroy.argtypes = None, [c_void_p]
    library.millrace_pack.restype = None
    library.millrace_pack.argtypes = [c_void_p, c_long, c_long, c_int, c_void_p]


def operations(library: ctypes.CDLL, form: str) -> dict[str, Callable[..., None]]:
    """A form's functions by name. Each takes the context first."""
    found = {name: getattr(library, f"millrace_{name}_{form}") for name in OPERATIONS}
    for name, function in found.items():
        function.restype, function.argtypes = None, [c_void_p, *OPERATIONS[name]]
    return found
