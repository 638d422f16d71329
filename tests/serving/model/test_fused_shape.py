"""What the compiled forms do not compute is left to torch: each field of the spec that they do not know is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.model.fused_shape import unlike_llama
from serving.model.moe_spec import ClampedSwiglu, MoeSpec
from serving.model.rope import Rope, default_frequencies
from serving.model.spec import ModelSpec

ROPE = Rope(frequencies=default_frequencies(10.0, 8))
LLAMA = ModelSpec(
    architecture="llama",
    vocab_size=32,
    hidden=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate=24,
    max_position=64,
    norm_eps=1e-5,
    rope=ROPE,
)
MIXTURE = MoeSpec(experts=4, top_k=2, intermediate=24, sparse=(True, True))


def test_llama_and_plain_mixtures_of_experts_are_computed() -> None:
    for change in ({}, {"moe": MIXTURE}, {"windows": (4, None)}, {"qk_norm": True}, {"qkv_bias": True}):
        assert unlike_llama(replace(LLAMA, **change)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(
            (unlike, "Llama shape")
            for unlike in (
                {"norm": "layernorm"},
                {"norm": "rms_offset"},
                {"mlp": "gated_gelu_tanh"},
                {"rope": None},
                {"learned_positions": True},
                {"window_rope": ROPE},
                {"post_norms": True},
                {"score_scale": 0.3},
                {"embedding_scale": 2.0},
            )
        ),
        ({"sinks": True}, "attention sinks"),
        ({"moe": replace(MIXTURE, bias=True)}, "route experts"),
        ({"moe": replace(MIXTURE, product=ClampedSwiglu(alpha=1.7, limit=7.0))}, "route experts"),
    ],
)
def test_what_is_not_computed_is_said(change: dict[str, Any], reason: str) -> None:
    assert reason in (unlike_llama(replace(LLAMA, **change)) or "")
