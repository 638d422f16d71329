"""The C structures of abi.h and orders.h as ctypes sees them, and the kinds of numbers they name: a mirror, no more."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import ClassVar

import torch


class Kind(IntEnum):
    """What a stored number is, and with it which products it takes part in."""

    INT8 = 1
    BF16 = 2
    F32 = 3

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def item_bytes(self) -> int:
        return _DTYPES[self].itemsize

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
    SWIGLU = 2  # silu(barrier) * up over panels that interleave 16 channels of each


class LinearC(Structure):
    _fields_: ClassVar = [
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("unused", c_int32),
        ("packed", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("sums", c_void_p),
    ]


class KvPlanesC(Structure):
    _fields_: ClassVar = [
        ("kind", c_int32),
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("row_bytes", c_int32),
        ("scale_stride", c_int32),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
    ]


class BatchC(Structure):
    _fields_: ClassVar = [
        ("tokens_count", c_int32),
        ("sequences", c_int32),
        ("table_width", c_int32),
        ("logits_count", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logits_rows", c_void_p),
    ]


class KVRangeC(Structure):
    _fields_: ClassVar = [
        ("kv", KvPlanesC),
        ("chunks", c_int32),
        ("begins", c_int32),
        ("state", c_void_p),
        ("out", c_void_p),
    ]


class LayerC(Structure):
    _fields_: ClassVar = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", LinearC),
        ("o", LinearC),
        ("gate_up", LinearC),
        ("down", LinearC),
        ("kv", KvPlanesC),
        ("window", c_int32),
        ("unused", c_int32),
    ]


class ModelC(Structure):
    _fields_: ClassVar = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("rotary_dim", c_int32),
        ("intermediate", c_int32),
        ("embedding_kind", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("embedding_scale", c_float),
        ("unused", c_int32),
        ("layer", POINTER(LayerC)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", LinearC),
    ]


class ResultsC(Structure):
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("greedy", c_void_p),
        ("hidden", c_void_p),
        ("progress", c_void_p),
        ("barrier", c_void_p),
    ]


class DrawsC(Structure):
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", c_int32),
        ("vocab", c_int32),
        ("order", c_char_p),
        ("ids", c_void_p),
        ("changes", c_void_p),
        ("tokens", c_void_p),
    ]


class LogprobsC(Structure):
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", c_int32),
        ("vocab", c_int32),
        ("best", c_int32),
        ("unused", c_int32),
        ("chosen", c_void_p),
        ("whole", c_void_p),
        ("of_chosen", c_void_p),
        ("ids", c_void_p),
        ("best_logits", c_void_p),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Gives the library's functions their C signatures."""
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    signatures: dict[str, tuple[object, list[object]]] = {
        "millrace_form_name": (ctypes.c_char_p, [integer]),
        "millrace_create": (pointer, [ctypes.c_char_p, integer, integer]),
        "millrace_destroy": (None, [pointer]),
        "millrace_pack": (None, [pointer, long, long, integer, pointer]),
        "millrace_linear": (None, [pointer, POINTER(LinearC), integer, pointer, long, pointer]),
        "millrace_rms_norm": (None, [pointer, pointer, pointer, long, long, c_float, pointer]),
        "millrace_rotate_and_write": (None, [pointer, POINTER(ModelC), integer, POINTER(BatchC), pointer, pointer]),
        "millrace_attention": (None, [pointer, POINTER(ModelC), integer, POINTER(BatchC), pointer, pointer]),
        "millrace_attend_range": (
            None,
            [pointer, POINTER(ModelC), integer, POINTER(BatchC), POINTER(KVRangeC), pointer],
        ),
        "millrace_step": (None, [pointer, POINTER(ModelC), POINTER(BatchC), POINTER(ResultsC)]),
        "millrace_draw": (None, [pointer, POINTER(DrawsC)]),
        "millrace_logprobs": (None, [pointer, POINTER(LogprobsC)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
