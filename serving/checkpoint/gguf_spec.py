"""From a GGUF file's metadata to a ModelSpec. Knows the keys llama.cpp's converters write, and no tensors' values but
the rope factors, which they store as tensors.
"""

from __future__ import annotations

from typing import Any

from serving.checkpoint.gguf_file import GgufFile
from serving.model.rope import Rope, default_frequencies, divided, from_parameters, longrope_magnitude
from serving.model.spec import ModelSpec

_ROPE_MODELS = ("llama", "qwen2", "qwen3", "phi3")
_EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """The spec of the model in `file`. Raises ValueError for an architecture or variant that is not covered."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in (*_ROPE_MODELS, "gpt2"):
        known = ", ".join((*_ROPE_MODELS, "gpt2"))
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported are {known}")
    keys = _Keys(file.metadata, architecture)
    if int(keys.get("expert_count", 0)):
        raise ValueError("this GGUF is a mixture of experts, which is not supported")
    hidden, heads, layers = int(keys["embedding_length"]), int(keys["attention.head_count"]), int(keys["block_count"])
    head_dim = int(keys.get("attention.key_length", hidden // heads))
    window = keys.get("attention.sliding_window", None)
    is_gpt2 = architecture == "gpt2"
    return ModelSpec(
        architecture=architecture,
        vocab_size=file.shape("token_embd.weight")[0],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(keys.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(keys["feed_forward_length"]),
        max_position=int(keys["context_length"]),
        norm="layernorm" if is_gpt2 else "rms",
        norm_eps=float(keys["attention.layer_norm_epsilon" if is_gpt2 else "attention.layer_norm_rms_epsilon"]),
        mlp="gelu_tanh" if is_gpt2 else "gated_silu",
        rope=None if is_gpt2 else _rope(file, keys, head_dim),
        learned_positions=is_gpt2,
        qkv_bias=any(name in file.names for name in ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        o_bias="blk.0.attn_output.bias" in file.names,
        mlp_bias="blk.0.ffn_down.bias" in file.names,
        qk_norm="blk.0.attn_q_norm.weight" in file.names,
        tied_embeddings="output.weight" not in file.names,
        windows=(int(window),) * layers if window else (),
        eos_token_ids=tuple(dict.fromkeys(file.metadata[key] for key in _EOS_KEYS if key in file.metadata)),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


class _Keys:
    """Metadata of one architecture: `block_count` is `llama.block_count`."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self._metadata, self._architecture = metadata, architecture

    def __getitem__(self, key: str) -> Any:
        full = f"{self._architecture}.{key}"
        if full not in self._metadata:
            raise ValueError(f"the GGUF file's metadata has no {full}")
        return self._metadata[full]

    def get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)


def _rope(file: GgufFile, keys: _Keys, head_dim: int) -> Rope:
    theta = float(keys.get("rope.freq_base", 10000.0))
    rotary_dim = int(keys.get("rope.dimension_count", head_dim))
    max_position = int(keys["context_length"])
    base = default_frequencies(theta, rotary_dim)
    original = keys.get("rope.scaling.original_context_length", None)
    if "rope_freqs.weight" in file.names:  # Llama 3's scaling, worked out by the converter
        return divided(base, file.read("rope_freqs.weight").tolist())
    if "rope_factors_long.weight" in file.names:
        original = int(original or max_position)
        return divided(
            base,
            file.read("rope_factors_short.weight").tolist(),
            long_factors=file.read("rope_factors_long.weight").tolist(),
            long_after=original,
            magnitude=float(
                keys.get("rope.scaling.attn_factor", longrope_magnitude(max_position / original, original))
            ),
        )
    kind = keys.get("rope.scaling.type", "none")
    parameters = {} if kind == "none" else {"rope_type": kind, "factor": keys["rope.scaling.factor"]}
    return from_parameters(
        parameters, theta=theta, rotary_dim=rotary_dim, max_position=max_position, original_max_position=original
    )
