"""The operations a decoder is made of. The model calls them here and does not know which form runs.

Every form has the signature and the meaning of its namesake in `serving.kernels.reference`, but for those over KV: they
take a layer's planes as one tuple, and what planes there are says how KV is stored.
"""

from typing import Any

from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels import int8, reference
from serving.kernels.latent_attention import absorbed_attention, expanded_attention, part_of, write_latent
from serving.kernels.offloaded_attention import offloaded_attention
from serving.kernels.reference import clamped_swiglu, gelu, gelu_tanh_mul, layer_norm, rms_norm, rope, sigmoid, silu_mul

__all__ = [
    "absorbed_attention",
    "clamped_swiglu",
    "expanded_attention",
    "gelu",
    "gelu_tanh_mul",
    "layer_norm",
    "paged_attention",
    "part_of",
    "rms_norm",
    "rope",
    "sigmoid",
    "silu_mul",
    "write_kv",
    "write_latent",
]

_BY_PLANES: dict[int, Any] = {2: reference, 4: int8}  # k and v; k, v and the scales of each


def write_kv(k: Tensor, v: Tensor, planes: tuple[Tensor, ...], slots: Tensor) -> None:
    """Store k and v [T, Hkv, D] at `slots` [T] of a layer's planes, as `ModelSpec.kv_layers` describes them."""
    _BY_PLANES[len(planes)].write_kv(k, v, *planes, slots)


def paged_attention(
    q: Tensor,
    planes: tuple[Tensor, ...],
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over each sequence's own blocks of a layer's planes; [T, Hq, D] in q's dtype."""
    form = _BY_PLANES[len(planes)]
    if batch.offloaded is not None:
        return offloaded_attention(q, planes, batch, scale, window, form.gather, sinks)
    out: Tensor = form.paged_attention(q, *planes, batch, scale, window, sinks)
    return out
