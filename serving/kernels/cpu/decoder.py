"""A whole decoder of the Llama shape as one C call a step: the tables the kernels walk, built once from packed weights.

It may not know checkpoints or schedulers: it is handed tensors, and a ragged batch for each step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.cpu.extension import Kernels
from serving.kernels.cpu.structures import BatchC, Kind, KvPlanesC, KVRangeC, LayerC, ModelC, ResultsC
from serving.kernels.cpu.weights import PANEL, PackedLinear, address

CHUNK = 128  # keys, as in chunk.h
STATE_EXTRA = 32  # floats, as in attention.h
BATCH_ARRAYS = ("tokens", "positions", "slots", "query_start", "context_lens", "block_tables", "logits_rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # leading dimensions of a head that rotate, in halves
    intermediate: int
    vocab: int
    eps: float
    attention_scale: float
    embedding_scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuLayerWeights:
    """Norm weights are float32. `gate_up` is packed from `interleave(gate, up)`."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    qkv: PackedLinear  # outputs: query heads, then key heads, then value heads
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None
    window: int = 0  # tokens a query sees, itself included; 0 means all


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlanes:
    """One layer's paged KV: k and v [num_blocks, block_size, kv_heads, head_dim], int8, bfloat16 or float32.

    int8 planes come with scales [num_blocks, block_size, kv_heads] float32. Planes may lie within wider ones, so long
    as their rows, a head's numbers each, follow one another at equal distances.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def as_c(self) -> Structure:
        """`KvPlanes` of abi.h. Raises ValueError for int8 planes without scales."""
        _, block_size, kv_heads, head_dim = self.k.shape
        kind = Kind.of(self.k.dtype)
        scales = [scale for scale in (self.k_scale, self.v_scale) if scale is not None]
        if kind is Kind.INT8 and len(scales) < 2:
            raise ValueError("int8 KV needs a scale plane for keys and one for values")
        return KvPlanesC(
            kind=kind,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            row_bytes=_row_stride(self.k, self.v) * self.k.itemsize,
            scale_stride=_row_stride(*scales) if len(scales) == 2 else 0,
            **{name: address(getattr(self, name)) for name in ("k", "v", "k_scale", "v_scale")},
        )


def _row_stride(*planes: Tensor) -> int:
    """How many numbers lie between the beginnings of a plane's rows, for planes that must be alike."""
    strides = set()
    for plane in planes:
        _, block_size, kv_heads = plane.shape[:3]
        step = plane.stride(2)
        strides.add(step)
        assert plane.stride()[:2] == (block_size * kv_heads * step, kv_heads * step), "KV is read by address"
        assert plane.stride()[3:] in ((), (1,)), "a row's numbers lie side by side"
    (stride,) = strides
    return stride


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRange:
    """A range of KV attended to by itself: `planes` in blocks of consecutive tokens, the first at a multiple of 128.

    `table` names the blocks from that token on, and `first` is its position. The last range reaches up to the queries;
    those before end at a multiple of 128 too, after `tokens`.
    """

    planes: KvPlanes
    table: Tensor  # [M] int32
    first: int
    tokens: int | None  # None: up to each query's own
    begins: bool  # True for the first range


@dataclass(frozen=True, slots=True)
class CpuStepOutput:
    logits: Tensor | None  # [R, vocab] float32
    greedy: Tensor | None  # [R] int64, the lowest id among equal logits


class CpuDecoder:
    """Holds the weights, their C tables and the KV planes; `step` runs one ragged batch through all layers.

    A token's result depends on nothing but its own sequence: not on the rest of the batch, on how a prompt was cut into
    steps, or on the number of threads. Different forms (instruction sets) may differ in the last bits.
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: DecoderShape,
        *,
        embedding: Tensor,  # [vocab, hidden] bfloat16 or float32
        layers: Sequence[CpuLayerWeights],
        final_norm: Tensor,  # [hidden] float32
        head: PackedLinear,
        cos: Tensor,  # [positions, rotary_dim / 2] float32
        sin: Tensor,
        kv: Sequence[KvPlanes],
    ):
        _check(shape, embedding, layers, final_norm, cos, sin, kv)
        self.kernels = kernels
        self.shape = shape
        self.embedding, self.layers, self.final_norm, self.head = embedding, tuple(layers), final_norm, head
        self.planes = tuple(kv)
        self._tables = (cos, sin)  # the C side holds addresses
        self._positions = cos.shape[0]
        self._layers = (LayerC * len(layers))(*(_layer(w, planes) for w, planes in zip(layers, kv, strict=True)))
        self._model = ModelC(
            layers=len(layers),
            hidden=shape.hidden,
            heads=shape.heads,
            rotary_dim=shape.rotary_dim,
            intermediate=shape.intermediate,
            embedding_kind=Kind.of(embedding.dtype),
            eps=shape.eps,
            attention_scale=shape.attention_scale,
            embedding_scale=shape.embedding_scale,
            layer=ctypes.addressof(self._layers),
            cos=address(cos),
            sin=address(sin),
            embedding=address(embedding),
            final_norm=address(final_norm),
            head=head.as_c(),
        )

    def step(
        self,
        batch: RaggedBatch,
        *,
        logits: bool = True,
        greedy: bool = False,
        hidden: Tensor | None = None,
        progress: Tensor | None = None,
    ) -> CpuStepOutput:
        """Writes the batch's KV and returns what was asked for of its R logits rows.

        `hidden` [T, hidden] float32 receives the last layer's residual stream. `progress`, one int32, counts the layers
        whose KV of this step is written; another thread may watch it. Raises ValueError past the last known position.
        Where the step has left the batch's barrier, what it returns means nothing.
        """
        self.check(batch)
        rows = batch.logits_rows.shape[0]
        out = CpuStepOutput(
            torch.empty(rows, self.shape.vocab) if logits else None,
            torch.empty(rows, dtype=torch.int64) if greedy else None,
        )
        barrier = None if batch.barrier is None else batch.barrier.address
        results = ResultsC(address(out.logits), address(out.greedy), address(hidden), address(progress), barrier)
        self.kernels.library.millrace_step(self.kernels.context, self._model, _batch(batch), results)
        return out

    def over(self, kv: Sequence[KvPlanes]) -> CpuDecoder:
        """The same decoder, its weights shared, over other KV planes."""
        cos, sin = self._tables
        weights = {"embedding": self.embedding, "final_norm": self.final_norm, "cos": cos, "sin": sin}
        return CpuDecoder(self.kernels, self.shape, layers=self.layers, head=self.head, kv=kv, **weights)

    def check(self, batch: RaggedBatch) -> None:
        """Raises ValueError for what the rotary table does not hold."""
        if batch.long_rope is not None:
            raise ValueError("the fused step holds one rotary table: LongRoPE batches take the model's own path")
        if max(batch.context_lens_list) > self._positions:
            raise ValueError(f"context of {max(batch.context_lens_list)} tokens, rotary table of {self._positions}")

    def rotate_and_write(self, layer: int, batch: RaggedBatch, qkv: Tensor) -> Tensor:
        """One layer's q/k norm, rotary embedding and KV write: qkv [T, (heads + 2 kv_heads) · head_dim] float32.

        Returns the queries [T, heads, head_dim] float32, rounded to what they are multiplied as.
        """
        q = torch.empty(qkv.shape[0], self.shape.heads, self.shape.head_dim)
        call = self.kernels.library.millrace_rotate_and_write
        call(self.kernels.context, self._model, layer, _batch(batch), qkv.contiguous().data_ptr(), q.data_ptr())
        return q

    def attention(self, layer: int, batch: RaggedBatch, q: Tensor) -> Tensor:
        """Causal attention of q [T, heads, head_dim] float32 over one layer's written KV; same shape out."""
        q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
        call = self.kernels.library.millrace_attention
        call(self.kernels.context, self._model, layer, _batch(batch), q.data_ptr(), out.data_ptr())
        return out

    def attention_state(self, tokens: int) -> Tensor:
        """Uninitialized room for what `attend_range` carries from range to range for that many tokens' queries."""
        padded = -(-self.shape.head_dim // PANEL) * PANEL
        return torch.empty(tokens, self.shape.heads, padded + STATE_EXTRA)

    def attend_range(
        self, layer: int, batch: RaggedBatch, q: Tensor, kv_range: KVRange, state: Tensor, out: Tensor | None
    ) -> None:
        """Join one range of a sequence's KV to `state`; with the last range write `out` [T, heads, head_dim].

        Ranges follow one another up to the queries; then the result has the bits of `attention` over all of them.
        """
        chunks = 0 if kv_range.tokens is None else kv_range.tokens // CHUNK
        assert kv_range.first % CHUNK == 0 and chunks * CHUNK == (kv_range.tokens or 0) and len(batch.query_lens) == 1
        context_lens = batch.context_lens - kv_range.first
        view = _batch(batch)
        view.context_lens, view.block_tables = context_lens.data_ptr(), kv_range.table.data_ptr()
        view.table_width = kv_range.table.shape[0]
        c = KVRangeC(kv_range.planes.as_c(), chunks, kv_range.begins, state.data_ptr(), address(out))
        call = self.kernels.library.millrace_attend_range
        call(self.kernels.context, self._model, layer, view, c, q.data_ptr())


def _layer(w: CpuLayerWeights, planes: KvPlanes) -> Structure:
    norms = {name: address(getattr(w, name)) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")}
    linears = {name: getattr(w, name).as_c() for name in ("qkv", "o", "gate_up", "down")}
    return LayerC(**norms, **linears, kv=planes.as_c(), window=w.window)


def _batch(batch: RaggedBatch) -> Structure:
    return BatchC(
        tokens_count=batch.tokens.shape[0],
        sequences=len(batch.query_lens),
        table_width=batch.block_tables.shape[1],
        logits_count=batch.logits_rows.shape[0],
        **{name: getattr(batch, name).data_ptr() for name in BATCH_ARRAYS},
    )


def _check(
    shape: DecoderShape,
    embedding: Tensor,
    layers: Sequence[CpuLayerWeights],
    final_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Sequence[KvPlanes],
) -> None:
    """Raises ValueError for what the kernels cannot read: they see addresses only."""
    if len(layers) != len(kv) or not layers:
        raise ValueError(f"{len(layers)} layers of weights and {len(kv)} of KV planes")
    if len({(planes.k.shape[1:], planes.k.dtype) for planes in kv}) != 1:
        raise ValueError("the fused step needs KV planes of one shape in all layers")
    if kv[0].k.shape[2:] != (shape.kv_heads, shape.head_dim) or shape.heads % shape.kv_heads:
        raise ValueError(f"KV planes {tuple(kv[0].k.shape)} do not hold {shape.kv_heads} heads of {shape.head_dim}")
    if embedding.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the embedding must be bfloat16 or float32, not {embedding.dtype}")
    plain = [final_norm, cos, sin]
    for w in layers:
        plain += [one for one in (w.attention_norm, w.mlp_norm, w.q_norm, w.k_norm) if one is not None]
        expected = ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden, shape.hidden)
        if (w.qkv.outputs, w.o.outputs, w.down.outputs) != expected or w.down.inputs != shape.intermediate:
            raise ValueError(f"a layer's projections do not fit {shape}")
    if any(one.dtype != torch.float32 or not one.is_contiguous() for one in (*plain,)) or not embedding.is_contiguous():
        raise ValueError("norm weights and rotary tables must be contiguous float32, the embedding contiguous")
