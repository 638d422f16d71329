"""What of a model's generation_config.json becomes a default, and what the log says of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deploy.frontend import served_model
from deploy.generation_config import sampling_defaults
from serving.api.settings import SamplingDefaults
from serving.config import ModelConfig
from serving.model.spec import ModelSpec

SPEC = ModelSpec(
    architecture="llama",
    vocab_size=384,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    max_position=64,
    norm_eps=1e-5,
)


def defaults_of(path: Path, **config: Any) -> SamplingDefaults:
    return served_model(path, ModelConfig(**config), 64, SPEC, None).defaults


def write(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"eos_token_id": [0, 2], "do_sample": True, "transformers_version": "5.1"}, SamplingDefaults()),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05),
        ),
        ({"max_new_tokens": 2048, "temperature": 1}, SamplingDefaults(max_tokens=2048)),
        ({"max_new_tokens": None, "temperature": None}, SamplingDefaults()),
        ({"max_new_tokens": -1, "top_k": -1}, SamplingDefaults()),
    ],
)
def test_what_the_file_says_is_the_default(tmp_path: Path, told: dict[str, Any], expected: SamplingDefaults) -> None:
    assert defaults_of(write(tmp_path, json.dumps(told))) == expected
    assert defaults_of(tmp_path, generation_config="none") == SamplingDefaults()


def test_the_log_says_which_defaults_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    defaults_of(write(tmp_path, '{"temperature": 0.6, "top_k": 20}'))
    defaults_of(tmp_path, generation_config="none")
    first, second = (record.getMessage() for record in caplog.records)
    assert "temperature 0.6, top_k 20 (the model's generation_config.json)" in first
    assert "temperature 1, nothing else" in second


@pytest.mark.parametrize("told", [{"temperature": 7.5}, {"top_p": 0}, {"top_k": 1.5}, {"top_k": "20"}])
def test_a_value_no_request_may_have_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, told: dict[str, Any]
) -> None:
    assert defaults_of(write(tmp_path, json.dumps({**told, "min_p": 0.1}))) == SamplingDefaults(min_p=0.1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert next(iter(told)) in caplog.text


def test_a_folder_without_the_file_and_a_gguf_file_have_none(tmp_path: Path) -> None:
    assert defaults_of(tmp_path) == SamplingDefaults()
    file = tmp_path / "model-Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert sampling_defaults(file) == SamplingDefaults()


def test_a_file_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not valid JSON"):
        defaults_of(write(tmp_path, "{"))
