"""Weights of linear layers in the panels the kernels stream. It knows the layout, not who multiplies by it."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.kernels.cpu.structures import STRUCTURES, Kind

PANEL = 32  # output channels a panel
HALF = PANEL // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """y [M, outputs] = x [M, inputs] · Wᵀ + bias, with W int8 (and a scale per output channel), bfloat16 or float32.

    int8 activations are quantized per token when they meet it: q = round(127 x / max|x|).
    """

    kind: Kind
    outputs: int
    inputs: int
    packed: Tensor  # [panels, words, 32] int32
    scale: Tensor | None  # [padded outputs] float32, int8 only
    sums: Tensor | None  # [padded outputs] int32, 128 * sum of each channel's weights, int8 only
    bias: Tensor | None  # [padded outputs] float32

    def as_c(self) -> Structure:
        """`Linear` of abi.h."""
        arrays = {name: address(getattr(self, name)) for name in ("packed", "scale", "bias", "sums")}
        return STRUCTURES["Linear"](kind=self.kind, outputs=self.outputs, inputs=self.inputs, **arrays)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up [n, ...] as the SwiGLU finish wants them: 16 of gate, 16 of up, ..., zeros at the end."""
    missing = -gate.shape[0] % HALF
    pair = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in (gate, up)]
    return torch.stack([part.view(-1, HALF, *part.shape[1:]) for part in pair], dim=1).flatten(0, 2)


def pad(vector: Tensor, length: int) -> Tensor:
    """The vector with zeros behind it."""
    return F.pad(vector, (0, length - vector.shape[0])).contiguous()
