"""The tokenizer that the API is tested with."""

from __future__ import annotations

import pytest

from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
