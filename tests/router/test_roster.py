"""What is kept between requests says the same of workers as looking at all of them anew, whatever has changed."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import BreakerConfig
from router.candidate import Candidate
from router.generations import offer
from router.kept import Kept
from router.loads import WorkerLoads
from router.policy import LeastLoaded, able_to_decode, able_to_prefill
from router.roster import Roster
from router.trust import Trust
from serving.messages import Role
from tests.router.test_choices import NOW, a_demand, a_worker
from tests.router.test_columns import changed

MIXED_ALONE, ALL = (Role.MIXED,), tuple(Role)


def varied(draw: random.Random, worker: Candidate) -> Candidate:
    """Of few loads, so that there are ties; now and then draining, of a shorter context, or slow."""
    status = replace(
        worker.status,
        draining=draw.random() < 0.1,
        max_model_len=draw.choice((65_536, 65_536, 1000)),
        leases=draw.choice((0, 1)),
        running=0,
    )
    return replace(worker, status=status, slow=draw.random() < 0.2)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 30), alike=st.booleans())
def test_the_roster_offers_the_workers_that_are_found_anew(seed: int, size: int, alike: bool) -> None:
    draw, kept, policy = random.Random(seed), Kept(Roster), LeastLoaded()
    reach, roles = Trust(BreakerConfig(), stall=10.0), MIXED_ALONE if alike else ALL
    workers = [a_worker(draw, number, roles) for number in range(size)]
    if alike:
        workers = [replace(each, status=replace(each.status, pairing="model")) for each in workers]
    for turn in range(8):
        demand, roster = a_demand(draw, workers), kept.of(workers)
        able, prefills = able_to_decode(demand, workers), able_to_prefill(demand, workers)
        given_before = roster.to_decode(demand), roster.to_prefill(demand)
        assert list(given_before[0]) == able and list(given_before[1]) == prefills
        found, wanted = roster.offer(demand, reach, NOW), offer(demand, able, prefills, workers, reach, NOW)
        assert (list(found.decodes), list(found.prefills)) == (list(wanted.decodes), list(wanted.prefills))
        assert found.home == wanted.home
        best = LeastLoaded().decode_order(demand, able)
        assert policy.best_decode(demand, able) is (best[0] if best else None)
        before = [list(each) for each in given_before]
        workers = changed(draw, workers, 100 + turn)
        workers = [varied(draw, each) if draw.random() < 0.1 else each for each in workers]
        kept.of(workers)
        assert [list(each) for each in given_before] == before, "what was given has changed under its reader"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 30))
def test_the_least_loaded_are_those_found_anew(seed: int, size: int) -> None:
    draw, kept = random.Random(seed), Kept(WorkerLoads)
    workers = [varied(draw, a_worker(draw, number, ALL)) for number in range(size)]
    for _ in range(6):
        tokens = draw.choice((1, 1599, 1600, 100_000))
        found = kept.of(workers).least(tokens)
        holding = [each for each in workers if tokens < each.device_tokens] or workers
        loads = [each.load + 0.25 * each.slow for each in holding]
        assert found == [each for each, load in zip(holding, loads, strict=True) if load == min(loads)]
        workers = [varied(draw, each) if draw.random() < 0.3 else each for each in workers]


def test_most_of_a_thousand_workers_are_not_looked_at_again() -> None:
    """Of those that have not changed no attribute is read: whoever touches one is found out."""

    class Untouched:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} of a worker that has not changed")

    draw = random.Random(1)
    workers: list[Candidate] = [a_worker(draw, number, MIXED_ALONE) for number in range(1000)]
    roster, loads = Roster(workers), WorkerLoads(workers)
    after = [replace(each) if number == 500 else each for number, each in enumerate(workers)]
    known = [each if number == 500 else Untouched() for number, each in enumerate(workers)]
    now = [each if number == 500 else known[number] for number, each in enumerate(after)]
    roster._workers, loads._workers = known, list(known)  # type: ignore[assignment]
    assert roster.follow(now) and loads.follow(now)  # type: ignore[arg-type]
    assert roster._decoding.workers[500] is after[500] is loads._workers[500]
