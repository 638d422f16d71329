"""Layouts share out every head, layer, row and column: nothing is left out, and what cannot be shared is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving.model.moe_spec import MoeSpec
from serving.model.spec import ModelSpec
from serving.parallel.layout import ParallelLayout
from serving.parallel.parameters import parameter_cut

SPEC = ModelSpec(
    architecture="llama",
    vocab_size=50,
    hidden=32,
    layers=3,
    heads=8,
    kv_heads=4,
    head_dim=8,
    intermediate=24,
    max_position=64,
    norm_eps=1e-5,
)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[ParallelLayout, ModelSpec]:
    kv_heads = draw(st.integers(1, 6))
    spec = replace(SPEC, heads=kv_heads * draw(st.integers(1, 6)), kv_heads=kv_heads, layers=draw(st.integers(1, 7)))
    layout = ParallelLayout(
        tensor=draw(st.integers(1, 6)), pipeline=draw(st.integers(1, 4)), sequence=draw(st.integers(1, 4))
    )
    try:
        layout.check(spec)
    except ValueError:
        assume(False)
    return layout, spec


@given(fitting())
def test_each_stage_has_every_head_and_each_head_its_keys(drawn: tuple[ParallelLayout, ModelSpec]) -> None:
    layout, spec = drawn
    each = spec.heads // spec.kv_heads
    for stage in range(layout.pipeline):
        ranks = sorted(
            (rank for rank in range(layout.ranks) if layout.place(rank).stage == stage), key=layout.head_rank
        )
        assert [head for rank in ranks for head in layout.heads(spec, rank)] == list(range(spec.heads))
        for rank in ranks:
            heads, kv = layout.heads(spec, rank), layout.kv_heads(spec, rank)
            assert [head // each for head in heads] == [head for head in kv for _ in range(len(heads) // len(kv))]
            assert set(heads) <= set(layout.weight_heads(spec, rank))
            assert set(kv) <= set(layout.weight_kv_heads(spec, rank))


@given(fitting())
def test_each_rank_is_in_groups_that_agree_about_it(drawn: tuple[ParallelLayout, ModelSpec]) -> None:
    layout, _ = drawn
    for rank in range(layout.ranks):
        assert layout.rank(layout.place(rank)) == rank
        groups = (layout.tensor_group(rank), layout.sequence_group(rank), layout.pipeline_group(rank))
        assert [len(group) for group in groups] == [layout.tensor, layout.sequence, layout.pipeline]
        for of, group in zip((layout.tensor_group, layout.sequence_group, layout.pipeline_group), groups, strict=True):
            assert rank in group
            assert all(of(other) == group for other in group)


@given(fitting())
def test_stages_have_every_layer_and_shares_every_token(drawn: tuple[ParallelLayout, ModelSpec]) -> None:
    layout, spec = drawn
    stages = layout.pipeline_group(0)
    assert [layer for rank in stages for layer in layout.layers(spec, rank)] == list(range(spec.layers))
    assert all(len(layout.layers(spec, rank)) > 0 for rank in stages)
    tokens = [token for rank in layout.tensor_group(0) for token in layout.vocabulary(spec, rank)]
    assert tokens == list(range(spec.vocab_size))


@pytest.mark.parametrize(
    ("layout", "spec", "field"),
    [
        (ParallelLayout(pipeline=4), SPEC, "pipeline is 4"),
        (ParallelLayout(tensor=6), SPEC, "tensor is 6"),  # four key-value heads, not held twice evenly
        (ParallelLayout(tensor=16), SPEC, "tensor is 16"),
        (ParallelLayout(tensor=2, sequence=3), SPEC, "sequence is 3"),
        (ParallelLayout(tensor=2, sequence=3), replace(SPEC, heads=12, kv_heads=3), "sequence is 3"),
        (ParallelLayout(tensor=4), replace(SPEC, intermediate=3), "tensor is 4: the model's intermediate width is 3"),
        (ParallelLayout(tensor=4), replace(SPEC, vocab_size=2), "tensor is 4: the model's vocabulary is 2"),
        (
            ParallelLayout(tensor=4),
            replace(SPEC, moe=MoeSpec(experts=4, top_k=2, intermediate=2, sparse=(True,) * 3)),
            "tensor is 4: the model's experts' intermediate width is 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(layout: ParallelLayout, spec: ModelSpec, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        layout.check(spec)


@pytest.mark.parametrize("field", ["tensor", "pipeline", "sequence"])
def test_nothing_is_shared_among_no_ranks(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is 0"):
        ParallelLayout(**{field: 0})


def test_a_rank_keeps_its_heads_and_layers() -> None:
    layout = ParallelLayout(tensor=2, pipeline=3)
    (layer,) = layout.kv_layers(replace(SPEC, windows=(3, 5, 7)), 2, "float32")
    assert layer.heads == 2
    assert layout.rank_spec(replace(SPEC, windows=(3, 5, 7)), 2).windows == (5,)


def test_one_head_is_kept_by_several() -> None:
    spec = replace(SPEC, kv_heads=2)
    layout = ParallelLayout(tensor=4)
    assert [layout.kv_heads(spec, rank) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [layout.heads(spec, rank) for rank in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 8)]


def test_a_module_that_is_not_known_is_not_taken_for_whole() -> None:
    with pytest.raises(ValueError, match=r"share attention\.sinks"):
        parameter_cut(ParallelLayout(tensor=2), SPEC, 0, "layers.0.attention.sinks.weight")


@given(st.integers(1, 12), st.integers(1, 12))
def test_each_expert_is_held_whole_by_one_rank(ranks: int, experts: int) -> None:
    moe = MoeSpec(experts=experts, top_k=1, intermediate=8, sparse=(True,) * SPEC.layers)
    spec = replace(SPEC, heads=ranks, kv_heads=ranks, moe=moe)
    layout = ParallelLayout(sequence=ranks, spread_experts=True)
    if experts < ranks:
        with pytest.raises(ValueError, match=f"^sequence is {ranks}: the model has {experts} experts"):
            layout.check(spec)
        return
    layout.check(spec)
    held = [layout.experts(spec, rank) for rank in range(ranks)]
    assert [expert for one in held for expert in one] == list(range(experts)) and all(held)
    assert all(layout.rank_spec(spec, rank).moe == moe for rank in range(ranks))


def test_experts_are_spread_over_ranks_that_share_tokens_alone() -> None:
    with pytest.raises(ValueError, match=r"^spread_experts"):
        ParallelLayout(tensor=2, sequence=2, spread_experts=True)
    with pytest.raises(ValueError, match="0 experts"):
        ParallelLayout(sequence=2, spread_experts=True).check(SPEC)
