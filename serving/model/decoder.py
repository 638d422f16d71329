"""The decoder: one definition of a pre-norm transformer over ragged batches and paged KV, shaped by a ModelSpec.

It knows nothing of checkpoints, schedules, parallelism or quantization; those change a built decoder from outside, by
replacing its Linear modules.

Shapes: T new tokens in the step, H hidden width, Hq query heads, Hkv key-value heads, D head dimensions, P rotated
pairs of dimensions, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from serving import kernels
from serving.batch.ragged import RaggedBatch
from serving.model.gated_mlp import GatedMlp
from serving.model.mla import MlaAttention
from serving.model.moe import MoeMlp
from serving.model.norms import LayerNorm, RmsNorm
from serving.model.rope import Rope
from serving.model.spec import ModelSpec

Rotation = tuple[Tensor, Tensor]  # cos and sin, each [T, P] float32
Planes = tuple[Tensor, ...]  # a layer's KV, each [num_blocks, block_size, ...]: see `ModelSpec.kv_layers`

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # by the error function (arXiv 1606.08415)
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # as GPT-2 was trained with
    "relu": F.relu,
}


def _embedding(rows: int, hidden: int) -> nn.Embedding:
    """Without memory it draws no values: on the meta device that would import torch's compiler, for a second."""
    weight = torch.empty(rows, hidden)
    return nn.Embedding(rows, hidden, _weight=weight if weight.is_meta else None)


class Decoder(nn.Module):
    """Embeds tokens, runs the layers and the final norm; `logits` is a step of its own, for the rows that need it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = _embedding(spec.vocab_size, spec.hidden)
        rows = spec.max_position + spec.position_offset
        self.positions = _embedding(rows, spec.hidden) if spec.learned_positions else None
        self.rotary = Rotary(spec.rope) if spec.rope is not None else None
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.layers))
        self.norm = make_norm(spec)
        self.head = nn.Linear(spec.hidden, spec.vocab_size, bias=False)
        self.head_dtype: torch.dtype | None = None  # what the head computes in; None: the model's own
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head use the embedding's weight, where the spec says so; again whenever the embedding is replaced."""
        if self.spec.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self, batch: RaggedBatch, kv: Sequence[Planes], layer_done: Callable[[int], None] | None = None
    ) -> Tensor:
        """Hidden states [T, H] after the final norm; each layer's new keys and values are written into `kv[layer]`.

        `layer_done(layer)` is called when that layer's KV for this batch is complete. Where the step leaves the
        batch's barrier, what is returned means nothing.
        """
        x_TH = self.embed(batch.tokens)
        if self.positions is not None:
            x_TH = x_TH + self.positions(batch.positions + self.spec.position_offset)
        rotation = self.rotary(batch) if self.rotary is not None else None
        for index, layer in enumerate(self.layers):
            if batch.barrier is not None and not batch.barrier.passes(index):
                break
            x_TH = layer(x_TH, rotation, batch, kv[index])
            if layer_done is not None:
                layer_done(index)
        return self.norm(x_TH)  # type: ignore[no-any-return]

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Scores of the next token [R, V], float32, for rows of what `forward` returned."""
        rows_RH = hidden_RH if self.head_dtype is None else hidden_RH.to(self.head_dtype)
        return self.head(rows_RH).float()  # type: ignore[no-any-return]


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = _attention(spec, index)
        self.mlp_norm = make_norm(spec)
        self.mlp = _mlp(spec, index)

    def forward(self, x_TH: Tensor, rotation: Rotation | None, batch: RaggedBatch, planes: Planes) -> Tensor:
        x_TH = x_TH + self.attention(self.attention_norm(x_TH), rotation, batch, planes)
        return x_TH + self.mlp(self.mlp_norm(x_TH))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Grouped-query attention. Rows of `qkv` are the heads of q, then of k, then of v."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.window = window
        self.qkv = nn.Linear(spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.qkv_bias)
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.o_bias)

    def forward(self, x_TH: Tensor, rotation: Rotation | None, batch: RaggedBatch, planes: Planes) -> Tensor:
        qkv_TND = self.qkv(x_TH).unflatten(1, (-1, self.head_dim))
        q, k, v = qkv_TND.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = kernels.rope(q, k, *rotation)
        kernels.write_kv(k, v, planes, batch.slots)
        out_TND = kernels.paged_attention(q, planes, batch, self.scale, self.window)
        return self.o(out_TND.flatten(1))  # type: ignore[no-any-return]


def _attention(spec: ModelSpec, layer: int) -> Attention | MlaAttention:
    if spec.mla is not None:
        return MlaAttention(spec.hidden, spec.heads, spec.mla, bias=spec.qkv_bias)
    return Attention(spec, spec.window(layer))


class PlainMlp(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.mlp]
        self.up = nn.Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_TH)))  # type: ignore[no-any-return]


def _mlp(spec: ModelSpec, layer: int) -> GatedMlp | PlainMlp | MoeMlp:
    if spec.moe is not None and spec.moe.sparse[layer]:
        return MoeMlp(spec.hidden, spec.moe)
    if spec.mlp == "gated_silu":
        return GatedMlp(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
    return PlainMlp(spec)


def make_norm(spec: ModelSpec) -> RmsNorm | LayerNorm:
    return (RmsNorm if spec.norm == "rms" else LayerNorm)(spec.hidden, spec.norm_eps)


class Rotary(nn.Module):
    """Cos and sin of every new token's angles, computed once a step and used by all layers."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.magnitude = rope.magnitude
        # They come from the spec, not from a checkpoint: on the CPU even while the decoder is being built on meta.
        both = torch.tensor([rope.frequencies, rope.long_frequencies or rope.frequencies], device="cpu")
        self.frequencies = nn.Buffer(both.float(), persistent=False)  # [2, P]: short, long

    def forward(self, batch: RaggedBatch) -> Rotation:
        short, long = self.frequencies
        frequencies = short if batch.long_rope is None else torch.where(batch.long_rope[:, None], long, short)
        angles_TP = batch.positions[:, None].float() * frequencies
        return angles_TP.cos() * self.magnitude, angles_TP.sin() * self.magnitude
