"""A whole decoder of the Llama shape as one C call a step: the tables the kernels walk, built once from packed weights.

It may not know checkpoints or schedulers: it is handed tensors, and a ragged batch for each step.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import Structure
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.cpu.extension import Kernels
from serving.kernels.cpu.structures import STRUCTURES, Kind
from serving.kernels.cpu.weights import HALF, PANEL, HeadScreen, PackedExperts, PackedLinear, address
from serving.kernels.layer_weights import LayerWeights, MoeWeights

CHUNK = 128  # keys, as in chunk.h
STATE_EXTRA = 32  # floats, as in item.h
BATCH_ARRAYS = ("tokens", "positions", "slots", "query_start", "context_lens", "block_tables", "logits_rows")


class StepOutput(Enum):
    """What a step returns of its R logits rows."""

    LOGITS = "logits"  # [R, vocab] float32
    GREEDY = "greedy"  # [R] int64: the best token, the lowest id among equal logits; -1 where its logit is not finite
    HIDDEN = "hidden"  # [R, hidden] float32: after the final norm
    RESIDUAL = "residual"  # [R, hidden] float32: before the final norm, as `CpuDecoder.head_step` goes on from


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float


@dataclass(frozen=True, slots=True)
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
        """`KvPlanes` of abi.h. Raises ValueError for int8 planes without scales and for rows within words."""
        _, block_size, kv_heads, head_dim = self.k.shape
        kind = Kind.of(self.k.dtype)
        scales = [scale for scale in (self.k_scale, self.v_scale) if scale is not None]
        if kind is Kind.INT8 and len(scales) < 2:
            raise ValueError("int8 KV needs a scale plane for keys and one for values")
        row_bytes = _row_stride(self.k, self.v) * self.k.itemsize
        if head_dim % 64 == 0 and row_bytes % 4:
            raise ValueError(f"rows of KV are {row_bytes} bytes apart, which are not whole words of 4")
        return STRUCTURES["KvPlanes"](
            kind=kind,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            row_bytes=row_bytes,
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


@dataclass(eq=False)
class CpuDecoder:
    """Holds the weights, their C tables and the KV planes; `step` runs one ragged batch through all layers.

    A token's result depends on nothing but its own sequence: not on the rest of the batch, on how a prompt was cut into
    steps, or on the number of threads. Different forms (instruction sets) may differ in the last bits.

    Norm weights are float32, and `gate_up` is packed from `interleave(gate, up)`.
    """

    kernels: Kernels
    shape: DecoderShape
    _: KW_ONLY
    embedding: Tensor  # [vocab, hidden] bfloat16 or float32
    layers: Sequence[LayerWeights[PackedLinear]]
    final_norm: Tensor  # [hidden] float32
    head: PackedLinear  # without outputs where whoever has the residual computes it
    cos: Tensor  # [positions, pairs] float32: that many leading dimensions of a head rotate, in halves
    sin: Tensor
    kv: Sequence[KvPlanes]
    screen: HeadScreen | None = None  # of a bfloat16 head without a bias

    def __post_init__(self) -> None:
        self._check()
        self._seen: tuple[RaggedBatch, Structure] | None = None
        self.layers, self.kv = tuple(self.layers), tuple(self.kv)  # the C side holds addresses
        self.experts = [PackedExperts(w.mlp) if isinstance(w.mlp, MoeWeights) else None for w in self.layers]
        self._check_experts()
        self._layers = (STRUCTURES["Layer"] * len(self.layers))(*map(_layer, self.layers, self.experts, self.kv))
        self._model = STRUCTURES["Model"](
            layers=len(self.layers),
            hidden=self.shape.hidden,
            heads=self.shape.heads,
            rotary_dim=2 * self.cos.shape[1],
            intermediate=self.shape.intermediate,
            embedding_kind=Kind.of(self.embedding.dtype),
            eps=self.shape.eps,
            attention_scale=self.shape.head_dim**-0.5,
            layer=ctypes.addressof(self._layers),
            head=self.head.as_c(),
            screen=STRUCTURES["Screen"]() if self.screen is None else self.screen.as_c(),
            **{name: address(getattr(self, name)) for name in ("cos", "sin", "embedding", "final_norm")},
        )

    def step(
        self,
        batch: RaggedBatch,
        output: StepOutput = StepOutput.LOGITS,
        *,
        kept: Mapping[int, Tensor] | None = None,
        progress: Tensor | None = None,
    ) -> Tensor:
        """Writes the batch's KV and returns `output` for its R logits rows.

        `kept` has, by number, places for the logits [V] float32 of some rows, which are written besides GREEDY.
        `progress`, one int32, counts the layers whose KV of this step is written; another thread may watch it. Raises
        ValueError past the last known position. Where the step has left the batch's barrier, what it returns means
        nothing.
        """
        self.check(batch)
        barrier = None if batch.barrier is None else batch.barrier.address
        rows = batch.logits_rows.shape[0]
        return self._run(self._model, self._seen_as_c(batch), rows, output, kept, progress=progress, barrier=barrier)

    def head_step(
        self, residual: Tensor, output: StepOutput = StepOutput.LOGITS, *, kept: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """What `step` returns, of rows [R, hidden] float32 that others have computed as RESIDUAL."""
        rows, numbers = len(residual), torch.arange(len(residual))
        assert residual.is_contiguous() and residual.dtype is torch.float32
        batch = STRUCTURES["Batch"](
            tokens_count=rows, logits_count=rows, tokens=numbers.data_ptr(), logits_rows=numbers.data_ptr()
        )
        model = type(self._model).from_buffer_copy(self._model)
        model.layers, model.embedding, model.embedding_kind = 0, residual.data_ptr(), Kind.F32
        return self._run(model, batch, rows, output, kept)

    def idle_step(self) -> None:
        """Take part in a step of the other ranks, where they share experts, without rows of its own."""
        self._run(self._model, STRUCTURES["Batch"](), 0, StepOutput.RESIDUAL, None)

    def _run(
        self,
        model: Structure,
        batch: Structure,
        rows: int,
        output: StepOutput,
        kept: Mapping[int, Tensor] | None,
        **told: Tensor | int | None,
    ) -> Tensor:
        chooses = output is StepOutput.GREEDY
        assert not kept or chooses, "logits are kept besides the best tokens"
        places = array("Q", bytes(8 * rows))
        for row, logits in (kept or {}).items():
            assert logits.dtype is torch.float32 and logits.is_contiguous() and logits.numel() == self.shape.vocab
            places[row] = logits.data_ptr()
        if chooses:
            out = torch.empty(rows, dtype=torch.int64)
        else:
            out = torch.empty(rows, self.shape.vocab if output is StepOutput.LOGITS else self.shape.hidden)
        results = STRUCTURES["Results"](
            kept=places.buffer_info()[0] if kept else None,
            **{name: one.data_ptr() if isinstance(one, Tensor) else one for name, one in told.items()},
            **{output.value: out.data_ptr()},
        )
        self.kernels.run("step", model, batch, results)
        return out

    def put(self, index: int, layer: LayerWeights[PackedLinear]) -> None:
        """Compute a layer by these weights from now on. Raises ValueError where they do not fit the others."""
        self.layers = (*self.layers[:index], layer, *self.layers[index + 1 :])
        self.experts[index] = PackedExperts(layer.mlp) if isinstance(layer.mlp, MoeWeights) else None
        self._check_experts()
        self._layers[index] = _layer(layer, self.experts[index], self.kv[index])

    def _seen_as_c(self, batch: RaggedBatch) -> Structure:
        """`Batch` of abi.h; that of the last batch is kept, which steps that decode use again and again."""
        if self._seen is None or self._seen[0] is not batch:
            self._seen = batch, _batch(batch)
        return self._seen[1]

    def over(self, kv: Sequence[KvPlanes]) -> CpuDecoder:
        """The same decoder, its weights shared, over other KV planes."""
        return replace(self, kv=kv)

    def check(self, batch: RaggedBatch) -> None:
        """Raises ValueError for what the rotary table does not hold."""
        if batch.long_rope is not None:
            raise ValueError("the fused step holds one rotary table: LongRoPE batches take the model's own path")
        if max(batch.context_lens_list) > len(self.cos):
            raise ValueError(f"context of {max(batch.context_lens_list)} tokens, rotary table of {len(self.cos)}")

    def rotate_and_write(self, layer: int, batch: RaggedBatch, qkv: Tensor) -> Tensor:
        """One layer's q/k norm, rotary embedding and KV write: qkv [T, (heads + 2 kv_heads) · head_dim] float32.

        Returns the queries [T, heads, head_dim] float32, rounded to what they are multiplied as.
        """
        q = torch.empty(qkv.shape[0], self.shape.heads, self.shape.head_dim)
        qkv = qkv.contiguous()
        self.kernels.run("rotate_and_write", self._model, layer, _batch(batch), qkv.data_ptr(), q.data_ptr())
        return q

    def attention(self, layer: int, batch: RaggedBatch, q: Tensor) -> Tensor:
        """Causal attention of q [T, heads, head_dim] float32 over one layer's written KV; same shape out."""
        q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
        self.kernels.run("attention", self._model, layer, _batch(batch), q.data_ptr(), out.data_ptr())
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
        c = STRUCTURES["KVRange"](kv_range.planes.as_c(), chunks, kv_range.begins, state.data_ptr(), address(out))
        self.kernels.run("attend_range", self._model, layer, view, c, q.data_ptr())

    def _check(self) -> None:
        """Raises ValueError for what the kernels cannot read: they see addresses only."""
        shape, embedding, kv = self.shape, self.embedding, self.kv
        if len(self.layers) != len(kv) or not kv:
            raise ValueError(f"{len(self.layers)} layers of weights and {len(kv)} of KV planes")
        if len({(planes.k.shape[1:], planes.k.dtype) for planes in kv}) != 1:
            raise ValueError("the fused step needs KV planes of one shape in all layers")
        if kv[0].k.shape[2:] != (shape.kv_heads, shape.head_dim) or shape.heads % shape.kv_heads:
            raise ValueError(f"KV planes {tuple(kv[0].k.shape)} do not hold {shape.kv_heads} heads of {shape.head_dim}")
        if embedding.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"the embedding must be bfloat16 or float32, not {embedding.dtype}")
        plain = [self.final_norm, self.cos, self.sin]
        qkv, gate_up = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, -(-shape.intermediate // HALF) * PANEL
        for w in self.layers:
            plain += [w.attention_norm, w.mlp_norm, *(w.head_norms or ())]
            fits = (w.qkv.outputs, w.o.outputs) == (qkv, shape.hidden)
            if not isinstance(w.mlp, MoeWeights):
                outputs = (w.mlp.gate_up.outputs, w.mlp.down.outputs)
                fits &= outputs == (gate_up, shape.hidden) and w.mlp.down.inputs == shape.intermediate
            if not fits:
                raise ValueError(f"a layer's projections do not fit {shape}")
        if self.screen is not None and (self.head.kind is not Kind.BF16 or self.head.bias is not None):
            raise ValueError("only a bfloat16 head without a bias is screened")
        if any(one.dtype != torch.float32 or not one.is_contiguous() for one in plain) or not embedding.is_contiguous():
            raise ValueError("norm weights and rotary tables must be contiguous float32, the embedding contiguous")

    def _check_experts(self) -> None:
        """Raises ValueError where layers' experts differ in number or widths: they work in the same buffers."""
        sparse = [one for one in self.experts if one is not None]
        sizes = {(len(one.weights.experts), one.weights.top_k, one.hidden, one.inner) for one in sparse}
        if len({one.weights.spread is None for one in sparse}) > 1:
            raise ValueError("ranks share the experts of all layers that have some, or of none")
        if len(sizes) > 1 or any(one.hidden != self.shape.hidden for one in sparse):
            raise ValueError("the fused step needs experts of the same number and widths in all layers that have some")


def _layer(w: LayerWeights[PackedLinear], experts: PackedExperts | None, planes: KvPlanes) -> Structure:
    q_norm, k_norm = w.head_norms or (None, None)
    norms = {"attention_norm": w.attention_norm, "mlp_norm": w.mlp_norm, "q_norm": q_norm, "k_norm": k_norm}
    linears = {"qkv": w.qkv.as_c(), "o": w.o.as_c()}
    if experts is not None:
        linears["experts"] = experts.as_c()
    elif not isinstance(w.mlp, MoeWeights):
        linears |= {"gate_up": w.mlp.gate_up.as_c(), "down": w.mlp.down.as_c()}
    return STRUCTURES["Layer"](
        **{name: address(norm) for name, norm in norms.items()}, **linears, kv=planes.as_c(), window=w.window or 0
    )


def _batch(batch: RaggedBatch) -> Structure:
    return STRUCTURES["Batch"](
        tokens_count=batch.tokens.shape[0],
        sequences=len(batch.query_lens),
        table_width=batch.block_tables.shape[1],
        logits_count=batch.logits_rows.shape[0],
        **{name: getattr(batch, name).data_ptr() for name in BATCH_ARRAYS},
    )
