"""What a decoder looks like, as data: widths, norms, rope, biases; the same for every architecture.

It reads a Hugging Face config and may not import torch: routers, planners and simulators use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from serving.kvspec import LayerKV, gqa, gqa_int8, mla
from serving.model.mla_spec import MlaSpec
from serving.model.moe_spec import MoeSpec
from serving.model.quantization_config import check_config
from serving.model.rope import Rope, from_parameters, yarn_scale

NormKind = Literal["rms", "layernorm"]
MlpKind = Literal["gated_silu", "gelu", "gelu_tanh", "relu"]

PLAIN_MLPS: dict[str, MlpKind] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


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
    learned_positions: bool = False
    position_offset: int = 0  # OPT's table of learned positions starts at row 2
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before rope
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

    @staticmethod
    def from_hf_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
        """Read a checkpoint's `config.json` and, when there is one, `generation_config.json`.

        Raises ValueError, with what to do next, for an architecture or a variant this decoder does not cover.
        """
        kind = config.get("model_type")
        read = _READERS.get(str(kind))
        if read is None:
            known = ", ".join(sorted(_READERS))
            raise ValueError(
                f"architecture {kind!r} is not supported; choose a model whose model_type is one of {known}"
            )
        check_config(config.get("quantization_config"))
        try:
            spec = read(config)
        except KeyError as missing:
            raise ValueError(f"config.json of this {kind} model has no {missing}") from None
        ending = generation_config or {}
        eos = ending.get("eos_token_id", config.get("eos_token_id"))
        return replace(spec, eos_token_ids=_token_ids(eos), bos_token_id=config.get("bos_token_id"))


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _llama_shape(config: Mapping[str, Any], *, head_dim: int | None = None, norm_eps: float = 1e-6) -> ModelSpec:
    """Fields all rope, RMS-norm, gated-MLP models share; `head_dim` and `norm_eps` are the family's defaults."""
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"activation {config['hidden_act']!r} is not supported for {config['model_type']}; only silu is"
        )
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or head_dim or hidden // heads)
    return ModelSpec(
        architecture=config["model_type"],
        vocab_size=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["intermediate_size"]),
        max_position=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", norm_eps)),
        rope=_rope(config, head_dim),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Checkpoints up to 2025 say `rope_theta` and `rope_scaling`, later ones put both into `rope_parameters`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return from_parameters(
        parameters,
        theta=float(parameters.get("rope_theta", config.get("rope_theta", 10000.0))),
        rotary_dim=int(head_dim * share),
        max_position=int(config["max_position_embeddings"]),
        original_max_position=config.get("original_max_position_embeddings"),
    )


def _llama(config: Mapping[str, Any]) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(_llama_shape(config), qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def _mistral(config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama_shape(config)
    return replace(spec, windows=_same_window(spec, config.get("sliding_window", 4096)))


def _phi3(config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama_shape(config, norm_eps=1e-5)
    return replace(spec, windows=_same_window(spec, config.get("sliding_window")))


def _qwen2(config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama_shape(config)
    return replace(spec, qkv_bias=True, windows=_qwen_windows(config, spec))


def _qwen3(config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama_shape(config, head_dim=128)
    bias = bool(config.get("attention_bias", False))
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=_qwen_windows(config, spec))


def _mixtral(config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama_shape({"rope_theta": 1e6, **config}, norm_eps=1e-5)
    moe = MoeSpec(
        experts=int(config.get("num_local_experts", 8)),
        top_k=int(config.get("num_experts_per_tok", 2)),
        intermediate=spec.intermediate,
        sparse=(True,) * spec.layers,
    )
    return replace(spec, moe=moe, windows=_same_window(spec, config.get("sliding_window")))


def _qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama_shape(config)
    dense, step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step", 1))
    moe = MoeSpec(
        experts=int(config.get("num_experts", config.get("num_local_experts", 128))),
        top_k=int(config.get("num_experts_per_tok", 8)),
        intermediate=int(config.get("moe_intermediate_size", 768)),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(spec.layers)),
        normalized=bool(config.get("norm_topk_prob", False)),
    )
    bias = bool(config.get("attention_bias", False))
    windows = _qwen_windows(config, spec)
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, moe=moe, windows=windows)


def _deepseek_v2(config: Mapping[str, Any]) -> ModelSpec:
    """Weights that are normalized are not scaled, as in the models' own code; `transformers` never normalizes."""
    method = _one_of(config, "topk_method", ("greedy", "group_limited_greedy"))
    _one_of(config, "scoring_func", ("softmax",))
    normalized = bool(config.get("norm_topk_prob", False)) and int(config.get("num_experts_per_tok") or 1) > 1
    grouped = method == "group_limited_greedy"
    return _deepseek(
        config,
        normalized=normalized,
        scaling=1.0 if normalized else float(config.get("routed_scaling_factor", 1.0)),
        groups=int(config["n_group"]) if grouped else 1,
        top_groups=int(config["topk_group"]) if grouped else 1,
    )


def _deepseek_v3(config: Mapping[str, Any]) -> ModelSpec:
    _one_of(config, "topk_method", ("noaux_tc",))
    _one_of(config, "scoring_func", ("sigmoid",))
    spec = _deepseek(
        config,
        normalized=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor", 2.5)),
        groups=int(config.get("n_group", 8)),
        top_groups=int(config.get("topk_group", 4)),
        group_best=2,
        scoring="sigmoid",
        biased=True,
    )
    extra = int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or 0)
    return replace(spec, mtp_layers=extra)


def _deepseek(config: Mapping[str, Any], **routing: Any) -> ModelSpec:
    """What DeepSeek-V2 and V3 share: latent attention, leading dense layers, shared experts, a router in float32."""
    _one_of(config, "mlp_bias", (False,))
    bias, q_rank = bool(config.get("attention_bias", False)), config.get("q_lora_rank")
    if bias and q_rank is None:
        raise ValueError("attention_bias without q_lora_rank is not supported")
    nope, turned = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    shape = _llama_shape({**config, "head_dim": nope + turned, "num_key_value_heads": config["num_attention_heads"]})
    mla = MlaSpec(
        kv_rank=int(config["kv_lora_rank"]),
        q_rank=None if q_rank is None else int(q_rank),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=int(config["v_head_dim"]),
        scale=(nope + turned) ** -0.5 * _score_growth(config),
        interleaved=bool(config.get("rope_interleave", True)),
    )
    spec = replace(shape, rope=_rope(config, turned), mla=mla, qkv_bias=bias, o_bias=bias)
    if config.get("n_routed_experts") is None:
        return spec
    first, step = int(config.get("first_k_dense_replace", 0)), int(config.get("moe_layer_freq", 1))
    width = int(config["moe_intermediate_size"])
    moe = MoeSpec(
        experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate=width,
        sparse=tuple(layer >= first and layer % step == 0 for layer in range(spec.layers)),
        shared_intermediate=width * int(config.get("n_shared_experts") or 0),
        router_float32=True,
        **routing,
    )
    return replace(spec, moe=moe)


def _score_growth(config: Mapping[str, Any]) -> float:
    """What DeepSeek multiplies scores by for YaRN's sake, beside the magnitude of cos and sin."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = parameters.get("mscale_all_dim", 0)
    if parameters.get("rope_type", parameters.get("type", "default")) in ("default", None) or not weight:
        return 1.0
    return yarn_scale(float(parameters["factor"]), float(weight)) ** 2


def _one_of(config: Mapping[str, Any], key: str, known: tuple[Any, ...]) -> Any:
    """The value at `key`, by default the first of those `known`. Raises ValueError for any other."""
    value = config.get(key, known[0])
    if value not in known:
        supported = " and ".join(map(repr, known))
        raise ValueError(f"{key} {value!r} is not supported for {config['model_type']}; supported is {supported}")
    return value


def _same_window(spec: ModelSpec, window: int | None) -> tuple[int | None, ...]:
    return () if window is None else (int(window),) * spec.layers


def _qwen_windows(config: Mapping[str, Any], spec: ModelSpec) -> tuple[int | None, ...]:
    """Qwen's windows are off unless `use_sliding_window`, and then begin at layer `max_window_layers`."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", False) or window is None:
        return ()
    first = int(config.get("max_window_layers", 28))
    default = ["full_attention" if layer < first else "sliding_attention" for layer in range(spec.layers)]
    kinds = config.get("layer_types") or default
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _opt(config: Mapping[str, Any]) -> ModelSpec:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if not config.get("do_layer_norm_before", True) or config.get("_remove_final_layer_norm", False):
        raise ValueError("this OPT variant normalizes after its blocks (as OPT-350M does), which is not supported")
    if int(config.get("word_embed_proj_dim") or hidden) != hidden:
        raise ValueError("this OPT variant projects its word embeddings (word_embed_proj_dim), which is not supported")
    if not config.get("layer_norm_elementwise_affine", True):
        raise ValueError("this OPT variant has layer norms without weights, which is not supported")
    bias = bool(config.get("enable_bias", True))
    return ModelSpec(
        architecture="opt",
        vocab_size=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(config["ffn_dim"]),
        max_position=int(config["max_position_embeddings"]),
        norm="layernorm",
        norm_eps=1e-5,
        mlp=_plain_mlp(config.get("activation_function", "relu")),
        learned_positions=True,
        position_offset=2,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def _gpt2(config: Mapping[str, Any]) -> ModelSpec:
    hidden, heads = int(config["n_embd"]), int(config["n_head"])
    if config.get("scale_attn_by_inverse_layer_idx", False) or not config.get("scale_attn_weights", True):
        raise ValueError("this GPT-2 variant scales its attention by layer or not at all, which is not supported")
    return ModelSpec(
        architecture="gpt2",
        vocab_size=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(config.get("n_inner") or 4 * hidden),
        max_position=int(config["n_positions"]),
        norm="layernorm",
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        mlp=_plain_mlp(config.get("activation_function", "gelu_new")),
        learned_positions=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def _plain_mlp(activation: str) -> MlpKind:
    if activation not in PLAIN_MLPS:
        raise ValueError(f"activation {activation!r} is not supported; supported are {', '.join(PLAIN_MLPS)}")
    return PLAIN_MLPS[activation]


_READERS: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "phi3": _phi3,
    "opt": _opt,
    "gpt2": _gpt2,
}
