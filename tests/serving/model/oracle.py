"""Tiny random models of every architecture, saved by `transformers`, and what `transformers` says they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.serving.model.gguf_writing import LLAMA_NAMES

VOCAB = 96
LONGROPE_ORIGINAL = 24  # prompts on both sides of it are used

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,  # one of the four pairs is kept, one blended, two stretched
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0],
}
QWEN_MOE = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "rms_norm_eps": 1e-2,
}
DEEPSEEK = COMMON | {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-2,
    "kv_lora_rank": 40,  # expanded from 5 new tokens on at most, which schedules mix with fewer
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN_MLA = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.9,
    "mscale_all_dim": 1.3,
    "beta_fast": 4,
}
GEMMA3 = COMMON | {
    "head_dim": 12,
    "rms_norm_eps": 1e-2,
    "query_pre_attn_scalar": 7,
    "sliding_window": 9,
    "tie_word_embeddings": False,
}
GPT_OSS = COMMON | {
    "head_dim": 12,
    "rms_norm_eps": 1e-2,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "swiglu_alpha": 1.1,
    "swiglu_limit": 0.9,  # which clamps more than a tenth of what there is
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def configs() -> dict[str, PreTrainedConfig]:
    """Architecture → a tiny config that exercises what is peculiar to it."""
    theta = {"rope_theta": 10000.0, "rope_type": "default"}
    phi3 = COMMON | {"hidden_size": 32, "head_dim": 8}
    return {
        "deepseek_v2_lite": DeepseekV2Config(**DEEPSEEK, q_lora_rank=None, rope_parameters=theta, topk_method="greedy"),
        "deepseek_v2": DeepseekV2Config(
            **DEEPSEEK,
            **GROUPS,
            q_lora_rank=24,
            rope_parameters=YARN_MLA,
            topk_method="group_limited_greedy",
            routed_scaling_factor=4.0,
        ),
        "deepseek_v3": DeepseekV3Config(**DEEPSEEK, **GROUPS, q_lora_rank=24, rope_parameters=YARN_MLA),
        "deepseek_v3_plain": DeepseekV3Config(
            **DEEPSEEK | {"tie_word_embeddings": True},
            **GROUPS,
            q_lora_rank=24,
            rope_parameters=theta,
            rope_interleave=False,
            norm_topk_prob=False,
            attention_bias=True,
        ),
        "gemma3": Gemma3TextConfig(
            **GEMMA3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        ),
        "gemma3_biased": Gemma3TextConfig(
            **GEMMA3 | {"tie_word_embeddings": True}, attention_bias=True, sliding_window_pattern=2
        ),
        "gpt_oss": GptOssConfig(
            **GPT_OSS,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_bias=False,
            rope_parameters=YARN | {"truncate": False, "rope_theta": 70.0},
        ),
        "gpt_oss_biased": GptOssConfig(**GPT_OSS, rope_parameters=theta | {"rope_theta": 500.0}),
        "llama2": LlamaConfig(**COMMON | {"num_key_value_heads": 4}, rope_parameters=theta),
        "llama3": LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
        "llama_biased": LlamaConfig(**COMMON, rope_parameters=theta, attention_bias=True, mlp_bias=True),
        "llama_linear": LlamaConfig(**COMMON, rope_parameters=theta | {"rope_type": "linear", "factor": 3.0}),
        "smollm2": LlamaConfig(
            **COMMON | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
            rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
            tie_word_embeddings=True,
        ),
        "mistral": MistralConfig(**COMMON, head_dim=16, sliding_window=9, rope_parameters=theta),
        "mixtral": MixtralConfig(
            **COMMON, rms_norm_eps=1e-2, rope_parameters=theta, num_local_experts=5, num_experts_per_tok=3
        ),
        "mixtral_windows": MixtralConfig(**COMMON, sliding_window=9, rope_parameters=theta),
        "qwen2": Qwen2Config(**COMMON, rope_parameters=theta | {"rope_theta": 1e6}),
        "qwen2_windows": Qwen2Config(
            **COMMON, rope_parameters=theta, use_sliding_window=True, sliding_window=6, max_window_layers=1
        ),
        "qwen2_yarn": Qwen2Config(**COMMON, rope_parameters=YARN),
        "qwen3": Qwen3Config(**COMMON, head_dim=12, rope_parameters=theta, tie_word_embeddings=True),
        "qwen3_moe": Qwen3MoeConfig(**COMMON, **QWEN_MOE, rope_parameters=theta, norm_topk_prob=True),
        "qwen3_moe_dense": Qwen3MoeConfig(
            **COMMON, **QWEN_MOE, rope_parameters=theta, mlp_only_layers=[1], tie_word_embeddings=True
        ),
        "phi3": Phi3Config(**COMMON, sliding_window=11, rope_parameters=theta),
        "phi3_partial": Phi3Config(
            **COMMON | {"tie_word_embeddings": True}, rope_parameters=theta | {"partial_rotary_factor": 0.5}
        ),
        "phi3_longrope": Phi3Config(
            **phi3, original_max_position_embeddings=LONGROPE_ORIGINAL, rope_parameters=LONGROPE
        ),
        "opt": OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            dropout=0.0,
        ),
        "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    }


def from_config(config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()  # type: ignore[no-untyped-call]
    return model


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose every weight matters: matrices keep the scale of their input, norms and biases are not trivial."""
    model = from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise if "embed" in name or "wte" in name else noise * 1.3 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # below 0 nearly everywhere, as scores are not
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3 - 1.0)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def expected_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[len(tokens), V], from one forward pass without a cache."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0].float()


def smollm2(path: Path) -> PreTrainedModel:
    """SmolLM2-135M-Instruct in float32, from its GGUF file as the `gguf` package reads it."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = from_config(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    # to_empty leaves computed buffers undefined too
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, leaf = name.rsplit(".", 1)
            inner = module.split(".", 3)[3] if ".layers." in module else module
            prefix = f"blk.{module.split('.')[2]}." if ".layers." in module else ""
            value = torch.tensor(stored[f"{prefix}{LLAMA_NAMES[inner]}.{leaf}"])
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs back to halves
                value = value.view(-1, 32, 2, 576).transpose(1, 2).reshape(value.shape)
            parameter.copy_(value)
    return model
