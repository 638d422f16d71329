"""What a decoder looks like, as data: widths, norms, rope, biases; the same for every architecture.

It knows no config (see serving.model.hf_config) and may not import torch: routers, planners and simulators use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serving.kvspec import LayerKV, gqa, gqa_int8, mla
from serving.model.mla_spec import MlaSpec
from serving.model.moe_spec import MoeSpec
from serving.model.rope import Rope

NormKind = Literal["rms", "rms_offset", "layernorm"]  # of the second the gain is 1 + the weight
MlpKind = Literal["gated_silu", "gated_gelu_tanh", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A pre-norm decoder-only transformer. Widths are in elements, positions in tokens."""

    architecture: str  # the family's name in checkpoints: llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, …
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_position: int
    norm: NormKind = "rms"
    norm_eps: float
    mlp: MlpKind = "gated_silu"
    rope: Rope | None = None
    window_rope: Rope | None = None  # of layers with a window, where it is not `rope`
    learned_positions: bool = False
    position_offset: int = 0  # OPT's table of learned positions starts at row 2
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm over each head of q and k, before rope
    post_norms: bool = False  # a norm of what attention and MLP make, before it is added
    sinks: bool = False  # each head has a score that joins its softmax and has no value
    score_scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    embedding_scale: float = 1.0  # of embedded tokens, rounded to the model's type
    tied_embeddings: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None  # attention over latents; `kv_heads` is then `heads`, `head_dim` a query's whole width
    mtp_layers: int = (
        0  # the checkpoint's layers after the last that predict further tokens; only a proposer loads them
    )
    windows: tuple[int | None, ...] = ()  # for each layer how many last tokens it sees; None and () are all
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} attention windows are given for {self.layers} layers")
        if self.moe is not None and len(self.moe.sparse) != self.layers:
            raise ValueError(f"experts are told of {len(self.moe.sparse)} layers of {self.layers}")

    def window(self, layer: int) -> int | None:
        """How many tokens, its own included, a token of this layer attends to; None is all before it."""
        return self.windows[layer] if self.windows else None

    def kv_layers(self, dtype: str) -> tuple[LayerKV, ...]:
        """What each layer keeps per token when KV is stored as `dtype`: a float type, or int8 with scales beside it."""
        if self.mla is not None:
            layer = mla(self.mla.kv_rank, self.mla.rope_dim, dtype)
        elif dtype == "int8":
            layer = gqa_int8(self.kv_heads, self.head_dim)
        else:
            layer = gqa(self.kv_heads, self.head_dim, dtype)
        return (layer,) * self.layers

    def rope_is_long(self, total_tokens: int) -> bool:
        """True if a request rotates by LongRoPE's long factors; always False for other models.

        `total_tokens` is the prompt's length plus the most output tokens the request may produce. The choice is made
        once, before prefill, and holds for the request's life: KV rotated one way cannot be read the other way.
        """
        return 0 < self.long_rope_after < total_tokens

    @property
    def long_rope_after(self) -> int:
        """Tokens of a request beyond which it rotates by LongRoPE's long factors; 0 for other models."""
        return (self.rope.long_after or 0) if self.rope is not None else 0
