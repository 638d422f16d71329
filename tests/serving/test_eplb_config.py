"""`--enable-eplb` and `--eplb-config`: what vLLM's users write is understood, or refused with what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import ModelConfig
from serving.eplb_config import EplbConfig, read_eplb_config
from serving.options import ConfigError

RANKS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}


def test_what_vllm_takes() -> None:
    given = {"num_redundant_experts": 2, "window_size": 10, "step_interval": 30}
    found = ModelConfig(**RANKS, enable_eplb=True, eplb_config=json.dumps(given)).eplb()
    assert found == EplbConfig(num_redundant_experts=2, window_size=10, step_interval=30)
    assert ModelConfig(**RANKS, enable_eplb=True).eplb() == EplbConfig()
    assert ModelConfig(**RANKS).eplb() is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2", "no JSON object"),
        ('{"use_async": true}', "use_async not known; known are num_redundant_experts, window_size"),
        ('{"num_redundant_experts": -1}', "num_redundant_experts -1 .* from 0 to .*; 0 is usual"),
        ('{"step_interval": 0}', "from 1 to .*; 3000 is usual"),
        ('{"window_size": 2.5}', "whole number"),
        ('{"window_size": true}', "whole number"),
        (f'{{"step_interval": {1 << 41}}}', f"from 1 to {1 << 40}; 3000 is usual"),
        (f'{{"step_interval": "{"9" * 10_000}"}}', "9 and so on is no whole number"),
        (f'{{"{"a" * 10_000}": 1}}', "a and so on not known"),
    ],
)
def test_what_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        ModelConfig(**RANKS, enable_eplb=True, eplb_config=text).eplb()
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"eplb_config": "{}", **RANKS}, "goes with --enable-eplb"),
        ({"enable_eplb": True}, "--data-parallel-size above 1"),
        ({"enable_eplb": True, "data_parallel_size": 2}, "--enable-expert-parallel"),
    ],
)
def test_it_goes_with_ranks(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ModelConfig(**settings).eplb()


@given(window=st.integers(1, 10**6), interval=st.integers(1, 10**6))
def test_loads_fade_over_the_window(window: int, interval: int) -> None:
    """All loads that ever count in a round, times their shares, are those of a window, and of one interval at least."""
    kept = read_eplb_config(json.dumps({"window_size": window, "step_interval": interval})).kept
    assert 0 <= kept < 1
    assert interval / (1 - kept) == pytest.approx(max(window, interval))
