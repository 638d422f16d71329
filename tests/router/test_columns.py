"""Numbers that are kept between requests give the same shortlists as workers looked at anew, whatever has changed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.candidate import Candidate
from router.columns import SAMPLED, KeptColumns, WorkerColumns, least
from router.goodput import Goodput
from router.kept import MOST_KEPT
from router.policy import FleetView
from router.predict import KnownCosts
from router.shortlist import quickest_prompts, quickest_steps, quickest_texts, roomy
from serving.messages import Role
from tests.router.plain_choice import plain_choice
from tests.router.test_choices import NOW, a_demand, a_view, a_worker, learned

ROLES = tuple(Role)


def reborn(draw: random.Random, worker: Candidate) -> Candidate:
    """The same instance with another role, cost or size."""
    other = a_worker(draw, 0, ROLES).status
    told = draw.choice(({"role": other.role}, {"step_cost": other.step_cost}, {"total_blocks": other.total_blocks}))
    return replace(worker, status=replace(worker.status, **told))


def reported(draw: random.Random, worker: Candidate) -> Candidate:
    """Another queue, more leases, or steps that are found to take another time."""
    cost = worker.status.step_cost
    if cost is not None and draw.random() < 0.4:
        fitted = replace(cost, fixed=draw.choice((0.001, 0.006, 0.03)), token=draw.choice((5e-5, 3e-4)))
        return replace(worker, status=replace(worker.status, step_cost=fitted))
    return replace(worker, busy_until=NOW + draw.choice((0.0, 0.4)), leases=draw.choice((0, 3, 99)))


def changed(draw: random.Random, workers: list[Candidate], number: int) -> list[Candidate]:
    """Some have reported, one may have come or gone, or come back as something else."""
    found = [reported(draw, each) if draw.random() < 0.3 else each for each in workers]
    chance, place = draw.random(), draw.randrange(len(found))
    if chance < 0.3:
        found[place] = a_worker(draw, 200 + number, ROLES) if draw.random() < 0.2 else reborn(draw, found[place])
    elif chance < 0.4 and len(found) > 1:
        del found[place]
    elif chance < 0.5:
        found.insert(place, a_worker(draw, number, ROLES))
    return found


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 12) | st.integers(13, 90), most=st.integers(0, 6))
def test_shortlists_are_those_of_workers_looked_at_anew(seed: int, size: int, most: int) -> None:
    draw, kept = random.Random(seed), KeptColumns()
    workers = [a_worker(draw, number, ROLES) for number in range(size)]
    if size > 12:  # so many that one without a cost would nearly always be among them
        workers = [each for each in workers if each.cost is not None]
    for turn in range(6):
        demand, columns, costs = a_demand(draw, workers), kept.of(workers), KnownCosts(workers)
        assert columns.known == all(each.cost is not None for each in workers)
        assert columns.all_decode == all(each.decodes for each in workers)
        assert all(columns.holds(each) for each in workers)
        assert not columns.holds(replace(workers[0]))
        if columns.known:
            prefilling = [each for each in workers if each.prefills]
            prompts = quickest_prompts(demand, prefilling, costs, NOW, most)
            assert columns.prompts(demand, NOW, most) == prompts
            able = roomy(demand, workers)
            if columns.roomy(demand):
                steps = quickest_steps([each for each in able if not each.prefills], costs, most)
                texts = quickest_texts(demand, [each for each in able if each.prefills], costs, NOW, most)
                assert (columns.steps(most), columns.texts(demand, NOW, most)) == (steps, texts)
        workers = changed(draw, workers, 100 + turn)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 12))
def test_a_policy_that_has_chosen_before_chooses_as_its_formulas_say(seed: int, size: int) -> None:
    draw = random.Random(seed)
    workers = [a_worker(draw, number, ROLES) for number in range(size)]
    policy = Goodput(learned(draw, workers))
    for turn in range(5):
        demand, view = a_demand(draw, workers), a_view(draw, workers)
        assert policy.choose(demand, view, NOW) == plain_choice(policy.calibration, demand, view, NOW)
        fewer = FleetView(view.decode[1:], view.prefill, view.links)  # the best was full
        assert policy.choose(demand, fewer, NOW) == plain_choice(policy.calibration, demand, fewer, NOW)
        workers = changed(draw, workers, 100 + turn)


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(0, 9), st.randoms(use_true_random=False))
def test_the_least_few_are_those_of_all_sorted(numbers: list[int], most: int, draw: random.Random) -> None:
    draw.shuffle(numbers)
    places = range(len(numbers))
    assert least(numbers, most) == sorted(places, key=numbers.__getitem__)[:most]
    wanted = bytearray(draw.random() < 0.8 for _ in places)
    asked = [place for place in places if wanted[place]]
    assert least(numbers, most, wanted) == sorted(asked, key=numbers.__getitem__)[:most]


@pytest.mark.parametrize("most", [1, 4, 8])
def test_the_least_few_may_all_be_those_looked_at_first(most: int) -> None:
    numbers = [place + (1000 if place % SAMPLED else 0) for place in range(3 * SAMPLED * most)]
    assert least(numbers, most) == [SAMPLED * place for place in range(most)]


def test_few_lists_of_workers_are_kept() -> None:
    draw, kept = random.Random(1), KeptColumns()
    workers = [a_worker(draw, number, (Role.MIXED,)) for number in range(10)]
    first = kept.of(workers)
    for size in range(1, 2 * MOST_KEPT):
        kept.of(workers[:size])
        assert kept.of(list(workers)) is first, "what is asked for again stays"
    last = kept.of(workers[:1])
    for size in range(2, 2 + MOST_KEPT):
        kept.of(workers[:size])
    assert kept.of(workers[:1]) is not last


def test_nobody_has_columns_too() -> None:
    assert WorkerColumns([]).known and not WorkerColumns([]).prefilling
