"""Writes a quantized decoder as a Hugging Face folder in the `compressed-tensors` convention.

Weights and config.json only; tokenizer files are brought by the caller. `serving.loader.loading` reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from serving.checkpoint.weights import Part, destinations
from serving.model.decoder import Decoder
from serving.model.hf_config import spec_from_hf
from serving.model.mla import KvExpansion
from serving.model.quantization_config import int8_config
from serving.model.quantized_linear import QuantizedLinear
from serving.model.rope import default_frequencies
from serving.model.spec import ModelSpec

_CLASSES = {name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Phi3")}


def write_model(model: Decoder, config: Mapping[str, Any], out: Path) -> None:
    """Write `model` to `out`/model.safetensors, and its Hugging Face `config` with the quantization to config.json."""
    tied = model.spec.tied_embeddings and not isinstance(model.head, QuantizedLinear)
    quantized = int8_config(_ignored(model), _rotations(model))
    written = dict(config) | {"tie_word_embeddings": tied, "quantization_config": quantized}
    written["dtype"] = str(model.norm.weight.dtype).removeprefix("torch.")
    written.pop("torch_dtype", None)
    save_file(stored_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def stored_tensors(model: Decoder) -> dict[str, Tensor]:
    """Every tensor of the checkpoint: scales float32 [out, 1], weights int8, all else in the model's own type."""
    dtype = model.norm.weight.dtype
    tied = model.spec.tied_embeddings and not isinstance(model.head, QuantizedLinear)
    parameters = {
        name: parameter.detach().cpu()
        for name, parameter in model.named_parameters()
        if not (tied and name.startswith("head."))
    }
    stored = {}
    for name, parts in destinations(model.spec, parameters).items():
        value = parameters[name]
        if name.endswith(".scale"):
            value = value[:, None]
        elif value.is_floating_point() and not name.endswith(".correction"):
            value = value.to(dtype)
        sizes = [len(value) if part.rows is None else part.rows for part in parts]
        for part, rows in zip(parts, torch.split(value, sizes), strict=True):
            rows = _as_stored(rows, part)
            stored[part.name] = (rows.t() if part.transposed else rows).contiguous()
    return stored


def _as_stored(rows: Tensor, part: Part) -> Tensor:
    """The rows with the halves of rope pairs beside each other, where checkpoints have them so."""
    if not part.paired_heads:
        return rows
    heads = rows.reshape(part.paired_heads, -1, *rows.shape[1:])
    count = part.paired_rows or heads.shape[1]
    alone, halves = torch.split(heads, [heads.shape[1] - count, count], dim=1)
    paired = halves.reshape(len(heads), 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(halves.shape)
    return torch.cat((alone, paired), dim=1).reshape(rows.shape)


def _ignored(model: Decoder) -> list[str]:
    """The linear modules that are not INT8, by their names in the checkpoint."""
    wide = (nn.Linear, KvExpansion)
    kept = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, wide)]
    return [part.name.removesuffix(".weight") for parts in destinations(model.spec, kept).values() for part in parts]


def _rotations(model: Decoder) -> dict[str, int]:
    """The rotations of INT8 modules, by their names in the checkpoint."""
    rotations = {
        f"{name}.weight": module.rotation
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and module.rotation
    }
    stored = destinations(model.spec, rotations)
    return {part.name.removesuffix(".weight"): rotations[name] for name, parts in stored.items() for part in parts}


def config_from_spec(spec: ModelSpec, theta: float) -> dict[str, Any]:
    """A Hugging Face config.json for a model read from a GGUF file whose rope has the base `theta`.

    Raises ValueError for what a config cannot be made for: other families than Llama's kin, and scaled rope, whose
    parameters a GGUF file does not hold.
    """
    hint = "use its Hugging Face folder"
    if spec.architecture not in _CLASSES or spec.rope is None:
        raise ValueError(f"no config.json can be made for a {spec.architecture} model from GGUF; {hint}")
    pairs = len(spec.rope.frequencies)
    plain = default_frequencies(theta, 2 * pairs)
    if spec.rope.long_frequencies is not None or spec.rope.frequencies != plain:
        raise ValueError(f"no config.json can be made for scaled rope from GGUF; {hint}")
    config = {
        "architectures": [_CLASSES[spec.architecture]],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "partial_rotary_factor": 2 * pairs / spec.head_dim,
        "attention_bias": spec.o_bias,
        "mlp_bias": spec.mlp_bias,
        "sliding_window": spec.windows[0] if spec.windows else None,
        "use_sliding_window": bool(spec.windows),
        "max_window_layers": 0,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
    }
    if spec_from_hf(config) != spec:
        raise ValueError(f"no config.json says all of this {spec.architecture} model from GGUF; {hint}")
    return config
