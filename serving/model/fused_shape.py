"""Is a model of the Llama shape, which the compiled forms of a forward pass compute in a fused step.

It is a decoder of RMS norms, gated MLPs (some forms also take routed experts of them) and rope; torch computes any.
"""

from __future__ import annotations

from serving.model.moe_spec import MoeSpec
from serving.model.spec import ModelSpec


def unlike_llama(spec: ModelSpec) -> str | None:
    """Why a model is not of the Llama shape, or None if it is. Layers may have experts in place of their MLP."""
    if spec.mla is not None:
        return "the fused step has no latent attention"
    if spec.sinks:
        return "the fused step has no attention sinks"
    if spec.moe is not None and not _plainly_routed(spec.moe):
        return f"the fused step does not route experts as {spec.architecture} does"
    plain = spec.norm == "rms" and spec.mlp == "gated_silu" and not spec.post_norms and spec.embedding_scale == 1.0
    rotated = spec.rope is not None and spec.window_rope is None and not spec.learned_positions
    if plain and rotated and spec.score_scale is None:
        return None
    return f"{spec.architecture} is not of the Llama shape"


def _plainly_routed(moe: MoeSpec) -> bool:
    """True if these few fields say all of a mixture of experts: the kernels know no others."""
    known = ("experts", "top_k", "intermediate", "sparse", "normalized")
    return moe == MoeSpec(**{name: getattr(moe, name) for name in known})
