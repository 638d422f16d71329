"""Workers' time that offered work takes, by the step costs that workers have learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.autoscaler.demand import (
    RoleNeed,
    largest_batch,
    measured_use,
    role_need,
    traffic_profile,
    worker_capacity,
)
from deploy.autoscaler.gain import erlang_c, predicted_attainment
from deploy.autoscaler.observation import MetricsMissing
from deploy.autoscaler.shift import profile_shift
from serving.step_cost import StepLoad
from tests.deploy.autoscaler.figures import COST, INTERVAL, D, P, observation, offered, ready, seen, series

FLEET = ready(prefill=2, decode=2)


def test_the_largest_batch_is_the_last_that_keeps_tpot() -> None:
    shown = observation(0.0, FLEET, 1.0, prompt=500, output=64)
    profile = traffic_profile(shown)
    batch = int(largest_batch(COST, profile, shown.workers))
    context = profile.context
    assert profile.tpot == 0.4 and 532 <= context < 533
    for sequences, fits in ((batch, True), (batch + 1, False)):
        load = StepLoad(sequences, sequences * context, sequences, sequences * context)
        assert (COST.seconds(load) <= 0.4) is fits
    tight = [seen("d", D, kv_tokens=1100)]
    assert largest_batch(COST, profile, tight) == pytest.approx(1100 / context)
    assert largest_batch(COST, profile, [seen("d", D, max_seqs=4)]) == 4
    assert largest_batch(COST, replace(profile, tpot=0.05), shown.workers) == 1


def test_prompts_need_the_seconds_that_their_steps_take() -> None:
    """One prompt of a step's budget a second: the seconds of that step."""
    shown = observation(0.0, FLEET, 1.0, prompt=512, output=1)
    profile = traffic_profile(shown)
    need = role_need(shown, profile, worker_capacity(shown.workers, profile))
    assert need.prefill == pytest.approx(COST.prompt_seconds(0, 512, 512), rel=0.01)


def test_what_workers_hold_already_need_not_be_computed() -> None:
    plain = observation(0.0, FLEET, 1.0, prompt=500)
    held = replace(plain, work={"standard": offered(15, prompt=500, cached_tokens=15 * 250)})
    profiles = [traffic_profile(each) for each in (plain, held)]
    capacity = worker_capacity(plain.workers, profiles[0])
    needs = [role_need(each, profile, capacity) for each, profile in zip((plain, held), profiles, strict=True)]
    assert 0.45 * needs[0].prefill < needs[1].prefill < 0.6 * needs[0].prefill and needs[0].decode == needs[1].decode


def test_a_full_decode_worker_is_one_worker() -> None:
    shown = observation(0.0, FLEET, 1.0)
    profile = traffic_profile(shown)
    capacity = worker_capacity(shown.workers, profile)
    served = replace(shown, tokens=round(capacity.tokens * INTERVAL), work={"standard": offered(0)})
    assert role_need(served, profile, capacity).decode == pytest.approx(1.0, rel=0.01)


def test_nothing_is_guessed_where_nobody_has_measured() -> None:
    shown = observation(0.0, FLEET, 1.0)
    blind = [replace(worker, cost=None) for worker in shown.workers]
    with pytest.raises(MetricsMissing):
        worker_capacity(blind, traffic_profile(shown))
    one = [*blind[:3], shown.workers[3]]
    assert worker_capacity(one, traffic_profile(shown)).prefill == COST, "another's costs are better than none"


def test_kv_of_leases_that_wait_for_prompts_is_no_decoding() -> None:
    shown = observation(0.0, ready(decode=1), 1.0)
    profile = traffic_profile(shown)
    capacity = worker_capacity(shown.workers, profile)
    for running, use in ((2, 0.225), (8, 0.9)):
        full = replace(shown, workers=(seen("d", D, running=running, leases=8, kv_usage=0.9),))
        assert measured_use(full, capacity).decode == pytest.approx(use, abs=0.15)
    assert measured_use(replace(shown, workers=(seen("p", P, busy=0.7),)), capacity).prefill == 0.7


@given(st.floats(0.01, 3), st.integers(1, 5), st.integers(1, 5))
def test_more_workers_never_lower_the_predicted_attainment(rate: float, prefill: int, decode: int) -> None:
    shown = observation(0.0, FLEET, rate * 10)
    profile = replace(traffic_profile(shown), rate=rate)
    capacity = worker_capacity(shown.workers, profile)
    need = role_need(replace(shown, seconds=INTERVAL * 10), profile, capacity)
    here = predicted_attainment(profile, capacity, need, prefill, decode)
    assert 0 <= here <= 1
    assert predicted_attainment(profile, capacity, need, prefill + 1, decode) >= here - 1e-9
    assert predicted_attainment(profile, capacity, need, prefill, decode + 1) >= here - 1e-9


def test_erlangs_c_is_the_chance_to_wait() -> None:
    assert erlang_c(1, 0.4) == pytest.approx(0.4)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


def test_a_shift_of_lengths_or_rate_is_told() -> None:
    steady = series(FLEET, [1.0] * 12)
    assert profile_shift(steady, 60.0) == ""
    longer = [*steady[:8], *series(FLEET, [1.0] * 12, output=96)[8:]]
    assert profile_shift(longer, 60.0) == "output tokens 32 → 96"
    assert profile_shift(series(FLEET, [1.0] * 8 + [4.0] * 4), 60.0) == "requests/s 1 → 4"
    assert profile_shift(series(FLEET, [0.05] * 12), 60.0) == "", "too few to tell"


def test_prompts_that_take_no_time_come_in_time() -> None:
    shown = observation(0.0, FLEET, 1.0, prompt=500, output=64)
    profile = traffic_profile(shown)
    capacity = worker_capacity(shown.workers, profile)
    assert predicted_attainment(profile, capacity, RoleNeed(prefill=0.0, decode=0.0), 1, 1) > 0.99
