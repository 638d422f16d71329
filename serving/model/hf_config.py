"""From a Hugging Face config.json to a ModelSpec. No torch here: routers, planners and simulators read configs too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from serving.model.hf_experts import deepseek_v2, deepseek_v3, gpt_oss, mixtral, qwen3_moe
from serving.model.hf_shape import layer_kinds, llama_shape, one_of, qwen_windows, rope_of, same_window
from serving.model.quantization_config import check_config
from serving.model.rope import Rope
from serving.model.spec import MlpKind, ModelSpec

PLAIN_MLPS: dict[str, MlpKind] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def spec_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a checkpoint's `config.json` and, when there is one, `generation_config.json`.

    Raises ValueError, with what to do next, for an architecture or a variant this decoder does not cover.
    """
    config = _of_text(config)
    kind = config.get("model_type")
    read = _READERS.get(str(kind))
    if read is None:
        known = ", ".join(sorted(_READERS))
        raise ValueError(f"architecture {kind!r} is not supported; choose a model whose model_type is one of {known}")
    check_config(config.get("quantization_config"), _DEQUANTIZED.get(str(kind), ()))
    try:
        spec = read(config)
    except KeyError as missing:
        raise ValueError(f"config.json of this {kind} model has no {missing}") from None
    ending = generation_config or {}
    eos = ending.get("eos_token_id", config.get("eos_token_id"))
    return replace(spec, eos_token_ids=_token_ids(eos), bos_token_id=config.get("bos_token_id"))


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config of several models, for images and for text, says of the one for text."""
    text = config.get("text_config") or {}
    return {**text, **{key: value for key, value in config.items() if key not in text or value is not None}}


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _llama(config: Mapping[str, Any]) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(llama_shape(config), qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def _mistral(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama_shape(config)
    return replace(spec, windows=same_window(spec, config.get("sliding_window", 4096)))


def _phi3(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama_shape(config, norm_eps=1e-5)
    return replace(spec, windows=same_window(spec, config.get("sliding_window")))


def _qwen2(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama_shape(config)
    return replace(spec, qkv_bias=True, windows=qwen_windows(config, spec))


def _qwen3(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama_shape(config, head_dim=128)
    bias = bool(config.get("attention_bias", False))
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=qwen_windows(config, spec))


def _gemma3(config: Mapping[str, Any]) -> ModelSpec:
    """The text model alone. Its defaults are those of `transformers`: published files leave most keys out."""
    one_of(config, "hidden_activation", ("gelu_pytorch_tanh",))
    one_of(config, "use_bidirectional_attention", (False, None))
    for capped in ("attn_logit_softcapping", "final_logit_softcapping"):
        one_of(config, capped, (None,))
    shape = llama_shape({**_GEMMA3_DEFAULTS, **config, **_GEMMA3_OWN}, head_dim=256)
    everywhere, in_windows = _gemma3_ropes(config, shape)
    window, every = int(config.get("sliding_window", 4096)), int(config.get("sliding_window_pattern", 6))
    kinds = layer_kinds(config, [(layer + 1) % every != 0 for layer in range(shape.layers)])
    bias = bool(config.get("attention_bias", False))
    return replace(
        shape,
        norm="rms_offset",
        mlp="gated_gelu_tanh",
        rope=everywhere,
        window_rope=in_windows,
        windows=tuple(window if sliding else None for sliding in kinds),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        post_norms=True,
        score_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        embedding_scale=shape.hidden**0.5,
    )


def _gemma3_ropes(config: Mapping[str, Any], shape: ModelSpec) -> tuple[Rope, Rope]:
    """Of layers that see everything, and of those with a window."""
    parameters = config.get("rope_parameters") or {
        "full_attention": {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})},
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", 1e4)},
    }
    shared = {"max_position_embeddings": shape.max_position}
    found = []
    for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        given = {"rope_theta": theta, **(parameters.get(kind) or {})}
        found.append(rope_of({**shared, "rope_parameters": given}, shape.head_dim))
    return found[0], found[1]


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


_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_GEMMA3_OWN = {"hidden_act": "silu", "rope_parameters": None, "rope_scaling": None}  # are read apart
_DEQUANTIZED = {"gpt_oss": ("mxfp4",)}
_READERS: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt_oss": gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": qwen3_moe,
    "phi3": _phi3,
    "opt": _opt,
    "gpt2": _gpt2,
}
