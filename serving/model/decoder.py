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
from serving.model.norms import LayerNorm, Norm, OffsetRmsNorm, RmsNorm
from serving.model.rope import Rope
from serving.model.spec import ModelSpec

Rotation = tuple[Tensor, Tensor]  # cos and sin, each [T, P] float32
Planes = tuple[Tensor, ...]  # a layer's KV, each [num_blocks, block_size, ...]: see `ModelSpec.kv_layers`

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": kernels.gelu,
    "gelu_tanh": partial(kernels.gelu, approximate="tanh"),  # as GPT-2 was trained with
    "relu": F.relu,
}
GATED_PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gated_silu": kernels.silu_mul,
    "gated_gelu_tanh": kernels.gelu_tanh_mul,
}
NORMS: dict[str, type[Norm]] = {"rms": RmsNorm, "rms_offset": OffsetRmsNorm, "layernorm": LayerNorm}


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
        self.embedding_scale = nn.Identity() if spec.embedding_scale == 1.0 else Scale(spec.embedding_scale)
        rows = spec.max_position + spec.position_offset
        self.positions = _embedding(rows, spec.hidden) if spec.learned_positions else None
        self.rotary = Rotary(spec.rope) if spec.rope is not None else None
        self.window_rotary = Rotary(spec.window_rope) if spec.window_rope is not None else self.rotary
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
        x_TH, rotations = self.embedded(batch), self.rotations(batch)
        for index, layer in enumerate(self.layers):
            if batch.barrier is not None and not batch.barrier.passes(index):
                break
            x_TH = layer(x_TH, rotations[index], batch, kv[index])
            if layer_done is not None:
                layer_done(index)
        return self.norm(x_TH)  # type: ignore[no-any-return]

    def embedded(self, batch: RaggedBatch) -> Tensor:
        """What the first layer is given, [T, H]."""
        x_TH = self.embedding_scale(self.embed(batch.tokens))
        if self.positions is not None:
            x_TH = x_TH + self.positions(batch.positions + self.spec.position_offset)
        return x_TH  # type: ignore[no-any-return]

    def rotations(self, batch: RaggedBatch) -> list[Rotation | None]:
        """What each layer turns queries and keys by."""
        everywhere = self.rotary(batch) if self.rotary is not None else None
        in_windows = everywhere
        if self.window_rotary is not None and self.window_rotary is not self.rotary:
            in_windows = self.window_rotary(batch)
        windows = map(self.spec.window, range(len(self.layers)))
        return [everywhere if window is None else in_windows for window in windows]

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Scores of the next token [R, V], float32, for rows of what `forward` returned."""
        rows_RH = hidden_RH if self.head_dtype is None else hidden_RH.to(self.head_dtype)
        return self.head(rows_RH).float()  # type: ignore[no-any-return]


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); in some families what is added has been through a norm as well."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = _attention(spec, index)
        self.attention_post_norm = make_norm(spec) if spec.post_norms else nn.Identity()
        self.mlp_norm = make_norm(spec)
        self.mlp = _mlp(spec, index)
        self.mlp_post_norm = make_norm(spec) if spec.post_norms else nn.Identity()

    def forward(self, x_TH: Tensor, rotation: Rotation | None, batch: RaggedBatch, planes: Planes) -> Tensor:
        x_TH = self.attended(x_TH, rotation, batch, planes)
        return x_TH + self.mlp_post_norm(self.mlp(self.mlp_norm(x_TH)))  # type: ignore[no-any-return]

    def attended(self, x_TH: Tensor, rotation: Rotation | None, batch: RaggedBatch, planes: Planes) -> Tensor:
        """The first half of it: what the MLP's norm is given, [T, H]."""
        out_TH = self.attention(self.attention_norm(x_TH), rotation, batch, planes)
        return x_TH + self.attention_post_norm(out_TH)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Grouped-query attention. Rows of `qkv` are the heads of q, then of k, then of v."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5 if spec.score_scale is None else spec.score_scale
        self.window = window
        self.qkv = nn.Linear(spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.qkv_bias)
        self.q_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.o_bias)

    def forward(self, x_TH: Tensor, rotation: Rotation | None, batch: RaggedBatch, planes: Planes) -> Tensor:
        qkv_TND = self.qkv(x_TH).unflatten(1, (-1, self.head_dim))
        q, k, v = qkv_TND.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = kernels.rope(q, k, *rotation)
        kernels.write_kv(k, v, planes, batch.slots)
        out_TND = kernels.paged_attention(q, planes, batch, self.scale, self.window, self.sinks)
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
    if spec.mlp in GATED_PRODUCTS:
        return GatedMlp(spec.hidden, spec.intermediate, bias=spec.mlp_bias, product=GATED_PRODUCTS[spec.mlp])
    return PlainMlp(spec)


def make_norm(spec: ModelSpec, width: int | None = None) -> Norm:
    """Over rows of the hidden width, or of another."""
    return NORMS[spec.norm](width or spec.hidden, spec.norm_eps)


class Scale(nn.Module):
    """x times a factor, which is rounded to x's type."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * float(torch.tensor(self.factor, dtype=x.dtype, device="cpu"))


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
