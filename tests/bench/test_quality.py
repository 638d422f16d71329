"""The quality benchmark's own arithmetic, on a tiny model whose logits can be had another way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from bench.quality import code, compare, read_text, score, table, text
from serving.loader.loading import LoadedModel, load
from tests.serving.model.oracle import build, configs, expected_logits, save

WINDOWS = [[3, 17, 60, 2, 44, 90, 8], [5, 5, 71, 30]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(save(build(configs()["llama2"]), tmp_path_factory.mktemp("model")), "float32")


def test_scores_are_those_of_the_next_tokens(loaded: LoadedModel) -> None:
    oracle = build(configs()["llama2"])
    found = score(loaded.model, WINDOWS, "float32")
    losses, likeliest = [], []
    for window in WINDOWS:
        logits = expected_logits(oracle, window)[:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
        likeliest += logits.argmax(-1).tolist()
    assert found.likeliest.tolist() == likeliest
    assert found.perplexity == pytest.approx(math.exp(torch.cat(losses).mean()), rel=1e-4)


def test_int8_kv_is_another_measurement(loaded: LoadedModel) -> None:
    exact, rounded = (score(loaded.model, WINDOWS, dtype) for dtype in ("float32", "int8"))
    assert 0 < abs(rounded.perplexity / exact.perplexity - 1) < 0.02
    row = compare("INT8 KV", exact, rounded, 1.0)
    assert row.ratio == pytest.approx(rounded.perplexity / exact.perplexity)
    assert compare("itself", exact, exact, 1.0).agreement == 1.0
    assert "INT8 KV" in table("prose", [row])


def test_the_text_is_long_enough_and_always_the_same(tmp_path: Path) -> None:
    for make in (text, code):
        read = make()
        assert len(read) > 200_000  # well above 20,000 tokens
        assert read == make()
    (tmp_path / "any.txt").write_text("größer")
    assert read_text(str(tmp_path / "any.txt")) == "größer"
    assert read_text("code") == code()
