"""Reading configs: what a ModelSpec says of real checkpoints, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from serving.model.hf_config import spec_from_hf
from serving.model.moe_spec import ClampedSwiglu, MoeSpec
from serving.model.rope import Rope, default_frequencies, divided

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def test_spec_needs_no_torch() -> None:
    code = "import sys, serving.model.hf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kv_of_smollm2() -> None:
    layers = spec_from_hf(LLAMA).kv_layers("bfloat16")
    assert len(layers) == 30
    assert sum(layer.token_bytes for layer in layers) == 30 * 2 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 9]}, (7, 9))],
)
def test_generation_config_decides_the_ending(generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert spec_from_hf(LLAMA, generation).eos_token_ids == expected


def test_old_and_new_rope_keys_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling | {"type": "llama3"}}
    new = LLAMA | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 500000.0}}
    assert spec_from_hf(old) == spec_from_hf(new)
    assert spec_from_hf(old) != spec_from_hf(LLAMA)


def test_long_rope_is_chosen_by_the_whole_request() -> None:
    phi3 = LLAMA | {
        "model_type": "phi3",
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
    }
    spec = spec_from_hf(phi3)
    assert not spec.rope_is_long(4096)
    assert spec.rope_is_long(4097)
    assert not spec_from_hf(LLAMA).rope_is_long(8192)
    assert spec.rope is not None
    assert spec.rope.long_frequencies is not None
    assert spec.rope.long_frequencies == tuple(frequency / 2 for frequency in spec.rope.frequencies)
    assert spec.rope.magnitude == pytest.approx((1 + 1 / 12) ** 0.5)  # ln 2 / ln 4096


def test_mistral_windows_by_its_history() -> None:
    """The first release has a window, later ones say null."""
    mistral = LLAMA | {"model_type": "mistral"}
    assert spec_from_hf(mistral | {"sliding_window": 4096}).window(3) == 4096
    assert spec_from_hf(mistral | {"sliding_window": None}).window(3) is None


def test_qwen_windows_begin_at_a_layer() -> None:
    qwen2 = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 512, "max_window_layers": 3}
    assert spec_from_hf(qwen2).windows == ()
    qwen2["use_sliding_window"] = True
    assert spec_from_hf(qwen2).windows == (None, None, None, 512)
    qwen2["layer_types"] = ["sliding_attention", "full_attention"] * 2
    assert spec_from_hf(qwen2).windows == (512, None, 512, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "choose a model whose model_type is one of deepseek_v2, deepseek_v3, gemma3"),
        ({"model_type": None}, "architecture None is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' quantized checkpoints are not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"num_key_value_heads": 2}, "cannot share"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 factors for 32 pairs",
        ),
    ],
)
def test_what_is_not_covered_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_hf(LLAMA | change)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"has no '{key}'"):
        spec_from_hf({name: value for name, value in LLAMA.items() if name != key})


@pytest.mark.parametrize(
    "change",
    [{"do_layer_norm_before": False}, {"word_embed_proj_dim": 512}, {"_remove_final_layer_norm": True}],
)
def test_opt_variants_of_another_shape_are_refused(change: dict[str, Any]) -> None:
    opt = {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "max_position_embeddings": 2048,
    }
    assert spec_from_hf(opt).position_offset == 2
    with pytest.raises(ValueError, match="which is not supported"):
        spec_from_hf(opt | change)


def test_frequencies_fall_from_one_and_divide() -> None:
    base = default_frequencies(10000.0, 8)
    assert base == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert divided(base, [1, 2, 4, 8]) == Rope(frequencies=(1.0, base[1] / 2, base[2] / 4, base[3] / 8))


def test_what_mixtures_of_experts_leave_out() -> None:
    """Defaults of the families' own configurations."""
    mixtral = spec_from_hf(LLAMA | {"model_type": "mixtral"})
    assert mixtral.moe == MoeSpec(
        experts=8, top_k=2, intermediate=mixtral.intermediate, sparse=(True,) * mixtral.layers, normalized=True
    )
    without = {name: value for name, value in LLAMA.items() if name != "rope_theta"} | {"model_type": "mixtral"}
    assert spec_from_hf(without).rope == spec_from_hf(without | {"rope_theta": 1e6}).rope
    qwen = spec_from_hf(LLAMA | {"model_type": "qwen3_moe"})
    assert qwen.moe == MoeSpec(experts=128, top_k=8, intermediate=768, sparse=(True,) * qwen.layers, normalized=False)
    every_third = LLAMA | {"model_type": "qwen3_moe", "decoder_sparse_step": 3, "mlp_only_layers": [5]}
    spec = spec_from_hf(every_third | {"num_hidden_layers": 9})
    assert spec.moe is not None and [i for i, sparse in enumerate(spec.moe.sparse) if sparse] == [2, 8]


@pytest.mark.parametrize(("chosen", "experts"), [(0, 8), (9, 8)])
def test_experts_that_cannot_be_chosen(chosen: int, experts: int) -> None:
    with pytest.raises(ValueError, match="experts"):
        spec_from_hf(LLAMA | {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": chosen})


GEMMA3_4B: dict[str, Any] = {  # the text part of what was published, with all that it says
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def test_gemma_3_of_a_file_that_leaves_most_keys_out() -> None:
    spec = spec_from_hf(GEMMA3_4B)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size, spec.max_position) == (8, 4, 256, 262208, 131072)
    assert spec.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    assert spec.rope == Rope(frequencies=tuple(each / 8 for each in default_frequencies(1e6, 256)))
    assert spec.window_rope == Rope(frequencies=default_frequencies(1e4, 256))
    assert (spec.score_scale, spec.embedding_scale, spec.norm_eps) == (1 / 16, 2560**0.5, 1e-6)
    assert spec.tied_embeddings and spec.qk_norm and spec.post_norms and not spec.qkv_bias


def test_gemma_3_with_images_is_its_text_part() -> None:
    outer = {"model_type": "gemma3", "text_config": GEMMA3_4B, "vision_config": {"hidden_size": 1152}}
    spec = spec_from_hf(outer | {"eos_token_id": [1, 106], "bos_token_id": None})
    expected = replace(spec_from_hf(GEMMA3_4B), architecture="gemma3", eos_token_ids=(1, 106))
    assert spec == expected


def test_gemma_3_s_old_and_new_rope_keys_mean_the_same() -> None:
    old = GEMMA3_4B | {"rope_theta": 5e5, "rope_local_base_freq": 3e4}
    new = GEMMA3_4B | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }
    }
    del new["rope_scaling"]
    assert spec_from_hf(old) == spec_from_hf(new) != spec_from_hf(GEMMA3_4B)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"layer_types": ["chunked_attention"] * 34}, "layer_types 'chunked_attention' is not supported"),
    ],
)
def test_gemma_3_variants_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_hf(GEMMA3_4B | change)


GPT_OSS_20B: dict[str, Any] = {  # as it was published
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_the_published_config_of_gpt_oss() -> None:
    spec = spec_from_hf(GPT_OSS_20B)
    assert spec.windows == (128, None) * 12 and spec.sinks and spec.qkv_bias and spec.o_bias and not spec.mlp_bias
    assert spec.moe is not None and (spec.moe.experts, spec.moe.top_k, spec.moe.intermediate) == (32, 4, 2880)
    assert spec.moe.bias and spec.moe.product == ClampedSwiglu(alpha=1.702, limit=7.0)
    assert spec.rope is not None and spec.rope.magnitude == pytest.approx(1.3465735903)  # 0.1 ln 32 + 1
    assert spec.rope.frequencies[-1] == pytest.approx(150000 ** (-62 / 64) / 32)
    left_out = ("head_dim", "rope_theta", "rope_scaling", "sliding_window", "swiglu_limit", "num_experts_per_tok")
    assert spec_from_hf({key: value for key, value in GPT_OSS_20B.items() if key not in left_out}) == spec


def test_only_gpt_oss_is_read_from_mxfp4() -> None:
    with pytest.raises(ValueError, match="'mxfp4' quantized checkpoints are not supported"):
        spec_from_hf(LLAMA | {"quantization_config": {"quant_method": "mxfp4"}})
