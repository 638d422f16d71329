"""The C structures of abi.h and orders.h for ctypes, read from those headers, and the C signatures of exports.cpp."""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
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
        for kind, known in _DTYPES.items():
            if known == dtype:
                return kind
        raise ValueError(f"the CPU kernels know int8, bfloat16 and float32, not {dtype}")


_DTYPES = {Kind.INT8: torch.int8, Kind.BF16: torch.bfloat16, Kind.F32: torch.float32}


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


_STRUCTURES = _read_structures()
LinearC = _STRUCTURES["Linear"]
KvPlanesC = _STRUCTURES["KvPlanes"]
BatchC = _STRUCTURES["Batch"]
KVRangeC = _STRUCTURES["KVRange"]
LayerC = _STRUCTURES["Layer"]
ModelC = _STRUCTURES["Model"]
ResultsC = _STRUCTURES["Results"]
SamplesC = _STRUCTURES["Samples"]
LogprobsC = _STRUCTURES["Logprobs"]


def declare(library: ctypes.CDLL) -> None:
    """Gives the library's functions their C signatures."""
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    layer_call = [pointer, POINTER(ModelC), integer, POINTER(BatchC)]
    signatures: dict[str, tuple[object, list[object]]] = {
        "millrace_form_name": (ctypes.c_char_p, [integer]),
        "millrace_create": (pointer, [ctypes.c_char_p, integer]),
        "millrace_destroy": (None, [pointer]),
        "millrace_pack": (None, [pointer, long, long, integer, pointer]),
        "millrace_linear": (None, [pointer, POINTER(LinearC), integer, pointer, long, pointer]),
        "millrace_rms_norm": (None, [pointer, pointer, pointer, long, long, c_float, pointer]),
        "millrace_rotate_and_write": (None, [*layer_call, pointer, pointer]),
        "millrace_attention": (None, [*layer_call, pointer, pointer]),
        "millrace_attend_range": (None, [*layer_call, POINTER(KVRangeC), pointer]),
        "millrace_step": (None, [pointer, POINTER(ModelC), POINTER(BatchC), POINTER(ResultsC)]),
        "millrace_sample": (None, [pointer, POINTER(SamplesC)]),
        "millrace_logprobs": (None, [pointer, POINTER(LogprobsC)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
