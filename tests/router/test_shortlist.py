"""The shortlist is the best few by the rough estimates it names, whatever workers there are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.calibration import Calibration
from router.candidate import Candidate, Dispatched
from router.placements import MIXED, SHORTLIST, PlacementSearch
from router.policy import Demand
from router.predict import KnownCosts
from router.shortlist import quickest_prompts, quickest_steps, quickest_texts, roomy
from serving.messages import Role
from serving.step_cost import StepCost
from tests.router.scripted import lease_view, make_status

NOW = 50.0


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for number in range(draw(st.integers(0, 12))):
        rows = draw(st.integers(0, 8))
        status = make_status(
            f"w{number}",
            draw(st.sampled_from(list(Role))),
            step_cost=StepCost(
                fixed=draw(st.sampled_from((0.001, 0.01))), token=draw(st.sampled_from((1e-5, 1e-3))), sequence=1e-4
            ),
            waiting_seconds=draw(st.sampled_from((0.0, 0.5, 3.0))),
            running=rows,
            leases=rows,
            context_tokens=100 * rows,
            total_blocks=draw(st.sampled_from((4, 100))),
        )
        found.append(Candidate(status, Dispatched(), made_at=draw(st.sampled_from((NOW, NOW - 1.0)))))
    return found


def first(demand: Demand, worker: Candidate) -> float:
    assert worker.cost is not None
    return max(0.0, worker.prompts_left_at - NOW) + worker.cost.token * demand.uncached(worker)


def step(worker: Candidate) -> float:
    assert worker.cost is not None
    return worker.cost.seconds(worker.decode_load)


@settings(max_examples=150, deadline=None)
@given(fleets(), st.integers(0, 5), st.integers(1, 900), st.data())
def test_the_best_few_by_plain_sorting(workers: list[Candidate], most: int, tokens: int, data: st.DataObject) -> None:
    cached = {worker.status.instance: data.draw(st.integers(0, tokens - 1)) for worker in workers[::2]}
    demand, costs = Demand(tokens=tokens, output=20, cached=cached), KnownCosts(workers)

    assert quickest_prompts(demand, workers, costs, NOW, most) == sorted(workers, key=lambda w: first(demand, w))[:most]
    assert quickest_steps(workers, costs, most) == sorted(workers, key=step)[:most]
    texts = sorted(workers, key=lambda w: first(demand, w) + 20 * step(w))[:most]
    assert quickest_texts(demand, workers, costs, NOW, most) == texts
    fitting = [worker for worker in workers if not demand.streams(worker)] or workers
    assert roomy(demand, workers) == ([worker for worker in fitting if worker.load < 1.0] or fitting)


def test_as_many_placements_are_predicted_for_hundreds_of_workers_as_for_a_few() -> None:
    """What grows with the fleet is the shortlist alone."""
    cost = StepCost(fixed=0.01, token=1e-4)

    def considered(each: int) -> int:
        workers = [
            Candidate(make_status(f"{role}-{number}", role, step_cost=cost)) for role in Role for number in range(each)
        ]
        demand = Demand(tokens=100)
        view, costs = lease_view(demand, workers), KnownCosts(workers)
        return len(PlacementSearch(demand, view, 0.0, costs, Calibration(), demand.turn(0.0)).placements())

    assert considered(100) == considered(2 * MIXED) <= (SHORTLIST + MIXED) * (SHORTLIST + 1)
