"""Routing by its rules: groups, biases and weights of any logits; checked against the slow and obvious way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serving.kernels.int8 import quantize_rows
from serving.model.moe import Float32Router, MoeMlp, float32_parameters, route
from serving.model.moe_spec import MoeSpec

SOFTMAX = MoeSpec(experts=12, top_k=3, intermediate=8, sparse=(True,), normalized=False)
V2 = replace(SOFTMAX, groups=4, top_groups=2, scaling=16.0, router_float32=True)
V3 = replace(V2, scoring="sigmoid", group_best=2, biased=True, normalized=True, scaling=2.5)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, MoeSpec, Tensor | None]:
    """Distinct logits, so that ties decide nothing, and biases on both sides of zero."""
    spec = draw(st.sampled_from([SOFTMAX, V2, V3, replace(V3, normalized=False), replace(SOFTMAX, normalized=True)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(5, spec.experts, generator=generator) * draw(st.sampled_from([0.1, 1.0, 5.0]))
    bias = torch.randn(spec.experts, generator=generator) + draw(st.sampled_from([-3.0, 0.0, 3.0]))
    return logits, spec, bias if spec.biased else None


def slowly(logits: list[float], spec: MoeSpec, bias: list[float]) -> tuple[list[int], list[float]]:
    """One token's experts and weights, in plain Python."""
    values = torch.tensor(logits)
    scores = (values.softmax(0) if spec.scoring == "softmax" else values.sigmoid()).tolist()
    choice = [score + more for score, more in zip(scores, bias, strict=True)]
    size = spec.experts // spec.groups
    groups = [choice[first : first + size] for first in range(0, spec.experts, size)]
    worth = [sum(sorted(group)[-spec.group_best :]) for group in groups]
    best = sorted(range(spec.groups), key=lambda group: -worth[group])[: spec.top_groups]
    allowed = [expert for expert in range(spec.experts) if expert // size in best]
    experts = sorted(allowed, key=lambda expert: -choice[expert])[: spec.top_k]
    total = sum(scores[expert] for expert in experts) if spec.normalized else 1.0
    return experts, [scores[expert] / total * spec.scaling for expert in experts]


@given(routings())
def test_routing_is_what_the_rules_say(case: tuple[Tensor, MoeSpec, Tensor | None]) -> None:
    logits, spec, bias = case
    experts, weights = route(logits, spec, bias)
    assert (experts.dtype, weights.dtype) == (torch.int64, torch.float32)
    added = [0.0] * spec.experts if bias is None else bias.tolist()
    for row, chosen, given_weights in zip(logits.tolist(), experts.tolist(), weights.tolist(), strict=True):
        wanted, expected = slowly(row, spec, added)
        assert chosen == wanted
        assert given_weights == pytest.approx(expected, rel=1e-5)


@given(routings())
def test_experts_are_few_different_and_of_few_groups(case: tuple[Tensor, MoeSpec, Tensor | None]) -> None:
    logits, spec, bias = case
    experts, weights = route(logits, spec, bias)
    for chosen in experts.tolist():
        assert len(set(chosen)) == spec.top_k
        assert len({expert // (spec.experts // spec.groups) for expert in chosen}) <= spec.top_groups
    assert (weights >= 0).all()
    if spec.normalized:
        torch.testing.assert_close(weights.sum(-1), torch.full((len(logits),), spec.scaling))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.zeros(1, 12)
    bias = torch.full((12,), -5.0)
    bias[[4, 5, 6]] = -4.0
    experts, weights = route(logits, replace(V3, normalized=False, scaling=1.0), bias)
    assert sorted(experts[0].tolist())[:2] in ([4, 5], [4, 6], [5, 6])
    assert weights.tolist() == [[0.5, 0.5, 0.5]]


def test_scores_that_all_vanish_give_weights_of_zero() -> None:
    _, weights = route(torch.full((1, 12), -200.0), V3, torch.zeros(12))
    assert weights.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 5}, "12 experts in 5 groups"),
        ({"top_groups": 5}, "5 cannot be chosen"),
        ({"top_groups": 0}, "0 cannot be chosen"),
        ({"top_groups": 1, "top_k": 4}, "1 of 4 groups do not hold 4 experts"),
        ({"groups": 12, "top_groups": 4}, "have no 2 best ones"),
    ],
)
def test_groups_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(V3, **change)  # type: ignore[arg-type]


def test_the_router_of_a_bfloat16_model_computes_in_float32() -> None:
    """Logits that bfloat16 holds as one are told apart."""
    router = Float32Router(2, V3)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[0, 0] = 1.0
        router.weight[1] = torch.tensor([1.0, 2**-10])
    logits = router(torch.ones(1, 2, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32 and logits[0, 1] > logits[0, 0]
    assert set(float32_parameters(MoeMlp(2, V3))) == {"router.weight", "router.correction"}


def test_a_token_has_the_bits_alone_that_it_has_among_others() -> None:
    torch.manual_seed(3)
    spec = MoeSpec(experts=4, top_k=2, intermediate=40, sparse=(True,))
    with torch.inference_mode():
        mlp, x = MoeMlp(32, spec), torch.randn(24, 32)
        experts, weights = route(mlp.router(x), spec)
        together = mlp.mixed(x, experts, weights)
        for count in (1, 2, 3, 5):
            for first in range(0, 24 - count):
                rows = slice(first, first + count)
                assert torch.equal(mlp.mixed(x[rows], experts[rows], weights[rows]), together[rows])


def test_a_token_is_routed_alone_as_among_others() -> None:
    """Few experts, so that a tensor of some rows ends within a vector."""
    generator = torch.Generator().manual_seed(4)
    for spec in (SOFTMAX, replace(V3, experts=8)):
        logits, bias = torch.randn(19, spec.experts, generator=generator), torch.zeros(spec.experts)
        experts, weights = route(logits, spec, bias)
        for row in range(len(logits)):
            for end in range(row + 1, len(logits) + 1):
                chosen, given_weights = route(logits[row:end], spec, bias)
                assert torch.equal(chosen[0], experts[row]) and torch.equal(given_weights[0], weights[row])


def test_rows_are_quantized_by_a_quotient_rounded_once() -> None:
    """As the compiled kernels do it: 1 / largest times 127 would be rounded twice, and differ for some rows."""
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
    largest = x.abs().amax(dim=1)
    quotient = torch.full_like(largest, 127.0) / largest
    assert not torch.equal(quotient, largest.reciprocal() * 127)
    assert torch.equal(quantize_rows(x)[0], (x * quotient[:, None]).round().to(torch.int8))
