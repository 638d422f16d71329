"""The least time that a step can take on a CPU: what it must read, and what it must multiply, over measured limits.

It times nothing; `bench.cpu_kernels` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.random_model import weight_bytes
from serving.forward.cpu_forward import CpuForward
from serving.kernels import cpu
from serving.kernels.layer_weights import MoeWeights
from serving.model.decoder import Decoder

PARTS = 2  # INT8 rows that the screen multiplies for each row, as in screen.h


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """What a step cannot do without: bytes it reads, and operations (two a multiply-add) of each kind."""

    read: float
    operations: Mapping[cpu.Kind, float]


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What a machine was measured to give in a second: bytes read, and operations of each kind in large layers."""

    bandwidth: float
    rates: Mapping[cpu.Kind, float]

    def floor(self, needs: StepNeeds) -> float:
        """Seconds: memory is read while products are computed, of which kinds take turns, each at its own rate."""
        multiplying = sum(count / self.rates[kind] for kind, count in needs.operations.items())
        return max(needs.read / self.bandwidth, multiplying)


def screened_rows(form: str) -> int:
    """The most rows whose best tokens kernels of `form` find by a screen, as in screen.h."""
    if form == "avx512_amx":
        return 64
    return 8 if form.startswith("avx512") else 4


def product_kind(kv: cpu.Kind) -> cpu.Kind:
    """What attention multiplies: INT8 KV is widened to bfloat16 first."""
    return cpu.Kind.F32 if kv is cpu.Kind.F32 else cpu.Kind.BF16


def decode_needs(
    model: Decoder, forward: CpuForward, kv: cpu.Kind, kv_bytes: int, count: int, context: int
) -> StepNeeds:
    """Of a step of `count` sequences with `context` tokens each in KV, whose `kv_bytes` are a token's over all layers.

    Every weight and all KV are read. Where the best tokens of few rows are found by a screen, that is read and
    multiplied, and not the head. Softmax, norms and whatever else is neither read nor multiplied is left out. Raises
    ValueError for layers with experts: what they read depends on the tokens.
    """
    decoder, spec = forward.decoder, model.spec
    read = weight_bytes(model) + count * context * kv_bytes
    rows = [(decoder.head, count)]
    if decoder.screen is not None and count <= screened_rows(decoder.kernels.form):
        read += decoder.screen.coarse.packed.nbytes - decoder.head.packed.nbytes
        rows = [(decoder.screen.coarse, count * PARTS)]
    for layer in decoder.layers:
        if isinstance(layer.mlp, MoeWeights):
            raise ValueError("a step of experts has no floor that is known beforehand")
        rows += [(w, count) for w in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
    pairs = spec.layers * spec.heads * count * context  # of a query and a key, multiplied as often as values are
    operations = {product_kind(kv): 4.0 * pairs * spec.head_dim}
    for w, multiplied in rows:
        operations[w.kind] = operations.get(w.kind, 0.0) + 2.0 * multiplied * w.outputs * w.inputs
    return StepNeeds(read, operations)
