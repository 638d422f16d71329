"""Placements of experts: balanced from nothing, kept balanced by few moves, whatever the loads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.model.expert_balance import ExpertPlacement, Layout, placed, replaced


def zipf(exponent: float, seed: int = 1, experts: int = 256) -> list[float]:
    """Loads of experts, the heaviest anywhere."""
    loads = [1 / (rank + 1) ** exponent for rank in range(experts)]
    random.Random(seed).shuffle(loads)
    return loads


def drifted(loads: list[float], seed: int = 3) -> list[float]:
    draw = random.Random(seed)
    return [load * draw.lognormvariate(0, 0.2) for load in loads]


def floor(loads: list[float], slots: int) -> float:
    """What one expert a rank cannot be below: the largest share of an expert, copied where it helps most."""
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        copies[max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])] += 1
    return max(load / count for load, count in zip(loads, copies, strict=True)) * slots / sum(loads)


@pytest.mark.parametrize("exponent", [0.8, 1.0])
@pytest.mark.parametrize(("ranks", "most"), [(8, 1.05), (32, 1.05), (64, 1.15)])
def test_skewed_loads_are_balanced(exponent: float, ranks: int, most: float) -> None:
    loads = zipf(exponent)
    assert placed(loads, Layout(ranks=ranks, slots=320 // ranks)).imbalance(loads) <= most


@pytest.mark.parametrize("exponent", [0.8, 1.0])
def test_one_slot_a_rank_is_as_good_as_it_can_be(exponent: float) -> None:
    loads = zipf(exponent)
    found = placed(loads, Layout(ranks=320, slots=1)).imbalance(loads)
    assert found == pytest.approx(floor(loads, 320))


@pytest.mark.parametrize("exponent", [0.8, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_few_moves_follow_a_drift(exponent: float, seed: int) -> None:
    """A new placement would rewrite nearly every slot."""
    layout = Layout(ranks=32, slots=10)
    loads = zipf(exponent, seed)
    old, now = placed(loads, layout), drifted(loads, seed)
    new = replaced(old, now, most_moves=25)
    assert new.imbalance(now) <= 1.05
    assert new.moves_from(old) <= 25 < placed(now, layout).moves_from(old)


def test_groups_stay_on_a_node() -> None:
    loads = zipf(0.8)
    found = placed(loads, Layout(ranks=32, slots=10, nodes=4, groups=8))
    for group in range(8):
        nodes = {rank // 8 for expert in range(group * 32, group * 32 + 32) for rank in found.ranks_of(expert)}
        assert len(nodes) == 1
    assert found.imbalance(loads) <= 1.1


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[float], Layout]:
    nodes = draw(st.sampled_from([1, 2]))
    groups = draw(st.sampled_from([1, nodes, 2 * nodes]))
    experts = groups * draw(st.integers(1, 6))
    ranks = nodes * draw(st.integers(1, 4))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    loads = draw(st.lists(st.floats(0, 1e6), min_size=experts, max_size=experts))
    return loads, Layout(ranks=ranks, slots=slots, nodes=nodes, groups=groups)


@settings(max_examples=100)
@given(worlds(), st.integers(0, 12), st.randoms(use_true_random=False))
def test_every_expert_is_held_and_no_change_makes_it_worse(
    world: tuple[list[float], Layout], most: int, draw: random.Random
) -> None:
    loads, layout = world
    old = placed(loads, layout)
    assert [len(rank) for rank in old.slots] == [layout.slots] * layout.ranks
    assert sum(old.loads(loads)) == pytest.approx(sum(loads))
    now = loads[:]
    draw.shuffle(now)
    new = replaced(old, now, most_moves=most)
    assert new.moves_from(old) <= most
    assert new.imbalance(now) <= old.imbalance(now) * (1 + 1e-6) + 1e-9
    assert sum(new.copies()) == layout.ranks * layout.slots


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(ranks=2, slots=3), "do not fit"),
        (Layout(ranks=3, slots=4, nodes=2), "shared evenly"),
        (Layout(ranks=4, slots=4, groups=3), "shared evenly"),
        (Layout(ranks=4, slots=4, nodes=4, groups=2), "cannot be shared"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed([1.0] * 8, layout)


@pytest.mark.parametrize("slots", [((0, 1), (0,)), ((0,), (0,)), ((0, 2), (1, 3))])
def test_a_placement_holds_every_expert_on_even_ranks(slots: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"same number|held nowhere"):
        ExpertPlacement(slots, 2)
