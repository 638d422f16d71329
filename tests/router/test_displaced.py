"""A copy of what another worker has cached takes the place of KV that is looked for, and is computed again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from router.arrivals import Arrivals
from router.candidate import Candidate, QueuedPrompt
from router.goodput import Goodput
from router.policy import Demand
from router.request_state import RequestState
from router.worth import worth
from serving.errors import Overloaded
from serving.messages import Role
from serving.service_class import ServiceClass
from tests.router.conftest import wanted
from tests.router.costed import choose, wanting, worker
from tests.router.plain_choice import plain_choice
from tests.router.scripted import lease_view

ALIKE = Arrivals(0, 1.5, 0.1, 2.0)  # prompts of 0.1 s that have a second and a half, two a second


def wanted_there(name: str, role: Role = Role.MIXED, waits: float = 0.5) -> Candidate:
    return replace(worker(name, role, waiting_seconds=waits), arrivals=(ALIKE,))


def scores(demand: Demand, *workers: Candidate) -> dict[tuple[str, str], float]:
    considered = choose(demand, *workers).considered
    return {(each.prefill, each.decode): each.score for each in considered if each.score is not None}


def test_shared_prompts_stay_where_they_are_cached_while_copies_make_others_late() -> None:
    holder, other = wanted_there("h", waits=0.75), wanted_there("o", waits=0.2)
    demand = wanting(tokens=1000, ttft=1.5)
    assert choose(demand, holder, other).prefill is other
    shared = replace(demand, cached={"h-life": 700})
    assert choose(shared, holder, other).prefill is holder
    nobody_comes = replace(other, arrivals=())
    assert choose(shared, holder, nobody_comes).prefill is nobody_comes, "it is earlier there, and makes nobody late"


def test_one_prefix_that_everybody_asks_for_is_copied_before_queues_grow() -> None:
    """To workers that nobody else needs, and to others once it would be late."""
    coming, demand = ALIKE._replace(limit=5.0, rate=0.5), wanting(tokens=2000, ttft=5.0, cached={"h-life": 1900})
    holder, idle = wanted_there("h", waits=1.5), worker("i")
    assert choose(demand, holder, idle).prefill is idle
    needed = replace(idle, arrivals=(coming,))
    assert choose(demand, holder, needed).prefill is holder
    assert choose(demand, wanted_there("h", waits=6.0), needed).prefill is needed


def test_kv_that_nobody_has_costs_no_more_than_it_did() -> None:
    """It must be kept somewhere."""
    mixed, prefill = wanted_there("m", waits=0.8), worker("p", Role.PREFILL, waiting_seconds=0.4)
    unshared = scores(wanting(tokens=1000, ttft=1.5), mixed, prefill)
    elsewhere = scores(wanting(tokens=1000, ttft=1.5, cached={"gone-life": 900}), mixed, prefill)
    assert unshared == elsewhere, "what no worker of the view has cached is not there"


def test_a_copy_that_is_handed_over_displaces_what_its_decode_worker_has_cached() -> None:
    """The less, the more of it is there already."""
    mixed, prefill = wanted_there("m", waits=0.8), worker("p", Role.PREFILL, waiting_seconds=0.4)
    demand = wanting(tokens=1000, ttft=1.5)
    told = [
        scores(replace(demand, cached={"p-life": 900, "m-life": there}), mixed, prefill)["p", "m"]
        for there in (0, 400, 700, 900)
    ]
    assert all(less < more for less, more in pairwise(told)) and told[0] < told[-1] - 0.1


def test_a_worker_that_only_decodes_computes_nothing_again() -> None:
    decode, prefill = wanted_there("d", Role.DECODE), worker("p", Role.PREFILL)
    told = [
        scores(wanting(tokens=1000, ttft=3.0, cached={"p-life": 900, "d-life": there}), decode, prefill)
        for there in (0, 800)
    ]
    assert told[0] == told[1]


def test_what_only_decode_workers_have_is_no_copy() -> None:
    decode, first, second = worker("d", Role.DECODE), wanted_there("p", Role.PREFILL), wanted_there("q", Role.PREFILL)
    demand = wanting(tokens=1000, ttft=1.5)
    kept = replace(demand, cached={"d-life": 900})
    assert scores(kept, decode, first, second) == scores(demand, decode, first, second)


@pytest.mark.parametrize("rate", [0.2, 0.5, 1.0, 20.0])
@pytest.mark.parametrize("left", [1.5, -0.1])
def test_a_copy_costs_the_same_however_it_comes_to_a_worker(rate: float, left: float) -> None:
    """Else an idle worker that has the prefix would be passed over for one that computes it again, and late."""
    holder = worker("p", Role.PREFILL)
    mixed = replace(worker("m"), arrivals=(ALIKE._replace(rate=rate),))
    demand = wanting(tokens=4000, ttft=1.5, cached={"p-life": 3900})
    assert choose(replace(demand, first_token_in=left), mixed, holder).prefill is holder


def test_the_price_of_a_copy_is_bounded() -> None:
    """However many come to a worker: twice the weight of the request, at each worker that gets a copy."""
    holder, busy = worker("h", Role.PREFILL), replace(worker("b"), arrivals=(ALIKE._replace(rate=50.0),))
    demand = wanting(tokens=2000, ttft=3.0, weight=0.5)
    plain, priced = (scores(replace(demand, cached=cached), holder, busy) for cached in ({}, {"h-life": 1900}))
    assert plain["b", "b"] - priced["b", "b"] == pytest.approx(1.0)
    assert scores(replace(demand, cached={"b-life": 0, "h-life": 1900}), holder, busy)["h", "b"] >= -1.0 - 0.5


@pytest.mark.parametrize("others", [1, 8, 30])
def test_a_holder_is_looked_at_among_many(others: int) -> None:
    """A shortlist goes by time alone."""
    demand = wanting(tokens=1000, ttft=1.5, cached={"h-life": 700})
    holder, more = wanted_there("h", waits=0.75), [wanted_there(f"o{n}", waits=0.2) for n in range(others)]
    assert choose(demand, *more, holder).prefill is holder
    holder, decode = wanted_there("h", Role.PREFILL, waits=0.75), worker("d", Role.DECODE)
    more = [wanted_there(f"o{n}", Role.PREFILL, waits=0.2) for n in range(others)]
    assert choose(demand, decode, *more, holder).prefill is holder


@pytest.mark.parametrize("waiting", [3.0, 300.0])
def test_who_is_late_where_others_lose_least_is_shed_or_degraded(waiting: float) -> None:
    """Also where it could be in time elsewhere. Before: it queued where it was late, and the queue had no bound."""
    idle = replace(worker("m"), arrivals=(ALIKE._replace(limit=1.0, rate=1.0),))
    late, demand = worker("l", waiting_seconds=waiting), wanting(tokens=1400, ttft=1.5, cached={"l-life": 1350})
    decision = choose(demand, idle, late)
    assert decision.prefill is late
    assert any(each.predicted is not None and each.predicted.ttft < 1.5 for each in decision.considered), "elsewhere"
    state = RequestState(request=wanted(max_tokens=64))
    assert not worth(ServiceClass(name="d", degrade=True), state, demand, decision) and state.degraded
    with pytest.raises(Overloaded):
        worth(ServiceClass(name="s", shed=True), RequestState(request=wanted(max_tokens=64)), demand, decision)


def test_a_copy_stands_behind_what_other_routers_have_sent_as_far_as_its_own_time_tells() -> None:
    """Strangers' prompts are due as this router's are: the copy, which takes longer, waits for more of them."""
    soon, later = QueuedPrompt(0, 0.9, 0.2), QueuedPrompt(0, 5.0, 0.2)
    busy = worker("o", waiting_seconds=1.2, waiting=9, queued=[soon, later])
    busy = replace(busy, arrivals=(ALIKE, ALIKE._replace(limit=4.0)))
    assert busy.strangers
    demand = wanting(tokens=300, ttft=2.0, cached={"h-life": 250})
    holder, policy = wanted_there("h", waits=1.0), Goodput()
    view = lease_view(demand, (holder, busy))
    assert policy.choose(demand, view, 0.0) == plain_choice(policy.calibration, demand, view, 0.0)
