"""Plain torch forms of what the CPU kernels compute, one obvious formula each, and small random decoders.

They know nothing of packing, tiles or threads: the kernels are held against them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from serving.kernels.hadamard import block_of
from serving.kernels.layer_weights import LayerWeights, MlpWeights, MoeWeights


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of each row: values and scales [..., 1]."""
    top = x.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(top > 0, 127 / top, torch.zeros_like(top))
    return (x * inverse).round(), top / 127


def hadamard(x: Tensor, block: int) -> Tensor:
    """Each `block` neighbours times the orthogonal matrix of signs by the parity of the bits that two numbers share."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    matrix = torch.tensor(signs, dtype=torch.float64) / block**0.5
    return (x.double().unflatten(-1, (-1, block)) @ matrix).flatten(-2).float()


@dataclass(frozen=True, kw_only=True)
class Plain:
    """An unpacked linear layer: int8 weights with `scale`, or bfloat16 or float32 ones without."""

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    rotation: int = 0  # int8 only: inputs that a Hadamard transform joins

    @staticmethod
    def random(kind: Kind, outputs: int, inputs: int, *, bias: bool = False, rotation: int = 0) -> Plain:
        added = torch.randn(outputs) if bias else None
        if kind is Kind.INT8:
            weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
            scale = (torch.rand(outputs) + 0.5) * inputs**-0.5 / 74
            return Plain(weight=weight, scale=scale, bias=added, rotation=rotation)
        return Plain(weight=(torch.randn(outputs, inputs) * inputs**-0.5).to(kind.dtype), bias=added)

    def __call__(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            values, scale = quantize_rows(hadamard(x, self.rotation) if self.rotation else x)
            out = (values.double() @ self.weight.double().T).float() * (self.scale * scale)
        else:
            out = x.to(self.weight.dtype).float() @ self.weight.float().T
        return out if self.bias is None else out + self.bias

    def packed(self, kernels: cpu.Kernels) -> cpu.PackedLinear:
        return kernels.pack(self.weight, scale=self.scale, bias=self.bias, rotation=self.rotation)


@dataclass(frozen=True, kw_only=True)
class PlainMlp:
    """down(silu(gate(x)) * up(x))."""

    gate: Plain
    up: Plain
    down: Plain

    @staticmethod
    def random(kind: Kind, hidden: int, width: int, *, rotated: bool = False) -> PlainMlp:
        outer, inner = (block_of(hidden), block_of(width)) if rotated else (0, 0)
        gate, up = (Plain.random(kind, width, hidden, rotation=outer) for _ in range(2))
        return PlainMlp(gate=gate, up=up, down=Plain.random(kind, hidden, width, rotation=inner))

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def packed(self, kernels: cpu.Kernels) -> MlpWeights[cpu.PackedLinear]:
        gate, up = self.gate, self.up
        scale = None if gate.scale is None or up.scale is None else cpu.interleave(gate.scale, up.scale)
        weight = cpu.interleave(gate.weight, up.weight)
        gate_up = kernels.pack(weight, scale=scale, rotation=gate.rotation)
        return MlpWeights(gate_up=gate_up, down=self.down.packed(kernels))


@dataclass(frozen=True, kw_only=True)
class PlainExperts:
    """The weighted sum of what a token's `top_k` best experts make of it, one token and one expert after the other."""

    router: Plain
    experts: list[PlainMlp]
    top_k: int
    normalized: bool = True

    @staticmethod
    def random(kind: Kind, hidden: int, width: int, experts: int, top_k: int, **options: bool) -> PlainExperts:
        wide = Kind.F32 if kind is Kind.F32 else Kind.BF16  # routers are not quantized
        mlps = [PlainMlp.random(kind, hidden, width) for _ in range(experts)]
        return PlainExperts(router=Plain.random(wide, experts, hidden), experts=mlps, top_k=top_k, **options)

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        parts = [
            sum(w * self.experts[int(e)](row[None])[0] for w, e in zip(weights[t], chosen[t], strict=True))
            for t, row in enumerate(x)
        ]
        return torch.stack(parts) if parts else torch.zeros_like(x)  # type: ignore[arg-type]

    def packed(self, kernels: cpu.Kernels) -> MoeWeights[cpu.PackedLinear]:
        return MoeWeights(
            router=self.router.packed(kernels),
            experts=tuple(mlp.packed(kernels) for mlp in self.experts),
            top_k=self.top_k,
            normalized=self.normalized,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, dim], cos and sin [T, rotary_dim / 2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def stored(planes: cpu.KvPlanes, name: str) -> Tensor:
    """The numbers a plane stands for, [num_blocks * block_size, kv_heads, dim] float32."""
    plane: Tensor = getattr(planes, name)
    values = plane.float().flatten(0, 1)
    scale: Tensor | None = getattr(planes, f"{name}_scale")
    return values if scale is None else values * scale.flatten(0, 1)[..., None]


def attention(q: Tensor, planes: cpu.KvPlanes, batch: RaggedBatch, scale: float, window: int = 0) -> Tensor:
    """q [T, heads, dim] over the written KV, each sequence with a plain masked softmax."""
    out = torch.empty_like(q)
    k_all, v_all = stored(planes, "k"), stored(planes, "v")
    group = q.shape[1] // k_all.shape[1]
    for b, context in enumerate(batch.context_lens_list):
        rows = slice(int(batch.query_start[b]), int(batch.query_start[b + 1]))
        keys = torch.arange(context)
        slots = batch.block_tables[b][keys // batch.block_size].long() * batch.block_size + keys % batch.block_size
        k, v = (part[slots].repeat_interleave(group, dim=1) for part in (k_all, v_all))
        position = batch.positions[rows]
        visible = keys[None] <= position[:, None]
        if window:
            visible &= keys[None] > position[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", q[rows], k) * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def ragged(spans: Sequence[tuple[int, int]], *, block_size: int = 16, vocab: int = 100, seed: int = 0) -> RaggedBatch:
    """A batch of (start, new tokens) spans over blocks in random order; block 0 is left unused."""
    chooser = random.Random(seed)
    needed = [-(-(start + new) // block_size) for start, new in spans]
    ids = list(range(1, sum(needed) + 1))
    chooser.shuffle(ids)
    tables = []
    for count in needed:
        tables.append(ids[:count])
        ids = ids[count:]
    tokens = [[chooser.randrange(vocab) for _ in range(new)] for _, new in spans]
    return RaggedBatch.build(
        tokens=tokens, starts=[start for start, _ in spans], block_tables=tables, block_size=block_size
    )


def planes_for(kind: Kind, blocks: int, block_size: int, kv_heads: int, dim: int, *, filled: bool) -> cpu.KvPlanes:
    size = (blocks, block_size, kv_heads, dim)
    if kind is Kind.INT8:
        pair = [torch.randint(-127, 128, size, dtype=torch.int8) if filled else torch.zeros(size, dtype=torch.int8)] * 2
        scale = (torch.rand(blocks, block_size, kv_heads) + 0.5) / 74
        return cpu.KvPlanes(k=pair[0].clone(), v=pair[1].flip(0).clone(), k_scale=scale, v_scale=scale.flip(0).clone())
    pair = [(torch.randn(size) if filled else torch.zeros(size)).to(kind.dtype) for _ in range(2)]
    return cpu.KvPlanes(k=pair[0], v=pair[1])


def rotary_table(positions: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return angles.cos().contiguous(), angles.sin().contiguous()


@dataclass
class SmallDecoder:
    """A random decoder of the Llama shape: as plain formulas, and packed for the kernels by `build`."""

    kind: Kind
    kv_kind: Kind
    layers: int = 2
    hidden: int = 96
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 32
    intermediate: int = 136
    vocab: int = 100
    positions: int = 1024
    blocks: int = 160
    block_size: int = 16
    windows: tuple[int, ...] = (0, 0)
    head_norms: bool = False
    bias: bool = False
    experts: int = 0  # of each layer but the dense ones; 0: none has any
    top_k: int = 2
    normalized: bool = True
    dense: tuple[int, ...] = ()
    rotated: bool = False  # all linears but experts' and the head
    planes: list[cpu.KvPlanes] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind, width = self.kind, (self.heads + 2 * self.kv_heads) * self.head_dim
        self.embedding = torch.randn(self.vocab, self.hidden).to(torch.bfloat16)
        self.cos, self.sin = rotary_table(self.positions, self.rotary_dim)
        self.final_norm = torch.rand(self.hidden) + 0.5
        self.head = Plain.random(kind, self.vocab, self.hidden)
        self.parts = [
            {
                "qkv": self._linear(width, self.hidden),
                "o": self._linear(self.hidden, self.heads * self.head_dim),
            }
            for _ in range(self.layers)
        ]
        self.mlps = [self._mlp(layer) for layer in range(self.layers)]
        self.norms = [
            {name: torch.rand(size) + 0.5 for name, size in self._norm_sizes().items()} for _ in range(self.layers)
        ]
        self.clear()

    def _linear(self, outputs: int, inputs: int) -> Plain:
        rotation = block_of(inputs) if self.rotated else 0
        return Plain.random(self.kind, outputs, inputs, bias=self.bias, rotation=rotation)

    def _mlp(self, layer: int) -> PlainMlp | PlainExperts:
        if not self.experts or layer in self.dense:
            return PlainMlp.random(self.kind, self.hidden, self.intermediate, rotated=self.rotated)
        width = self.intermediate // 2 + 3
        return PlainExperts.random(self.kind, self.hidden, width, self.experts, self.top_k, normalized=self.normalized)

    def _norm_sizes(self) -> dict[str, int]:
        sizes = {"attention_norm": self.hidden, "mlp_norm": self.hidden}
        return sizes | ({"q_norm": self.head_dim, "k_norm": self.head_dim} if self.head_norms else {})

    def clear(self) -> None:
        """Fresh, empty KV planes."""
        self.planes = [
            planes_for(self.kv_kind, self.blocks, self.block_size, self.kv_heads, self.head_dim, filled=False)
            for _ in range(self.layers)
        ]

    def build(self, kernels: cpu.Kernels) -> cpu.CpuDecoder:
        names = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
        shape = cpu.DecoderShape(**{name: getattr(self, name) for name in names}, eps=1e-5)
        layers = [
            LayerWeights(
                attention_norm=norms["attention_norm"],
                mlp_norm=norms["mlp_norm"],
                qkv=parts["qkv"].packed(kernels),
                o=parts["o"].packed(kernels),
                mlp=mlp.packed(kernels),
                head_norms=(norms["q_norm"], norms["k_norm"]) if self.head_norms else None,
                window=window,
            )
            for parts, mlp, norms, window in zip(self.parts, self.mlps, self.norms, self.windows, strict=True)
        ]
        return cpu.CpuDecoder(
            kernels,
            shape,
            embedding=self.embedding,
            layers=layers,
            final_norm=self.final_norm,
            head=self.head.packed(kernels),
            cos=self.cos,
            sin=self.sin,
            kv=self.planes,
        )

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [T, vocab] of one whole sequence, by the formulas and without any cache."""
        batch = ragged([(0, len(tokens))], block_size=self.block_size)
        x = self.embedding[torch.tensor(tokens)].float()
        count, dim = len(tokens), self.head_dim
        cos, sin = self.cos[:count], self.sin[:count]
        for parts, mlp, norms, window in zip(self.parts, self.mlps, self.norms, self.windows, strict=True):
            qkv = parts["qkv"](rms_norm(x, norms["attention_norm"], 1e-5)).view(count, -1, dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            if self.head_norms:
                q, k = rms_norm(q, norms["q_norm"], 1e-5), rms_norm(k, norms["k_norm"], 1e-5)
            planes = planes_for(self.kv_kind, self.blocks, self.block_size, self.kv_heads, dim, filled=False)
            write(planes, batch.slots, rotate(k, cos, sin), v)
            attended = attention(rotate(q, cos, sin), planes, batch, dim**-0.5, window)
            x = x + parts["o"](attended.flatten(1))
            x = x + mlp(rms_norm(x, norms["mlp_norm"], 1e-5))
        return self.head(rms_norm(x, self.final_norm, 1e-5))


def write(planes: cpu.KvPlanes, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Stores k and v [T, kv_heads, dim] at `slots`, quantized per token and head for int8 planes."""
    for plane, scale, values in ((planes.k, planes.k_scale, k), (planes.v, planes.v_scale, v)):
        flat = plane.view(-1, *plane.shape[2:])
        if scale is None:
            flat[slots] = values.to(plane.dtype)
            continue
        whole, steps = quantize_rows(values)
        flat[slots] = whole.to(torch.int8)
        scale.view(-1, scale.shape[2])[slots] = steps[..., 0]
