"""From the Hugging Face configs of mixtures of experts to a ModelSpec, family by family. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serving.model.hf_shape import layer_kinds, llama_shape, one_of, qwen_windows, rope_of, same_window
from serving.model.mla_spec import MlaSpec
from serving.model.moe_spec import ClampedSwiglu, MoeSpec
from serving.model.rope import yarn_scale
from serving.model.spec import ModelSpec

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def mixtral(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama_shape({"rope_theta": 1e6, **config}, norm_eps=1e-5)
    moe = MoeSpec(
        experts=int(config.get("num_local_experts", 8)),
        top_k=int(config.get("num_experts_per_tok", 2)),
        intermediate=spec.intermediate,
        sparse=(True,) * spec.layers,
    )
    return replace(spec, moe=moe, windows=same_window(spec, config.get("sliding_window")))


def qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama_shape(config)
    dense, step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step", 1))
    moe = MoeSpec(
        experts=int(config.get("num_experts", config.get("num_local_experts", 128))),
        top_k=int(config.get("num_experts_per_tok", 8)),
        intermediate=int(config.get("moe_intermediate_size", 768)),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(spec.layers)),
        normalized=bool(config.get("norm_topk_prob", False)),
    )
    bias = bool(config.get("attention_bias", False))
    windows = qwen_windows(config, spec)
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, moe=moe, windows=windows)


def gpt_oss(config: Mapping[str, Any]) -> ModelSpec:
    """A softmax over the chosen experts alone is the one over all, scaled to a sum of 1."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or _GPT_OSS_ROPE
    rope = {"rope_theta": config.get("rope_theta", 150000.0), **given}
    defaults = {"max_position_embeddings": 131072}
    shape = llama_shape({**defaults, **config, "rope_parameters": rope}, head_dim=64, norm_eps=1e-5)
    clamped = ClampedSwiglu(
        alpha=float(config.get("swiglu_alpha", 1.702)), limit=float(config.get("swiglu_limit", 7.0))
    )
    moe = MoeSpec(
        experts=int(config.get("num_local_experts", 128)),
        top_k=int(config.get("num_experts_per_tok", 4)),
        intermediate=shape.intermediate,
        sparse=(True,) * shape.layers,
        bias=True,
        product=clamped,
    )
    window, bias = int(config.get("sliding_window", 128)), bool(config.get("attention_bias", True))
    kinds = layer_kinds(config, [layer % 2 == 0 for layer in range(shape.layers)])
    windows = tuple(window if sliding else None for sliding in kinds)
    return replace(shape, moe=moe, windows=windows, sinks=True, qkv_bias=bias, o_bias=bias)


def deepseek_v2(config: Mapping[str, Any]) -> ModelSpec:
    """Weights that are normalized are not scaled, as in the models' own code; `transformers` never normalizes."""
    method = one_of(config, "topk_method", ("greedy", "group_limited_greedy"))
    one_of(config, "scoring_func", ("softmax",))
    normalized = bool(config.get("norm_topk_prob", False)) and int(config.get("num_experts_per_tok") or 1) > 1
    grouped = method == "group_limited_greedy"
    return _deepseek(
        config,
        normalized=normalized,
        scaling=1.0 if normalized else float(config.get("routed_scaling_factor", 1.0)),
        groups=int(config["n_group"]) if grouped else 1,
        top_groups=int(config["topk_group"]) if grouped else 1,
    )


def deepseek_v3(config: Mapping[str, Any]) -> ModelSpec:
    one_of(config, "topk_method", ("noaux_tc",))
    one_of(config, "scoring_func", ("sigmoid",))
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
    one_of(config, "mlp_bias", (False,))
    bias, q_rank = bool(config.get("attention_bias", False)), config.get("q_lora_rank")
    if bias and q_rank is None:
        raise ValueError("attention_bias without q_lora_rank is not supported")
    nope, turned = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    shape = llama_shape({**config, "head_dim": nope + turned, "num_key_value_heads": config["num_attention_heads"]})
    mla = MlaSpec(
        kv_rank=int(config["kv_lora_rank"]),
        q_rank=None if q_rank is None else int(q_rank),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=int(config["v_head_dim"]),
        scale=(nope + turned) ** -0.5 * _score_growth(config),
        interleaved=bool(config.get("rope_interleave", True)),
    )
    spec = replace(shape, rope=rope_of(config, turned), mla=mla, qkv_bias=bias, o_bias=bias)
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
