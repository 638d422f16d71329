"""Families that alternate between layers with a window and layers without: what their checkpoints and types may be."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

from serving.loader.loading import load
from serving.model.decoder import Scale
from serving.model.fused_shape import unlike_llama
from tests.serving.model.oracle import GEMMA3, VOCAB, build, configs, expected_logits, save
from tests.serving.model.paged import PagedRun, run_whole

SEQUENCES = [[random.Random(4).randrange(VOCAB) for _ in range(33)]]


@pytest.mark.parametrize("outer", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("head", [None, "lm_head.weight", "language_model.lm_head.weight"])
def test_gemma_3_with_images_computes_as_its_text_part(outer: str, head: str | None, tmp_path: Path) -> None:
    oracle = build(Gemma3TextConfig(**GEMMA3 | {"tie_word_embeddings": head is None}))
    expected = expected_logits(oracle, SEQUENCES[0])
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    tied = head is None
    config = Gemma3Config(text_config=oracle.config, vision_config=vision, tie_word_embeddings=tied)
    images = Gemma3ForConditionalGeneration(config)
    images.model.language_model.load_state_dict(oracle.model.state_dict())
    file = save(images, tmp_path) / "model.safetensors"
    written = re.compile(r"^(language_model.model|model.language_model)\.")
    tensors = {written.sub(outer, name): tensor for name, tensor in load_file(file).items()}
    assert any(name.startswith(f"{outer}layers") for name in tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    if head is not None:
        tensors[head] = oracle.lm_head.weight.detach().clone()
    save_file(tensors, file)
    loaded = load(tmp_path, "float32")
    assert loaded.spec.architecture == "gemma3"
    run = PagedRun(loaded.model, SEQUENCES, block_size=4)
    run_whole(run)
    torch.testing.assert_close(run.result(0), expected, atol=1e-4, rtol=0)


def test_in_bfloat_16_gemma_3_stays_as_close_as_transformers(tmp_path: Path) -> None:
    """Norms have their gain 1 + weight in float32, and the factor of embeddings is rounded, as it was in training."""
    oracle = build(configs()["gemma3"])
    loaded = load(save(oracle, tmp_path), "bfloat16")
    expected, rounded = expected_logits(oracle, SEQUENCES[0]), expected_logits(oracle.bfloat16(), SEQUENCES[0])
    run = PagedRun(loaded.model, SEQUENCES, block_size=4, kv_dtype="bfloat16")
    run_whole(run)
    error, theirs = ((found - expected).norm() / expected.norm() for found in (run.result(0), rounded))
    assert error < 1.2 * theirs


def test_a_factor_is_rounded_to_the_type_it_multiplies() -> None:
    x = torch.tensor([3.0, 1.0], dtype=torch.bfloat16)
    assert torch.equal(Scale(3072**0.5)(x), x * torch.tensor(55.5, dtype=torch.bfloat16))  # 55.4256 in float32
    assert Scale(3072**0.5)(x.float())[1] == torch.tensor(3072**0.5)


@pytest.mark.parametrize(("name", "reason"), [("gemma3", "Llama shape"), ("gpt_oss", "attention sinks")])
def test_the_compiled_forms_leave_it_to_torch(name: str, reason: str, tmp_path: Path) -> None:
    spec = load(save(build(configs()[name]), tmp_path)).spec
    assert reason in (unlike_llama(spec) or "")
    if spec.moe is not None:
        assert "does not route experts" in (unlike_llama(replace(spec, sinks=False)) or "")
