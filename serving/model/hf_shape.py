"""What readers of Hugging Face configs share: the shape of Llama's kin, rope, windows, and refusals. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serving.model.rope import Rope, from_parameters
from serving.model.spec import ModelSpec

LAYER_TYPES = ("full_attention", "sliding_attention")


def llama_shape(config: Mapping[str, Any], *, head_dim: int | None = None, norm_eps: float = 1e-6) -> ModelSpec:
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
        rope=rope_of(config, head_dim),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def rope_of(config: Mapping[str, Any], head_dim: int) -> Rope:
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


def one_of(config: Mapping[str, Any], key: str, known: tuple[Any, ...]) -> Any:
    """The value at `key`, by default the first of those `known`. Raises ValueError for any other."""
    value = config.get(key, known[0])
    if value not in known:
        supported = " and ".join(map(repr, known))
        raise ValueError(f"{key} {value!r} is not supported for {config['model_type']}; supported is {supported}")
    return value


def same_window(spec: ModelSpec, window: int | None) -> tuple[int | None, ...]:
    return () if window is None else (int(window),) * spec.layers


def layer_kinds(config: Mapping[str, Any], default: Sequence[bool]) -> list[bool]:
    """For each layer whether it has a window: as `layer_types` says, else by `default`."""
    kinds = config.get("layer_types")
    if kinds is None:
        return list(default)
    for kind in kinds:
        one_of({"layer_types": kind, "model_type": config["model_type"]}, "layer_types", LAYER_TYPES)
    return [kind == "sliding_attention" for kind in kinds]


def qwen_windows(config: Mapping[str, Any], spec: ModelSpec) -> tuple[int | None, ...]:
    """Qwen's windows are off unless `use_sliding_window`, and then begin at layer `max_window_layers`."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", False) or window is None:
        return ()
    first = int(config.get("max_window_layers", 28))
    kinds = layer_kinds(config, [layer >= first for layer in range(spec.layers)])
    return tuple(int(window) if sliding else None for sliding in kinds)
