"""What a model's files say of its embeddings: sentence-transformers' modules, fields of config.json, GGUF's pooling."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from deploy.embedding_form import embedding_form
from serving.api.settings import EmbeddingForm
from serving.messages import Pooling

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def write_modules(folder: Path, *on: str, normalize: bool = True, extra: str | None = None) -> Path:
    """A folder's modules as sentence-transformers writes them, with these pooling modes on."""
    kinds = ["Transformer", "Pooling", *([extra] if extra else []), *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 64, **{f"pooling_mode_{mode}": mode in on for mode in MODES}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**config, "include_prompt": True}))
    return folder


def test_a_model_that_says_nothing_is_a_causal_one(tmp_path: Path) -> None:
    assert embedding_form(tmp_path, 64) == EmbeddingForm(size=64, pooling=Pooling.LAST, normalize=True)


@pytest.mark.parametrize(
    ("mode", "pooling"), [("cls_token", Pooling.FIRST), ("mean_tokens", Pooling.MEAN), ("lasttoken", Pooling.LAST)]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_modules_say_how(tmp_path: Path, mode: str, pooling: Pooling, normalize: bool) -> None:
    form = embedding_form(write_modules(tmp_path, mode, normalize=normalize), 64)
    assert form == EmbeddingForm(size=64, pooling=pooling, normalize=normalize)


@pytest.mark.parametrize("on", [("max_tokens",), ("mean_tokens", "cls_token"), ()])
def test_other_ways_of_pooling_are_refused(tmp_path: Path, on: tuple[str, ...]) -> None:
    assert (
        "pools its hidden states in a way that is not served"
        in embedding_form(write_modules(tmp_path, *on), 64).refusal
    )


def test_what_else_the_vector_goes_through_is_named(tmp_path: Path) -> None:
    assert "'Dense'" in embedding_form(write_modules(tmp_path, "mean_tokens", extra="Dense"), 64).refusal


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [
        ({}, None),
        ({"is_matryoshka": True}, ()),
        ({"is_matryoshka": False}, None),
        ({"matryoshka_dimensions": [32, 8, 128]}, (8, 32)),
        ({"matryoshka_dimensions": [2000]}, None),
        ({"matryoshka_dimensions": [True]}, None),
        ({"matryoshka_dimensions": [True, 8, 16, 99]}, (8, 16)),
        ({"matryoshka_dimensions": []}, None),
        ({"matryoshka_dimensions": "8"}, None),
    ],
)
def test_dimensions_are_those_the_model_was_trained_for(
    tmp_path: Path, config: dict[str, Any], dimensions: tuple[int, ...] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert embedding_form(tmp_path, 64).dimensions == dimensions


@pytest.mark.parametrize("config", [{"is_causal": False}, {"text_config": {"use_bidirectional_attention": True}}])
def test_a_model_that_looks_ahead_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "attends to later tokens" in embedding_form(tmp_path, 64).refusal


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_modules_that_cannot_be_read_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ValueError, match=r"modules\.json"):
        embedding_form(tmp_path, 64)


@pytest.mark.parametrize(
    ("kind", "pooling"), [(None, Pooling.LAST), (0, Pooling.LAST), (1, Pooling.MEAN), (2, Pooling.FIRST), (4, None)]
)
def test_a_gguf_file_names_its_pooling(tmp_path: Path, kind: int | None, pooling: Pooling | None) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "qwen3")
    if kind is not None:
        writer.add_pooling_type(gguf.PoolingType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    form = embedding_form(file, 64)
    assert (form.pooling, form.refusal) == (pooling, "") if pooling else "pooling type 4" in form.refusal


def test_a_gguf_file_may_say_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"general.architecture": "llama", "llama.attention.causal": False, "llama.pooling_type": 1}
    monkeypatch.setattr("deploy.embedding_form.GgufHeader", lambda path: SimpleNamespace(metadata=metadata))
    (tmp_path / "a.gguf").touch()
    assert "later tokens" in embedding_form(tmp_path / "a.gguf", 32).refusal
