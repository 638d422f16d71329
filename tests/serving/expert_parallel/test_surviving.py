"""Who holds what after ranks have left or come: every expert somewhere, copies first, and little to load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.expert_parallel.epoch import Epoch, Report, Rules, encoded_loss, epoch_of, following, missing, report_of
from serving.expert_parallel.surviving import ExpertsLost, Placements, orphans, regrouped
from serving.model.expert_balance import ExpertPlacement, Layout, placed

ROOM = 64
History = tuple[Placements, list[tuple[bool, int]]]


@st.composite
def groups(draw: st.DrawFn) -> Placements:
    ranks, layers = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, 12))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    loads = st.lists(st.floats(0, 100), min_size=experts, max_size=experts)
    return tuple(placed(draw(loads), Layout(ranks=ranks, slots=slots)) for _ in range(layers))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """A group, and members that leave (True) or come, one after the other; some stays always."""
    origin = draw(groups())
    there, events = set(range(len(origin[0].slots))), []
    for number in draw(st.lists(st.integers(0, 5), max_size=8)):
        member = number % len(origin[0].slots)
        if member in there and len(there) == 1:
            continue
        events.append((member in there, member))
        there ^= {member}
    return origin, events


def first(origin: Placements) -> Epoch:
    members = {member: f"first {member}" for member in range(len(origin[0].slots))}
    return Epoch(number=0, members=members, placements=origin, step=0)


@given(histories())
def test_every_expert_is_held_and_tables_are_the_same_for_all(
    history: tuple[Placements, list[tuple[bool, int]]],
) -> None:
    origin, events = history
    rules = Rules(origin=origin, most_slots=ROOM, loads=True)
    epoch = first(origin)
    for number, (leaves, member) in enumerate(events):
        steps = {one: Report(step=number + one % 2) for one in epoch.members if not (leaves and one == member)}
        if not leaves:
            teller = min(steps)
            steps[teller] = Report(step=steps[teller].step, admits={member: f"again {number}"})
        before, epoch = epoch, following(epoch, steps, rules)
        assert epoch == following(before, dict(reversed(steps.items())), rules)  # whoever decides
        assert epoch_of(epoch.encoded()) == epoch  # and whoever reads it
        assert epoch.step == min(report.step for report in steps.values())
        assert epoch.order == sorted(epoch.members) and (member in epoch.members) is not leaves
        for now in epoch.placements:  # which checks that every expert has a place
            assert len(now.slots) == len(epoch.members)
        if leaves:
            stays_where_it_is(before, epoch, rules)
        else:
            brings_its_own(epoch, member, origin)


def stays_where_it_is(before: Epoch, after: Epoch, rules: Rules) -> None:
    """Only experts that nobody held any more are loaded, each once."""
    kept = [before.order.index(member) for member in after.order]
    nowhere = orphans(before.placements, kept)
    for layer, (was, now) in enumerate(zip(before.placements, after.placements, strict=True)):
        new = [expert for rank, old in enumerate(kept) for expert in sorted(set(now.slots[rank]) - set(was.slots[old]))]
        assert sorted(new) == nowhere.get(layer, [])
    assert after.loads is bool(nowhere)


def brings_its_own(epoch: Epoch, member: int, origin: Placements) -> None:
    rank = epoch.order.index(member)
    for now, was in zip(epoch.placements, origin, strict=True):
        assert set(now.slots[rank]) <= set(was.slots[member])


@given(groups())
def test_a_group_that_is_whole_again_has_the_slots_it_had(origin: Placements) -> None:
    ranks = len(origin[0].slots)
    rules = Rules(origin=origin, most_slots=ROOM, loads=True)
    epoch = first(origin)
    for member in range(1, ranks):
        epoch = following(epoch, {one: Report(step=0) for one in epoch.members if one != member}, rules)
    for member in range(1, ranks):
        reports = {one: Report(step=0, admits={member: "again"}) for one in epoch.members}
        epoch = following(epoch, reports, rules)
    assert {len(one) for now in epoch.placements for one in now.slots} == {len(origin[0].slots[0])}


def test_copies_give_way_to_experts_that_nobody_holds() -> None:
    origin = (ExpertPlacement(((0, 1), (1, 2), (2, 3)), experts=4),)
    (now,) = regrouped(origin, [0, 1], 2, 2)
    assert sorted(expert for held in now.slots for expert in held) == [0, 1, 2, 3]


def test_what_has_no_place_is_named() -> None:
    origin = (ExpertPlacement(((0, 1), (2, 3)), experts=4),)
    with pytest.raises(ExpertsLost, match=r"layer 0: 3\).* room for 3") as lost:
        regrouped(origin, [0], 2, 3)
    assert lost.value.experts == {0: [3]}
    rules = Rules(origin=origin, most_slots=ROOM, loads=False)
    with pytest.raises(ExpertsLost, match=r"layer 0: 0, 1\).*none can load") as lost:
        following(first(origin), {1: Report(step=5)}, rules)
    with pytest.raises(ExpertsLost, match=r"layer 0: 0, 1"):
        epoch_of(encoded_loss(lost.value))


def test_a_process_that_comes_takes_the_place_of_the_one_before() -> None:
    origin = (ExpertPlacement(((0, 1), (0, 1)), experts=2),)
    rules = Rules(origin=origin, most_slots=2, loads=False)
    reports = {0: Report(step=3, admits={1: "new"}), 1: Report(step=3)}
    epoch = following(first(origin), reports, rules)
    assert epoch.has(1, "new") and not epoch.has(1, "first 1")


def test_experts_that_have_moved_are_found_where_they_are() -> None:
    """Members 0 and 1 have exchanged experts 1 and 3 since the epoch began; the copies of member 2 are lost."""
    origin = (ExpertPlacement(((0, 1), (2, 3), (0, 2)), experts=4),)
    rules = Rules(origin=origin, most_slots=2, loads=False)
    reports = {0: Report(step=3, held=[[0, 3]]), 1: Report(step=3, held=[[2, 1]])}
    told = {member: report_of(report.encoded()) for member, report in reports.items()}
    epoch = following(first(origin), told, rules)
    assert epoch.placements == (ExpertPlacement(((0, 3), (2, 1)), experts=4),) and not epoch.loads


def test_who_may_yet_report() -> None:
    reports = {0: report_of(Report(step=1, lost=frozenset({2, 3})).encoded())}
    assert missing(range(5), reports, {3}) == ({1, 2, 4}, {1, 4})
