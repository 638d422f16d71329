"""INT8 linear layers of several experts in one call, over rows that lie anywhere and weights that stay where they are.

To the bit what `serving.kernels.int8` computes of each expert's rows. It may not know any model.

Shapes: N rows, slot after slot, S slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.kernels.cpu.extension import Kernels
from serving.kernels.cpu.structures import STRUCTURES, Kind

OUT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """int8 rows [N, inputs], contiguous each, by their addresses int64 [N], with a float32 scale [N] each.

    Whoever has made it says how long rows lie there.
    """

    addresses: Tensor
    scale: Tensor
    memory: Tensor | None = None  # which lives as long as this, where it would not by itself

    @classmethod
    def of(cls, values: Tensor, scale: Tensor) -> PlacedRows:
        """Rows that lie one after the other."""
        assert values.dtype is torch.int8 and values.is_contiguous()
        first, size = values.data_ptr(), values.shape[1]
        return cls(torch.arange(first, first + len(values) * size, size), scale.contiguous(), values)


class GroupedLinear:
    """One layer of each slot's expert, all of one shape, whose tensors it reads where they are, and keeps alive."""

    def __init__(self, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        """Weights int8 [outputs, inputs], scales float32 [outputs], biases [outputs]. Raises ValueError for others."""
        self.outputs, self.inputs = weights[0].shape
        self._kept = (*weights, *scales, *(bias for bias in biases if bias is not None))
        kinds = {None if bias is None else bias.dtype for bias in biases}
        whole = all(one.is_contiguous() and one.device.type == "cpu" for one in self._kept)
        if not whole or len(kinds) != 1 or not kinds <= {None, *OUT_DTYPES}:
            raise ValueError("layers of several slots are contiguous, in host memory, with biases of one type or none")
        alike = {(one.dtype, one.shape) for one in weights} == {(torch.int8, weights[0].shape)}
        if not alike or {(one.dtype, one.shape) for one in scales} != {(torch.float32, weights[0].shape[:1])}:
            raise ValueError("layers of several slots are INT8, and of one shape")
        bias = biases[0]
        self._bias_kind = 0 if bias is None else Kind.of(bias.dtype)
        self._tables = [_table(weights), _table(scales), _table([one for one in biases if one is not None])]

    def __call__(self, kernels: Kernels, x: Tensor | PlacedRows, counts: Tensor, out: Tensor) -> Tensor:
        """`out` [N, outputs], bfloat16 or float32, of the rows x: `counts` int32 [S] of them are for each slot."""
        rows, kind = (len(x.addresses), Kind.INT8) if isinstance(x, PlacedRows) else (len(x), Kind.of(x.dtype))
        assert counts.dtype is torch.int32 and int(counts.sum()) == rows, counts
        assert out.shape == (rows, self.outputs) and out.dtype in OUT_DTYPES and out.is_contiguous()
        if not rows:
            return out
        if isinstance(x, PlacedRows):
            given = {"places": x.addresses.data_ptr(), "row_scale": x.scale.data_ptr()}
            assert x.addresses.dtype is torch.int64 and x.scale.dtype is torch.float32
        else:
            assert x.shape[1] == self.inputs and x.is_contiguous()
            given = {"x": x.data_ptr()}
        weight, scale, bias = (ctypes.addressof(table) for table in self._tables)
        shape = {"slots": len(counts), "inputs": self.inputs, "outputs": self.outputs, "rows_count": rows}
        kinds = {"x_kind": kind, "out_kind": Kind.of(out.dtype), "bias_kind": self._bias_kind}
        tables = {"weight": weight, "scale": scale, "bias": bias, "counts": counts.data_ptr(), "out": out.data_ptr()}
        kernels.run("grouped", STRUCTURES["Grouped"](**shape, **kinds, **tables, **given))
        return out


def _table(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Their addresses; there is always one, so that the table has an address itself."""
    return (ctypes.c_void_p * max(1, len(tensors)))(*(tensor.data_ptr() for tensor in tensors))
