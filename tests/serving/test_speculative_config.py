"""`--speculative-config`: what vLLM's users write is understood, or refused in words that say what to write."""

from __future__ import annotations

import json

import pytest

from serving.config import EngineConfig
from serving.options import ConfigError
from serving.speculative_config import SpeculativeConfig, read_speculative_config


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, ("ngram", None, 3)),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, ("ngram", None, 3)),
        ({"model": "small", "num_speculative_tokens": 5}, ("draft_model", "small", 5)),
        ({"method": "draft_model", "model": "small", "draft_tensor_parallel_size": 1}, ("draft_model", "small", None)),
        ({"method": "mtp", "num_speculative_tokens": 1}, ("mtp", None, 1)),
        ({"method": "deepseek_mtp", "model": "deepseek-ai/DeepSeek-V3"}, ("mtp", None, None)),
    ],
)
def test_what_vllm_takes(given: dict[str, object], meant: tuple[str, str | None, int | None]) -> None:
    found = read_speculative_config(json.dumps(given))
    assert (found.method, found.model, found.num_speculative_tokens) == meant


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "no JSON object"),
        ("{", "no JSON object"),
        ('{"method": "eagle3", "model": "head"}', "there are ngram, draft_model, mtp"),
        ('{"method": "draft_model"}', "needs a model"),
        ("{}", "needs a model"),
        ('{"model": "small", "tree": 1}', "tree not known; known are method, model"),
        ('{"model": "small", "num_speculative_tokens": 0}', "from 1 to 64"),
        ('{"model": "small", "num_speculative_tokens": true}', "from 1 to 64"),
        ('{"model": "small", "draft_tensor_parallel_size": 2}', "must be 1"),
        ('{"model": "small", "quantization": "awq"}', "'awq' cannot be had"),
        ('{"method": "mtp", "quantization": "int8"}', "'int8' cannot be had"),
        ('{"model": ""}', "needs a model"),
        ('{"method": "ngram", "prompt_lookup_max": "4"}', "no number of tokens; 4 is what is done"),
        ("[" * 100_000, "and so on is no JSON object"),
    ],
)
def test_what_cannot_be_had_is_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        EngineConfig(speculative_config=text)
    assert raised.value.param == "speculative_config"


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"method": "ngram", "model": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}, ()),
        ({"method": "ngram", "model": "small", "prompt_lookup_max": 3}, ("prompt_lookup_max", "model")),
        ({"method": "mtp", "model": "deepseek-ai/DeepSeek-V3"}, ("model",)),
        ({"model": "small", "prompt_lookup_min": 1}, ("prompt_lookup_min",)),
    ],
)
def test_what_changes_nothing_is_known(given: dict[str, object], unused: tuple[str, ...]) -> None:
    assert read_speculative_config(json.dumps(given)).unused == unused


def test_the_number_of_tokens_is_the_flags_unless_it_is_named() -> None:
    assert EngineConfig().speculation() == SpeculativeConfig(num_speculative_tokens=4)
    assert EngineConfig(num_speculative_tokens=0, speculative_config='{"method": "mtp"}').speculation() == (
        SpeculativeConfig(method="mtp", num_speculative_tokens=0)
    )
    named = EngineConfig(num_speculative_tokens=2, speculative_config='{"method": "mtp", "num_speculative_tokens": 1}')
    assert named.speculation().num_speculative_tokens == 1
