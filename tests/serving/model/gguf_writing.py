"""Writes `transformers` models as GGUF files with the names, orders and metadata that llama.cpp's converters use."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def permuted(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from halves to adjacent pairs, as the converter stores llama's q and k."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """GGUF name → float32 values, rows as they are stored."""
    config = model.config
    names = GPT2_NAMES if config.model_type == "gpt2" else LLAMA_NAMES
    found: dict[str, NDArray[np.float32]] = {}
    for name, parameter in model.named_parameters():
        module, leaf = name.rsplit(".", 1)
        value = parameter.detach().float().numpy()
        if ".layers." in module or ".h." in module:
            _, _, layer, inner = module.split(".", 3)
            target = f"blk.{layer}.{names[inner]}.{leaf}"
            if config.model_type == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                is_query = inner.endswith("q_proj")
                value = permuted(value, config.num_attention_heads if is_query else config.num_key_value_heads)
            if config.model_type == "gpt2" and inner in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
                value = value.T
        else:
            target = f"{names[module]}.{leaf}"
        found[target] = np.ascontiguousarray(value)
    return found | _rope_factors(model)


def _rope_factors(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    parameters = getattr(model.config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "llama3":
        used = model.model.rotary_emb.inv_freq
        base = parameters["rope_theta"] ** (-torch.arange(len(used)) / len(used))
        return {"rope_freqs.weight": (base / used).float().numpy()}
    if parameters.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(parameters[f"{length}_factor"], dtype=np.float32)
            for length in ("short", "long")
        }
    return {}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    raw: dict[str, NDArray[np.uint8]] | None = None,
) -> Path:
    """Write `model`; its matrices are stored as `kind`, or are the already quantized bytes of `raw`."""
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])
    writer.add_token_scores([0.5] * config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        _add_rope_model(writer, model)
    for name, value in gguf_tensors(model).items():
        if raw is not None and name in raw:
            writer.add_tensor(name, raw[name], raw_dtype=kind)
        elif value.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope_model(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config, rope = model.config, model.config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
