"""Logits of every architecture equal those of `transformers`, however the sequences are cut and mixed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serving.loader.loading import LoadedModel, load
from tests.serving.model.oracle import LONGROPE_ORIGINAL, VOCAB, build, configs, expected_logits, save
from tests.serving.model.paged import SCHEDULES, PagedRun

LENGTHS = (41, LONGROPE_ORIGINAL - 3, 30, 9)
TOLERANCE = 1e-4


class Case:
    """One architecture: our model, and what its sequences should give."""

    def __init__(self, name: str, folder: Path) -> None:
        oracle = build(configs()[name])
        chance = random.Random(1)
        self.sequences = [[chance.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
        self.expected: list[Tensor] = [expected_logits(oracle, tokens) for tokens in self.sequences]
        # Two architectures come in shards, so that those are read too.
        shards = {"max_shard_size": "20KB"} if name in ("llama3", "gpt2") else {}
        self.loaded: LoadedModel = load(save(oracle, folder, **shards), "float32")


@pytest.fixture(scope="module", params=sorted(configs()))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_logits_equal_transformers(case: Case, schedule: str, block_size: int) -> None:
    run = PagedRun(case.loaded.model, case.sequences, block_size=block_size)
    SCHEDULES[schedule](run)
    for s, expected in enumerate(case.expected):
        torch.testing.assert_close(run.result(s), expected, atol=TOLERANCE, rtol=0)


def test_the_oracle_tells_models_apart(case: Case) -> None:
    """Logits are of a size at which the tolerance means something, and differ from position to position."""
    for expected in case.expected:
        assert expected.std() > 0.3
        assert len(set(expected.argmax(-1).tolist())) > len(expected) // 4


def test_each_layer_is_reported_once_and_in_order(case: Case) -> None:
    run = PagedRun(case.loaded.model, case.sequences, block_size=4)
    run.step({0: 5, 1: 1})
    assert run.layers_done == list(range(case.loaded.spec.layers))


def test_kv_has_the_planes_the_spec_says(case: Case) -> None:
    layers = case.loaded.spec.kv_layers("float32")
    run = PagedRun(case.loaded.model, case.sequences, block_size=4)
    assert [[plane.shape for plane in layer.planes] for layer in layers] == [
        [tuple(plane.shape[2:]) for plane in planes] for planes in run.kv
    ]
