"""Whatever numbers a worker's heartbeat carries, the router places requests, and what it tells of them can be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.overview import describe
from router.policies import POLICIES
from router.predict import Prediction
from router.refusals import LONGEST_RETRY, MIN_RETRY, check_hope
from router.registry import LONGEST_WAIT, believable
from router.request_state import RequestState
from serving.api.failures import error_response
from serving.errors import MillraceError, Overloaded
from serving.messages import Role, Slo, WorkerStatus
from serving.step_cost import MOST, StepCost
from serving.timeline import Moment
from tests.router.conftest import World, wanted
from tests.router.scripted import make_status

NO_NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 1.7e308)
NUMBERS = st.sampled_from([0.0, 5e-324, 1e-300, 1e-6, 0.5, 1.0, MOST - 1, 1e9, *NO_NUMBERS])
SMALL = st.sampled_from([0.0, 5e-324, 1e-9, 1e-3])
COUNTS = st.sampled_from([0, 1, 2, 16, 1000, 2**31, 2**32 - 1])  # uint32
COSTS = st.builds(StepCost, fixed=SMALL, token=SMALL, pair=SMALL, sequence=SMALL, context=SMALL, samples=COUNTS)
ODD_COSTS = st.builds(StepCost, fixed=NUMBERS, token=NUMBERS, pair=NUMBERS, context=NUMBERS, error=NUMBERS)
STATUSES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"role": st.sampled_from(Role)},
    optional={
        **dict.fromkeys(("block_size", "total_blocks", "free_blocks", "max_seqs", "running", "waiting"), COUNTS),
        **dict.fromkeys(("waiting_tokens", "leases", "max_batched_tokens"), COUNTS),
        **dict.fromkeys(("waiting_seconds", "prompt_share", "stalled_seconds"), NUMBERS),
        "context_tokens": st.sampled_from([0, 1, 2**64 - 1]),
        "tpot_counts": st.lists(COUNTS, max_size=40).map(tuple),
        "step_cost": COSTS | COSTS | ODD_COSTS,
        "counters": st.dictionaries(st.sampled_from(["engine_steps", "x"]), NUMBERS),
    },
)


@settings(max_examples=120, deadline=None)
@given(
    fields=st.lists(STATUSES, min_size=1, max_size=3),
    policy=st.sampled_from(["goodput", "goodput", *POLICIES]),
    slo=st.builds(
        Slo, ttft_ms=st.sampled_from([None, 5e-324, 1e3, 1e308]), tpot_ms=st.sampled_from([None, 1e-300, 1e308])
    ),
    named=st.sampled_from(["interactive", "batch"]),
)
def test_any_heartbeat_leaves_predictions_that_are_numbers(
    fields: Sequence[dict[str, Any]], policy: str, slo: Slo, named: str
) -> None:
    world = World(policy=policy)
    for _ in range(2):
        for number, each in enumerate(fields):
            world.fleet.heartbeat(make_status(f"w{number}", **each))
        world.let_pass(1.0)
    for entry in world.fleet.registry.workers.values():
        told = orjson.loads(orjson.dumps(describe(entry, world.now)))
        assert all(told[name] is not None for name in ("queue_seconds", "steps", "stalled_seconds"))
    for tokens in (1, 8):
        state = RequestState(request=wanted(max_tokens=tokens, slo=slo, service_class=named))
        state.timeline.note(Moment.ARRIVED, world.now)
        look = world.placer.look(state)
        decision = world.placer.policy.choose(look.demand, look.view, world.now)
        if decision is None or decision.predicted is None:
            continue
        assert all(0.0 <= number < math.inf for number in _seconds(decision.predicted)), decision.predicted
        try:
            check_hope(decision.predicted, look.demand.first_token_in, state)
        except MillraceError as error:
            assert error.retry_after is None or MIN_RETRY <= error.retry_after <= LONGEST_RETRY
        world.placer.placed(decision, look.demand).release()
        world.placer.policy.observed(decision, ttft=1.0, tpot=0.1)


def _seconds(told: Prediction) -> list[float]:
    return [told.queue, told.prefill, told.transfer, told.step, told.token, told.ttft, told.tpot, told.error]


@pytest.mark.parametrize("number", [*NO_NUMBERS, LONGEST_WAIT])
def test_what_cannot_be_right_counts_as_not_told(number: float) -> None:
    cost = StepCost(fixed=1e-3, token=1e-5)
    wrong = make_status("w", waiting_seconds=number, prompt_share=0.5, step_cost=cost)
    assert believable(wrong) == make_status("w")
    assert believable(make_status("w", waiting_seconds=number)) == make_status("w"), "also without a model"
    fine = make_status("w", waiting_seconds=3.0, prompt_share=1.0, step_cost=cost, counters={"engine_steps": 7.0})
    assert believable(fine) is fine


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_counter_that_is_no_number_moves_no_engine(number: float) -> None:
    def odd(**fields: Any) -> WorkerStatus:
        return make_status("w", running=1, counters={"engine_steps": number, "engine_tokens": 3.0}, **fields)

    told = believable(odd(stalled_seconds=number))
    assert told.counters == {"engine_tokens": 3.0} and told.stalled_seconds == 0.0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -5.0, 1e300])
def test_an_answer_names_a_time_that_can_be_waited_for(seconds: float) -> None:
    """An error may come from another service, with whatever number."""
    told = error_response(Overloaded("full", code="no_room", retry_after=seconds)).headers["retry-after"]
    assert 1 <= int(told) <= 86_400
