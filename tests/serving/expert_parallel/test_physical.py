"""Which copy of an expert a row goes to: always one that holds it, the rank's own first, else each in turn."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.expert_parallel.physical import PhysicalExperts
from serving.model.expert_balance import ExpertPlacement, Layout, placed


@st.composite
def spread(draw: st.DrawFn) -> ExpertPlacement:
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    loads = draw(st.lists(st.floats(0, 100), min_size=experts, max_size=experts))
    return placed(loads, Layout(ranks=ranks, slots=slots))


@given(spread(), st.integers(0, 40))
def test_rows_go_to_ranks_that_hold_their_experts(placement: ExpertPlacement, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    wanted = torch.randint(placement.experts, (rows, 3), generator=generator)
    slots = len(placement.slots[0])
    for rank in range(len(placement.slots)):
        physical = PhysicalExperts(placement, rank).of(wanted)
        assert physical.dtype is torch.int32 and physical.shape == wanted.shape
        for experts, numbers in zip(wanted.tolist(), physical.tolist(), strict=True):
            for expert, number in zip(experts, numbers, strict=True):
                holder, slot = divmod(number, slots)
                assert placement.slots[holder][slot] == expert
                assert holder == rank or expert not in placement.slots[rank]


def test_copies_take_turns() -> None:
    placement = ExpertPlacement(((0, 1), (0, 2), (0, 3), (4, 5)), experts=6)
    wanted = torch.zeros(6, 1, dtype=torch.int64)
    assert PhysicalExperts(placement, 3).of(wanted)[:, 0].tolist() == [0, 2, 4, 0, 2, 4]
    assert PhysicalExperts(placement, 1).of(wanted)[:, 0].tolist() == [2] * 6


def test_a_rank_that_has_an_expert_in_several_slots_has_it_once() -> None:
    """Slots that are over hold again what a rank holds anyway, and no expert's rows are computed in two parts there."""
    placement = ExpertPlacement(((0, 0, 0), (1, 2, 1), (2, 3, 2)), experts=4)
    wanted = torch.tensor([[1, 2]] * 4)
    assert PhysicalExperts(placement, 0).of(wanted).tolist() == [[3, 4], [3, 6], [3, 4], [3, 6]]
