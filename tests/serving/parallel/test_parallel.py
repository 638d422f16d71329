"""A model whose weights, rows or layers are shared by real processes says what it says in one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from serving.loader.loading import load
from serving.parallel.layout import ParallelLayout
from tests.serving.expert_parallel.ranks import Ranks
from tests.serving.expert_parallel.served import greedy
from tests.serving.model.oracle import VOCAB
from tests.serving.parallel.models import written
from tests.serving.parallel.served import Answer, serve_cases

MOST_SECONDS = 300.0  # for all of them, on a busy machine
LENGTHS = (9, 1, 14, 5)
PROMPTS = [[random.Random(length).randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
TP2, SP2, PP2 = ParallelLayout(tensor=2), ParallelLayout(sequence=2), ParallelLayout(pipeline=2)
TP4, SP4, TP2_SP2 = ParallelLayout(tensor=4), ParallelLayout(sequence=4), ParallelLayout(tensor=2, sequence=2)
TP2_PP2, SP2_PP2 = ParallelLayout(tensor=2, pipeline=2), ParallelLayout(sequence=2, pipeline=2)
EP2, EP4 = (ParallelLayout(sequence=ranks, spread_experts=True) for ranks in (2, 4))
Case = tuple[str, ParallelLayout]
FEW: tuple[Case, ...] = (
    *((name, TP2) for name in ("llama3", "gpt2", "mixtral", "qwen3_int8", "gemma3", "gpt_oss")),
    *((name, SP2) for name in ("llama3", "deepseek_v3_plain")),
    *((name, PP2) for name in ("qwen3", "gpt2", "gemma3")),
    *((name, EP2) for name in ("mixtral", "mixtral_int8", "deepseek_v3_plain")),
)
MANY: tuple[Case, ...] = (
    *((name, TP2) for name in ("qwen3", "opt", "mixtral_int8", "gpt_oss_int8")),
    *((name, TP2) for name in ("deepseek_v2_lite", "deepseek_v3_plain")),
    *((name, SP2) for name in ("opt", "gemma3", "gpt_oss_biased", "mixtral", "qwen3_int8", "deepseek_v2_lite")),
    *((name, PP2) for name in ("llama3", "mixtral", "deepseek_v3_plain")),
    *((name, TP4) for name in ("llama3", "gpt2")),  # of llama3 two ranks hold each key-value head
    *((name, TP2_SP2) for name in ("mixtral", "deepseek_v2_lite")),
    *((name, TP2_PP2) for name in ("qwen3", "opt")),
    *((name, layout) for name in ("llama3",) for layout in (SP4, SP2_PP2)),
    *((name, EP2) for name in ("gpt_oss", "gpt_oss_int8", "deepseek_v2_lite")),
    *((name, EP4) for name in ("mixtral", "deepseek_v3_plain")),  # five experts, and as many as rows have in a step
)


def id_of(value: object) -> str:
    return str(value).removeprefix("ParallelLayout")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def answered(root: Path, cases: Sequence[Case]) -> dict[Case, tuple[Path, list[Answer]]]:
    """Each case's model, and what each rank has come to. The ranks of a size are one set of processes."""
    folders = written(root, dict.fromkeys(name for name, _ in cases))
    found = {}
    for size in sorted({layout.ranks for _, layout in cases}):
        chosen = [(name, layout) for name, layout in cases if layout.ranks == size]
        with Ranks() as group:
            started = group.start_all(size, serve_cases, [(folders[name], layout) for name, layout in chosen], PROMPTS)
            by_rank = [rank.answer(MOST_SECONDS) for rank in started]
        found.update({case: (folders[case[0]], [of[number] for of in by_rank]) for number, case in enumerate(chosen)})
    return found


@pytest.fixture(scope="module")
def few(root: Path) -> dict[Case, tuple[Path, list[Answer]]]:
    return answered(root / "few", FEW)


@pytest.fixture(scope="module")
def many(root: Path) -> dict[Case, tuple[Path, list[Answer]]]:
    return answered(root / "many", MANY)


def check(path: Path, by_rank: list[Answer]) -> None:
    wanted = greedy(load(path, "float32").model, PROMPTS)
    for rank in by_rank:
        for (tokens, logits), (wanted_tokens, wanted_logits) in zip(rank, wanted, strict=True):
            assert tokens == wanted_tokens
            torch.testing.assert_close(torch.from_numpy(logits), wanted_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "layout"), FEW, ids=id_of)
def test_ranks_say_what_one_process_says(
    few: dict[Case, tuple[Path, list[Answer]]], name: str, layout: ParallelLayout
) -> None:
    check(*few[name, layout])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), MANY, ids=id_of)
def test_ranks_say_what_one_process_says_in_every_form(
    many: dict[Case, tuple[Path, list[Answer]]], name: str, layout: ParallelLayout
) -> None:
    check(*many[name, layout])
