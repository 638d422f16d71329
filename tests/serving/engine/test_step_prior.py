"""The guess before any step was seen: positive throughout, and of the model's proportions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.engine.step_fit import vector
from serving.engine.step_prior import UNKNOWN, guessed_cost
from serving.model.spec import ModelSpec
from serving.step_cost import StepCost

SMALL = ModelSpec(
    architecture="llama",
    vocab_size=49152,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    max_position=2048,
    norm_eps=1e-5,
)


def guess(spec: ModelSpec = SMALL, **changes: Any) -> StepCost:
    return guessed_cost(spec, **{"weight_bytes": 2.7e8, "kv_bytes": 23040.0} | changes)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_every_coefficient_is_positive(device: str) -> None:
    assert (vector(guess(device=device)) > 0).all() and guess(device=device).samples == 0
    assert (vector(UNKNOWN) > 0).all() and UNKNOWN.samples == 0


def test_costs_grow_with_what_they_are_of() -> None:
    deeper = guess(replace(SMALL, layers=60))
    assert deeper.token == pytest.approx(2 * guess().token) and deeper.pair == pytest.approx(2 * guess().pair)
    assert guess(weight_bytes=5.4e8).fixed > guess().fixed and guess(kv_bytes=46080.0).context == 2 * guess().context
    assert guess(replace(SMALL, vocab_size=98304)).sequence > guess().sequence
    assert guess(device="cuda").token < guess().token / 100
