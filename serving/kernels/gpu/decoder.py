"""A decoder of the Llama shape as Triton launches and torch's own matrix products, over weights handed to it.

Nothing here waits for the device. It knows tensors and batches, and nothing of models, schedules or graphs.

Shapes: T new tokens of the step, H hidden width, N outputs, K inputs, D head dimensions, P rotated pairs, R rows whose
logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.attention import paged_attention
from serving.kernels.gpu.linear import int8_linear, tune
from serving.kernels.gpu.mixture import ExpertMixture
from serving.kernels.gpu.prompts import PromptAttention, TritonPrompts
from serving.kernels.gpu.rotary import rope_write_kv
from serving.kernels.gpu.rows import (
    Quantized,
    add_rms_norm,
    quantize,
    silu_mul,
)
from serving.kernels.gpu.tiles import tuned_tiles
from serving.kernels.layer_weights import LayerWeights, LinearWeights, MlpWeights

Activation = Tensor | Quantized
Written = Callable[[int], None]


class StepRanks(Protocol):
    """The other ranks of a model of which each holds some heads, some of the MLPs' width and some of the vocabulary.

    Or, where it `shares_rows`, each has some rows of a step, attends with some heads, and holds some experts.

    All ranks compute the same batches in the same order. Nothing here waits for the device.

    Shapes: t rows of this rank, or T; W outputs of `qkv` for this rank's heads, A inputs of `o`.
    """

    shares_rows: bool

    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens [T] → the rows of this rank [t, H]."""
        ...

    def by_heads(self, qkv: Tensor) -> Tensor:
        """What `qkv` has made of this rank's rows → its heads of all rows [T, W]."""
        ...

    def by_rows(self, attended: Tensor) -> Tensor:
        """Of all rows what this rank's heads have attended to → its rows [t, A] as `o` takes them."""
        ...

    def summed(self, branch_TH: Tensor) -> Tensor:
        """The sum over ranks [t, H] of what each makes of a row by its part of the weights."""
        ...

    def all_rows(self, own_TH: Tensor) -> Tensor:
        """Of this rank's rows, all rows [T, H]."""
        ...

    def gathered(self, own_RV: Tensor) -> Tensor:
        """Of this rank's logits, all tokens' [R, V]."""
        ...

    def reserve(self, rows: int) -> None:
        """Make room, now, for steps of up to so many rows."""

    def check(self) -> None:
        """Raises what all of these do once a rank is lost."""


@dataclass(frozen=True, kw_only=True)
class TritonDecoder:
    """Computes one step at a time over `planes`: k and v of each layer, with int8 also their scales.

    `head` may be of a type of its own, which the logits are then computed in. `rotation` [2, positions, P] float32
    holds cos and sin of each position's angles; a batch with other angles passes them to `logits`. With `ranks` weights
    are this rank's shares, of floats where ranks sum, and a bias of what is summed is one rank's alone; no batch has a
    barrier.
    """

    embedding: Tensor
    layers: Sequence[LayerWeights[LinearWeights]]
    final_norm: Tensor
    head: LinearWeights
    eps: float
    head_dim: int
    rotation: Tensor  # [2, positions, P]
    planes: Sequence[tuple[Tensor, ...]]
    prompts: PromptAttention = field(default_factory=TritonPrompts)
    ranks: StepRanks | None = None
    mixtures: Mapping[int, ExpertMixture] = field(default_factory=dict)  # of the layers with experts in place of an MLP

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.planes)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def over(self, planes: Sequence[tuple[Tensor, ...]]) -> TritonDecoder:
        """The same decoder, its weights shared, over other KV planes."""
        return replace(self, planes=planes)

    def logits(
        self, batch: RaggedBatch, *, angles: tuple[Tensor, Tensor] | None = None, written: Written | None = None
    ) -> Tensor:
        """Scores [R, V] float32 for `batch.logits_rows`; the batch's KV is written. `angles` are cos and sin [T, P].

        `written(layer)` is called once the launch that writes that layer's KV is made. Where the step leaves at the
        batch's barrier, what is returned means nothing.
        """
        rows = self._rows(batch, angles, written)
        if rows is None:
            shape = len(batch.logits_rows), len(self.head.weight)
            return torch.zeros(shape, dtype=torch.float32, device=self.embedding.device)
        return self._head_logits(self._final(*rows, batch, quantized=self.head.scale is not None))

    def hidden(
        self, batch: RaggedBatch, *, angles: tuple[Tensor, Tensor] | None = None, written: Written | None = None
    ) -> Tensor:
        """Hidden states [R, H] float32 after the final norm; all else as in `logits`."""
        rows = self._rows(batch, angles, written)
        if rows is None:
            shape = len(batch.logits_rows), self.embedding.shape[1]
            return torch.zeros(shape, dtype=torch.float32, device=self.embedding.device)
        normed = self._final(*rows, batch, quantized=False)
        assert isinstance(normed, Tensor)
        return normed.float()

    def _rows(
        self, batch: RaggedBatch, angles: tuple[Tensor, Tensor] | None, written: Written | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """What comes out of the last layer [R, H], with the branch that is yet to be added; None: the step has left.

        Where ranks share rows, it is all of this rank's.
        """
        cos, sin = angles or self.rotation.index_select(1, batch.positions).unbind()
        assert self.ranks is None or batch.barrier is None, "the other ranks would not hear that this one has left"
        scale, prompts, ranks = self.head_dim**-0.5, self.prompts.step(batch), self.ranks
        x_TH = F.embedding(batch.tokens, self.embedding) if ranks is None else ranks.embedded(batch.tokens)
        branch_TH: Tensor | None = None  # of the layer before, yet to be added
        for index, (layer, planes) in enumerate(zip(self.layers, self.planes, strict=True)):
            if batch.barrier is not None and not batch.barrier.passes(index):
                return None
            normed, x_TH = self._normed(x_TH, branch_TH, layer.attention_norm, layer.qkv)
            qkv = self._linear(normed, layer.qkv)
            qkv = qkv if ranks is None else ranks.by_heads(qkv)
            qkv_TND = qkv.view(len(batch.tokens), -1, self.head_dim)
            q_TND = rope_write_kv(qkv_TND, cos, sin, batch.slots, *planes, norms=layer.head_norms, eps=self.eps)
            if written is not None:
                written(index)
            k_plane, v_plane, *scales = planes
            attended_TND = paged_attention(
                q_TND, k_plane, v_plane, batch, scale, layer.window, *scales, prompts=prompts
            )
            attended_TH = attended_TND.flatten(1)
            if ranks is not None and ranks.shares_rows:
                attended_TH = ranks.by_rows(attended_TH)
            elif index == len(self.layers) - 1 and len(batch.logits_rows) != len(x_TH):
                # Rows without logits have written their KV: nothing more is asked of them.
                attended_TH, x_TH = attended_TH[batch.logits_rows], x_TH[batch.logits_rows]
            branch_TH = self._summed(attended_TH, layer.o)
            branch_TH, x_TH = self._mlp(index, x_TH, branch_TH)
        return x_TH, branch_TH

    def _mlp(self, index: int, x_TH: Tensor, branch_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's MLP, or its experts, make of x + branch, and that sum."""
        layer = self.layers[index]
        mlp = layer.mlp
        if isinstance(mlp, MlpWeights):
            normed, x_TH = self._normed(x_TH, branch_TH, layer.mlp_norm, mlp.gate_up)
            inner = silu_mul(self._linear(normed, mlp.gate_up), quantized=mlp.down.scale is not None)
            return self._summed(inner, mlp.down), x_TH
        normed, x_TH = add_rms_norm(x_TH, branch_TH, layer.mlp_norm, self.eps)
        assert isinstance(normed, Tensor)
        return self.mixtures[index](normed, self._linear(normed, mlp.router)), x_TH

    def tune(self, most_rows: int) -> None:
        """Choose the tiles of every INT8 and every expert's product, for up to so many rows, now rather than in a step.

        On CUDA what an earlier process has chosen on such a device is not timed again.
        """
        kept = tuned_tiles(self.embedding.device) if self.embedding.is_cuda else None
        before = 0 if kept is None else kept.restore()
        mlps = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MlpWeights)]
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.o)]
        linears += [linear for mlp in mlps for linear in (mlp.gate_up, mlp.down)]
        linears += [mixture.weights.router for mixture in self.mixtures.values()]
        products = [(linear, self.dtype) for linear in linears] + [(self.head, torch.float32)]
        kinds = {(linear.weight.shape, linear.bias is None, dtype): linear for linear, dtype in products}
        for (_, _, dtype), linear in kinds.items():
            if linear.scale is not None:
                tune(linear.weight, linear.scale, linear.bias, most_rows, dtype)
        for mixture in {mixture.kind: mixture for mixture in self.mixtures.values()}.values():
            mixture.tune(most_rows, self.dtype)
        if kept is not None and kept.chosen > before:
            kept.keep()

    def _final(self, x_TH: Tensor, branch_TH: Tensor | None, batch: RaggedBatch, *, quantized: bool) -> Activation:
        """The final norm of the last layer's rows, [R, H]."""
        ranks = self.ranks
        if ranks is None or not ranks.shares_rows:
            return add_rms_norm(x_TH, branch_TH, self.final_norm, self.eps, quantized=quantized)[0]
        normed, _ = add_rms_norm(x_TH, branch_TH, self.final_norm, self.eps)
        assert isinstance(normed, Tensor)
        return ranks.all_rows(normed)[batch.logits_rows]

    def _normed(
        self, x_TH: Tensor, branch_TH: Tensor | None, weight: Tensor, into: LinearWeights
    ) -> tuple[Activation, Tensor]:
        """rms_norm(x + branch) as `into` takes it, and the sum."""
        return add_rms_norm(x_TH, branch_TH, weight, self.eps, quantized=into.scale is not None)

    def _summed(self, x: Activation, linear: LinearWeights) -> Tensor:
        """A linear of whose inputs each rank has some."""
        own = self._linear(x, linear)
        return own if self.ranks is None else self.ranks.summed(own)

    def _linear(self, x: Activation, linear: LinearWeights, out_dtype: torch.dtype | None = None) -> Tensor:
        if linear.scale is None:
            assert isinstance(x, Tensor)
            return F.linear(x, linear.weight, linear.bias)
        values, scales = x if isinstance(x, Quantized) else quantize(x)
        return int8_linear(values, scales, linear.weight, linear.scale, linear.bias, out_dtype or self.dtype)

    def _head_logits(self, x: Activation) -> Tensor:
        own = self._own_logits(x)
        return own if self.ranks is None else self.ranks.gathered(own)

    def _own_logits(self, x: Activation) -> Tensor:
        """The head's outputs in float32, unrounded where the device can: logits rounded to 8 bits of mantissa tie."""
        weight = self.head.weight
        if self.head.scale is not None:
            return self._linear(x, self.head, torch.float32)
        assert isinstance(x, Tensor)
        if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)
        return F.linear(x.to(weight.dtype), weight).float()
