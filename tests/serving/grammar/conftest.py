"""A small vocabulary and the grammars of a model that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.grammar.grammars import GrammarCompiler, Grammars
from serving.text.tokenizer import Tokenizer, load_tokenizer
from tests.serving.grammar.following import ENDS
from tests.tiny import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(GrammarCompiler(lambda: tokenizer, ENDS))


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, ENDS)
