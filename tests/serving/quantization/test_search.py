"""The search for scales keeps its promises: never worse than doing nothing, and better where it can be."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.quantization.search import (
    candidates,
    clipped_scales,
    input_sizes,
    output_error,
    rounded,
    smoothing,
)

STRENGTHS = (0.0, 0.4, 0.5, 0.6)
CLIPS = (1.0, 0.95, 0.9, 0.85)


def problem(seed: int, *, outliers: int = 2) -> tuple[Tensor, Tensor]:
    """Activations [40, 24] in which a few inputs are 30 times as large as others, and weights [16, 24]."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(40, 24, generator=generator), torch.randn(16, 24, generator=generator)
    x[:, :outliers] *= 30
    return x, weight


def channel_error(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return ((rounded(weight, scale).float() * scale[:, None] - weight) @ x.t()).square().sum(-1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), outliers=st.integers(0, 4), shared=st.sampled_from([1, 2, 3]))
def test_smoothing_is_never_worse_than_none(seed: int, outliers: int, shared: int) -> None:
    x, weight = problem(seed, outliers=outliers)
    found = smoothing(x, input_sizes(x), weight, STRENGTHS, shared)
    assert output_error(x, weight, found) <= output_error(x, weight, torch.ones(24))
    alike = found.view(-1, shared)
    assert torch.equal(alike, alike[:, :1].expand_as(alike))


def test_smoothing_helps_where_some_inputs_are_large() -> None:
    x, weight = problem(1)
    found = smoothing(x, input_sizes(x), weight, STRENGTHS)
    assert output_error(x, weight, found) < 0.2 * output_error(x, weight, torch.ones(24))
    assert found[:2].min() > 3 * found[2:].max()


def test_one_huge_token_is_not_sacrificed() -> None:
    """A token whose only large input is small everywhere else keeps its output: its error counts relative to itself."""
    x, weight = problem(2, outliers=0)
    x[0] = 0
    x[:, 5] *= 0.01
    x[0, 5] = 3000
    found = smoothing(x, input_sizes(x), weight, STRENGTHS)
    assert output_error(x[:1], weight, found) < 1e-3


def test_sizes_are_read_in_two_ways() -> None:
    x = torch.tensor([[3.0, 4.0], [300.0, -400.0], [0.0, 0.0]])
    plain, even = input_sizes(x)
    torch.testing.assert_close(plain, torch.tensor([30003.0, 53338.6667]).sqrt())
    torch.testing.assert_close(even, torch.tensor([2 * 9 / 12.5 / 3, 2 * 16 / 12.5 / 3]).sqrt())


def test_candidates_are_bounded_and_begin_with_none() -> None:
    x, weight = problem(3)
    x[:, 7] = 0
    found = candidates(input_sizes(x), weight, STRENGTHS)
    assert len(found) == 1 + 2 * 3
    assert torch.equal(found[0], torch.ones(24))
    assert all(bool((vector > 0).all()) and bool(vector.isfinite().all()) for vector in found)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_clipping_is_never_worse_than_the_largest_weight(seed: int) -> None:
    x, weight = problem(seed)
    largest = weight.abs().amax(-1) / 127
    by_outputs, by_weights = clipped_scales(weight, CLIPS, x), clipped_scales(weight, CLIPS)
    assert bool((channel_error(x, weight, by_outputs) <= channel_error(x, weight, largest)).all())
    alone = torch.eye(24)
    assert bool((channel_error(alone, weight, by_weights) <= channel_error(alone, weight, largest)).all())


def test_clipping_gives_up_a_weight_that_meets_nothing() -> None:
    """The channel's one large weight belongs to an input that is always zero."""
    x, weight = problem(4, outliers=0)
    x[:, 3], weight[0, 3] = 0, 8.0
    assert clipped_scales(weight, CLIPS, x)[0] < weight[0].abs().max() / 127


def test_transformed_rows_and_weights_meet_again() -> None:
    """Both go through the same orthogonal matrix: what is left is rounding, and less of it where one input is huge."""
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(20, 96, generator=generator), torch.randn(30, 96, generator=generator)
    x[:, 7] *= 60
    weight[:, 7] /= 60
    plain, rotated = (output_error(x, weight, torch.ones(96), rotation=block) for block in (0, 32))
    assert 0 < rotated < 0.1 * plain
