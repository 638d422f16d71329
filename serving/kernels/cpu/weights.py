"""Weights of linear layers in the panels the kernels stream. It knows the layout, not who multiplies by it."""

from __future__ import annotations

from ctypes import Structure, addressof
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.kernels.cpu.structures import STRUCTURES, Kind
from serving.kernels.layer_weights import ExpertSpread, MlpWeights, MoeWeights

PANEL = 32  # output channels a panel
HALF = PANEL // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """y [M, outputs] = x [M, inputs] · Wᵀ + bias, with W int8 (and a scale per output channel), bfloat16 or float32.

    int8 activations are quantized per token when they meet it: q = round(127 x / max|x|), after Hadamard transforms
    of each `rotation` inputs where the weights are such of transformed inputs.
    """

    kind: Kind
    outputs: int
    inputs: int
    packed: Tensor  # [panels, words, 32] int32
    scale: Tensor | None  # [padded outputs] float32, int8 only
    sums: Tensor | None  # [padded outputs] int32, 128 * sum of each channel's weights, int8 only
    bias: Tensor | None  # [padded outputs] float32
    rotation: int = 0  # int8 only

    def as_c(self) -> Structure:
        """`Linear` of abi.h."""
        arrays = {name: address(getattr(self, name)) for name in ("packed", "scale", "bias", "sums")}
        shape = {"outputs": self.outputs, "inputs": self.inputs, "rotation": self.rotation}
        return STRUCTURES["Linear"](kind=self.kind, **shape, **arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadScreen:
    """What finds the best tokens of a bfloat16 head in half of its bytes, without changing one: see screen.h.

    Of each output channel's weights, `coarse` has what int8 holds of them; lengths of vectors, float32 [padded
    outputs]: `missed` of the rest, infinite for padding, and `kept` of what it holds.
    """

    coarse: PackedLinear
    missed: Tensor
    kept: Tensor

    def as_c(self) -> Structure:
        """`Screen` of abi.h."""
        return STRUCTURES["Screen"](self.coarse.as_c(), self.missed.data_ptr(), self.kept.data_ptr())


class PackedExperts:
    """A layer's experts as the kernels walk them: the weights, and the tables of their addresses."""

    def __init__(self, weights: MoeWeights[PackedLinear]) -> None:
        """Raises ValueError for experts that do not fit each other, the router or the number a token takes."""
        router, first, *others = weights.router, *weights.experts
        shapes = {_shape(mlp) for mlp in (first, *others)}
        if len(shapes) != 1:
            raise ValueError("all experts of a layer must be of one shape and of one kind of weights")
        hidden, width = first.gate_up.inputs, first.down.inputs
        count = len(weights.experts if weights.spread is None else weights.spread.copies)
        if router.inputs != hidden or first.down.outputs != hidden or router.outputs != count:
            raise ValueError(f"{count} experts of {hidden} inputs do not fit their router")
        if any(linear.rotation for mlp in weights.experts for linear in (mlp.gate_up, mlp.down)):
            raise ValueError("the fused step transforms no inputs of experts")
        if first.gate_up.outputs != -(-width // HALF) * PANEL:
            raise ValueError("`gate_up` of an expert is packed from interleave(gate, up), as wide as `down` reads")
        if not 0 < weights.top_k <= count:
            raise ValueError(f"a token cannot take {weights.top_k} of {count} experts")
        self.weights, self.hidden, self.inner = weights, hidden, width
        table = STRUCTURES["Linear"] * len(weights.experts)
        self._gate_up = table(*(mlp.gate_up.as_c() for mlp in weights.experts))
        self._down = table(*(mlp.down.as_c() for mlp in weights.experts))

    def as_c(self) -> Structure:
        """`Experts` of abi.h; valid while this object lives."""
        return STRUCTURES["Experts"](
            count=len(self.weights.experts),
            top_k=self.weights.top_k,
            normalized=self.weights.normalized,
            router=self.weights.router.as_c(),
            gate_up=addressof(self._gate_up),
            down=addressof(self._down),
            spread=STRUCTURES["Spread"]() if self.weights.spread is None else _spread(self.weights.spread),
        )


def _spread(spread: ExpertSpread) -> Structure:
    assert spread.copies.dtype is spread.physical.dtype is torch.int32 and spread.physical.is_contiguous()
    assert spread.taken is None or (spread.taken.dtype is torch.int64 and spread.taken.is_contiguous())
    return STRUCTURES["Spread"](
        exchange=spread.exchange,
        copies=address(spread.copies),
        physical=address(spread.physical),
        taken=address(spread.taken),
        most_copies=spread.physical.shape[1],
    )


def _shape(mlp: MlpWeights[PackedLinear]) -> tuple[object, ...]:
    return tuple((linear.kind, linear.outputs, linear.inputs) for linear in (mlp.gate_up, mlp.down))


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
