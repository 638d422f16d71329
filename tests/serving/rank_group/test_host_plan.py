"""Rows go to a host once, and there to a rank that holds their expert, however hosts, ranks and losses fall."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.expert_parallel.physical import PhysicalExperts
from serving.expert_parallel.surviving import Placements, regrouped
from serving.model.expert_balance import Layout, placed
from serving.rank_group.host_plan import (
    BRIDGE,
    HostPlace,
    host_plan,
    of_members,
    of_ranks_of,
    refusal,
    unplaced,
)

LAYERS = 2


@st.composite
def hosted(draw: st.DrawFn) -> tuple[Placements, int, list[HostPlace]]:
    """Experts spread over all ranks, the leader's ranks, and the hosts of the others."""
    local, sizes = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = local + sum(sizes)
    experts, redundant = draw(st.integers(ranks, 16)), draw(st.integers(0, 4))
    slots = min(-(-(experts + redundant) // ranks), experts)
    placements = (placed([1.0] * experts, Layout(ranks=ranks, slots=slots)),) * LAYERS
    starts = [local + sum(sizes[:number]) for number in range(len(sizes))]
    return placements, local, [HostPlace(*both) for both in zip(starts, sizes, strict=True)]


@given(hosted(), st.integers(0, 2**32))
def test_a_row_reaches_every_expert_of_it_and_each_host_once(
    case: tuple[Placements, int, list[HostPlace]], seed: int
) -> None:
    of_ranks, local, places = case
    members = of_members(of_ranks, local, places)
    experts, slots = members[0].experts, len(members[0].slots[0])
    wanted = torch.randint(experts, (20, 3), generator=torch.Generator().manual_seed(seed))
    plans = [
        host_plan([one.slots[local + number] for one in members], experts, of_ranks_of(of_ranks, place))
        for number, place in enumerate(places)
    ]
    for layer, placement in enumerate(members):
        for rank in range(local):
            for experts_K, physical_K in zip(
                wanted.tolist(), PhysicalExperts(placement, rank).of(wanted).tolist(), strict=True
            ):
                for expert, number in zip(experts_K, physical_K, strict=True):
                    member, slot = divmod(number, slots)
                    assert placement.slots[member][slot] == expert
                    if member >= local:
                        assert rank_held(plans[member - local], layer, slot) == expert


def rank_held(plan: object, layer: int, slot: int) -> int:
    """The expert where the host's rows for a slot go, which is not its bridge's."""
    placement = plan.placements[layer]  # type: ignore[attr-defined]
    rank, at = divmod(plan.physical[layer][slot], len(placement.slots[0]))  # type: ignore[attr-defined]
    assert rank != BRIDGE
    held: int = placement.slots[rank][at]
    return held


def test_no_row_goes_to_the_copy_that_a_rank_without_an_expert_has() -> None:
    plan = host_plan([[0, 1]], 4, [[[0, 1]], [[2, 3]]])
    assert plan.physical == ((2, 3),), "both lie with rank 1, whose slots are 2 and 3"


@given(hosted())
def test_nothing_is_loaded_for_what_ranks_have_and_no_rank_holds_more_than_its_share(
    case: tuple[Placements, int, list[HostPlace]],
) -> None:
    of_ranks, local, places = case
    members = of_members(of_ranks, local, places)
    share = len(of_ranks[0].slots[0])
    for number, place in enumerate(places, local):
        before = of_ranks_of(of_ranks, place)
        plan = host_plan([one.slots[number] for one in members], members[0].experts, before)
        for layer, placement in enumerate(plan.placements):
            for rank in range(place.ranks):
                held = set(placement.slots[rank + 1])
                assert held <= set(before[rank][layer]) and len(held) <= share


@given(hosted(), st.data())
def test_what_a_lost_member_held_is_spread_over_the_ranks_of_a_host(
    case: tuple[Placements, int, list[HostPlace]], data: st.DataObject
) -> None:
    """The new ones evenly, and what a rank has stays where it is."""
    of_ranks, local, places = case
    members = of_members(of_ranks, local, places)
    lost = data.draw(st.integers(1, local + len(places) - 1)) if local + len(places) > 2 else None
    if lost is None:
        return
    left = [member for member in range(local + len(places)) if member != lost]
    after = regrouped(members, left, len(members[0].slots[0]), members[0].experts)
    for number, place in enumerate(places, local):
        if number == lost:
            continue
        held, before = [one.slots[left.index(number)] for one in after], of_ranks_of(of_ranks, place)
        plan = host_plan(held, after[0].experts, before)
        for layer, placement in enumerate(plan.placements):
            ranks = placement.slots[1:]
            for slot, expert in enumerate(held[layer]):
                assert rank_held(plan, layer, slot) == expert
            had = [set(rank[layer]) for rank in before]
            moved = [e for e in set(held[layer]) if any(e in one for one in had)]
            assert all(any(e in one and e in rank for one, rank in zip(had, ranks, strict=True)) for e in moved)
            counts = Counter(len(set(rank)) for rank in ranks)
            assert max(counts) <= max(-(-len(set(held[layer])) // place.ranks), max(map(len, had)))


@given(hosted())
def test_hosts_take_all_ranks_that_are_not_the_leaders(case: tuple[Placements, int, list[HostPlace]]) -> None:
    of_ranks, local, places = case
    ranks = len(of_ranks[0].slots)
    taken: list[HostPlace] = []
    for place in places:
        assert unplaced(taken, local, ranks)
        assert refusal(place, taken, local, ranks) is None
        taken.append(place)
        assert refusal(place, taken, local, ranks) is not None
    assert unplaced(taken, local, ranks) == []


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (HostPlace(1, 1), "rank 1 cannot be a host's: ranks 2 to 5 are those of other hosts"),
        (HostPlace(5, 2), "ranks 5 to 6 cannot be a host's"),
        (HostPlace(3, 0), "cannot be a host's"),
        (HostPlace(2, 2), "ranks 2 to 3 cannot be this host's: another one has rank 3"),
    ],
)
def test_places_that_cannot_be_had(place: HostPlace, told: str) -> None:
    found = refusal(place, [HostPlace(3, 1)], 2, 6)
    assert found is not None and told in found
