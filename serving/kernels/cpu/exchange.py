"""The functions of exchange.h for ctypes: rows of experts between the ranks of one host, over shared segments.

It may not know where the segments come from. Every function blocks and releases the GIL.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p

REASONS = {
    1: "its process has ended",
    2: "it has not answered within the deadline",
    3: "it has left the group",
    4: "what it sent makes no sense",
}
"""What `Loss.reason` means."""


def _structure(name: str, number: type[c_int32 | c_int64], fields: str) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": [(field, number) for field in fields.split()]})


Shape = _structure("Shape", c_int32, "ranks rank slots top_k hidden max_tokens wire back")
Traffic = _structure("Traffic", c_int64, "dispatches rows dispatch_bytes routing_bytes combine_bytes uncached_sums")
Loss = _structure("Loss", c_int32, "rank reason")

_ADDRESS = c_void_p
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "wide": (c_int32, []),
    "bytes": (c_int64, [POINTER(Shape)]),
    "create": (c_void_p, [POINTER(Shape), POINTER(c_void_p), POINTER(c_int32), POINTER(c_int32), *3 * [c_int64]]),
    "destroy": (None, [c_void_p]),
    "leave": (None, [c_void_p]),
    "begin_dispatch": (c_int64, [_ADDRESS, _ADDRESS, _ADDRESS, c_int32, c_int64, _ADDRESS]),
    "finish_dispatch": (c_int64, [_ADDRESS, _ADDRESS, _ADDRESS]),
    "portion": (c_int64, [POINTER(Shape)]),
    "rows": (c_void_p, [_ADDRESS, c_int32]),
    "scales": (c_void_p, [_ADDRESS, c_int32]),
    "gather": (c_int64, [_ADDRESS, c_int32, c_int32, _ADDRESS, _ADDRESS, POINTER(c_int32)]),
    "announce": (None, [_ADDRESS, c_int32]),
    "agreed": (c_int32, [_ADDRESS]),
    "results": (c_void_p, [_ADDRESS, c_int32]),
    "begin_combine": (c_int64, [_ADDRESS, _ADDRESS, c_int32]),
    "finish_combine": (c_int64, [_ADDRESS, _ADDRESS, _ADDRESS]),
    "traffic": (POINTER(Traffic), [c_void_p]),
    "loss": (POINTER(Loss), [c_void_p]),
}


class ExchangeFunctions:
    """`millrace_exchange_*` of the compiled library, by their last names."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"millrace_exchange_{name}")
            function.restype, function.argtypes = result, arguments
        self.wide = library.millrace_exchange_wide
        self.bytes = library.millrace_exchange_bytes
        self.create = library.millrace_exchange_create
        self.destroy = library.millrace_exchange_destroy
        self.leave = library.millrace_exchange_leave
        self.begin_dispatch = library.millrace_exchange_begin_dispatch
        self.finish_dispatch = library.millrace_exchange_finish_dispatch
        self.portion = library.millrace_exchange_portion
        self.rows = library.millrace_exchange_rows
        self.scales = library.millrace_exchange_scales
        self.gather = library.millrace_exchange_gather
        self.announce = library.millrace_exchange_announce
        self.agreed = library.millrace_exchange_agreed
        self.results = library.millrace_exchange_results
        self.begin_combine = library.millrace_exchange_begin_combine
        self.finish_combine = library.millrace_exchange_finish_combine
        self.traffic = library.millrace_exchange_traffic
        self.loss = library.millrace_exchange_loss
