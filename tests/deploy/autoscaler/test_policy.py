"""What the policy does, and what it never does: pure, over made-up observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.autoscaler.actuator import FleetWorker
from deploy.autoscaler.fleet_load import ScaledFleet
from deploy.autoscaler.limits import AutoscalerLimits, RoleLimits
from deploy.autoscaler.observation import Observation
from deploy.autoscaler.policy import Action, AddWorker, DrainWorker, FlipWorker, decide, predicted_gain
from serving.messages import Role
from tests.deploy.autoscaler.figures import INTERVAL, D, M, P, observation, offered, ready, series

LIMITS = AutoscalerLimits()
LONG = 24  # observations: more than the window of scaling down

# With COST a prompt of 500 tokens takes 2.6 s of a prefill worker; a decode worker gives about 30 tokens/s at 0.4 s.
PREFILL_HEAVY, DECODE_HEAVY = {"prompt": 500, "output": 4}, {"prompt": 60, "output": 64}


def applied(fleet: ScaledFleet, action: Action | None) -> ScaledFleet:
    """The fleet once the action is over."""
    workers = list(fleet.workers)
    match action:
        case AddWorker(role):
            workers.append(FleetWorker(f"{role}-new-{len(workers)}", role, "ready"))
        case DrainWorker(worker_id, _):
            workers = [each for each in workers if each.worker_id != worker_id]
        case FlipWorker(worker_id, role):
            workers = [replace(each, role=role) if each.worker_id == worker_id else each for each in workers]
    return ScaledFleet(tuple(workers), fleet.changed_at)


def act(observations: Sequence[Observation], fleet: ScaledFleet, limits: AutoscalerLimits = LIMITS) -> Action | None:
    return decide(observations, fleet, limits, 0.0).action


def test_mixed_workers_beside_others_are_not_scaled_and_more_than_there_may_be_is_no_error() -> None:
    fleet = ready(prefill=1, decode=1, mixed=3)
    assert act(series(fleet, [0.01] * 5, **PREFILL_HEAVY), fleet, AutoscalerLimits(most_workers=4)) is None


# ---- what it does --------------------------------------------------------------------------------------------------


def test_a_role_that_is_short_gets_a_worker_from_one_with_a_worker_to_spare() -> None:
    fleet = ready(prefill=3, decode=1)
    decision = decide(series(fleet, [0.6] * 5, **DECODE_HEAVY), fleet, LIMITS, 0.0)
    assert isinstance(decision.action, FlipWorker) and decision.action.role is D
    assert decision.action.worker_id.startswith("prefill") and "prefill has one to spare" in decision.reason
    assert decision.load is not None
    before, after = predicted_gain(decision.load, decision.action)
    assert before < 0.1 < 0.9 < after


def test_an_idle_decode_worker_becomes_a_prefill_worker() -> None:
    fleet = ready(prefill=1, decode=3)
    action = act(series(fleet, [0.5] * 5, **PREFILL_HEAVY), fleet)
    assert isinstance(action, FlipWorker) and action.role is P and action.worker_id.startswith("decode")


def test_where_no_role_has_one_to_spare_one_is_added() -> None:
    fleet = ready(prefill=2, decode=1)
    assert act(series(fleet, [0.75] * 5, prompt=500, output=16), fleet) == AddWorker(P)
    assert act(series(fleet, [1.5] * 5, **DECODE_HEAVY), fleet, AutoscalerLimits(flips=False)) == AddWorker(D)
    assert act(series(ready(mixed=1), [0.4] * 5), ready(mixed=1)) == AddWorker(M)


def test_at_its_limit_a_flip_evens_out_what_cannot_be_cleared() -> None:
    fleet = ready(prefill=3, decode=1)
    observations = series(fleet, [0.65] * 5, prompt=450, output=110)  # prefill 0.45 of 3, decode far above 1
    assert act(observations, fleet) == AddWorker(D)
    action = act(observations, fleet, AutoscalerLimits(most_workers=4))
    assert isinstance(action, FlipWorker) and action.role is D
    both = ready(prefill=2, decode=2)  # then it stays
    assert act(series(both, [0.65] * 5, prompt=450, output=110), both, AutoscalerLimits(most_workers=4)) is None


def test_a_role_with_one_too_many_for_the_whole_window_loses_the_idlest() -> None:
    fleet = ready(prefill=2, decode=2)
    observations = series(fleet, [0.02] * LONG)
    busy = {worker.name: worker for worker in observations[-1].workers}
    workers = tuple(replace(each, leases=3, running=3) if each.name == "decode-0" else each for each in busy.values())
    observations[-1] = replace(observations[-1], workers=workers)
    assert act(observations, fleet) in (DrainWorker("prefill-0", P), DrainWorker("decode-1", D))
    assert act(observations[-6:], fleet) is None, "the window of scaling down is not covered"
    peak = [*observations[:10], replace(observation(observations[10].at, fleet, 2.0), at=observations[10].at)]
    assert act([*peak, *observations[11:]], fleet) is None, "it was needed a few minutes ago"


def test_a_missed_objective_lowers_what_counts_as_short() -> None:
    """Prefill is loaded to 0.7: enough where requests are in time, too much where they are late."""
    fleet = ready(prefill=2, decode=1)
    loaded = {"prompt": 500, "output": 8, "busy": 0.7}
    assert act(series(fleet, [0.55] * 5, **loaded), fleet) is None
    assert act(series(fleet, [0.55] * 5, met=0.5, **loaded), fleet) == AddWorker(P)
    idle = series(fleet, [0.2] * LONG, prompt=100, output=8, met=0.5)
    assert isinstance(act(series(fleet, [0.2] * LONG, prompt=100, output=8), fleet), DrainWorker)
    assert act(idle, fleet) is None, "more workers would not help, fewer might hurt"


def test_work_that_was_refused_counts_as_much_as_what_was_served() -> None:
    fleet = ready(prefill=1, decode=1)
    refused = [
        replace(each, tokens=0, work={"standard": offered(0.6 * INTERVAL, answered=2, output_tokens=64, met=0.0)})
        for each in series(fleet, [0.6] * 5)
    ]
    assert act(refused, fleet) == AddWorker(P)


def test_decoding_that_was_refused_counts_as_much_as_what_was_served() -> None:
    fleet = ready(prefill=1, decode=1)
    observations = series(fleet, [0.6] * 5, **DECODE_HEAVY)
    assert act([replace(each, tokens=0) for each in observations], fleet) == AddWorker(D)


def test_a_role_keeps_the_least_it_may_have() -> None:
    fleet = ready(prefill=3, decode=1)
    limits = AutoscalerLimits(roles={P: RoleLimits(3), D: RoleLimits(1)})
    assert act(series(fleet, [0.6] * 5, **DECODE_HEAVY), fleet, limits) == AddWorker(D)
    even = replace(limits, most_workers=4)
    assert act(series(fleet, [0.6] * 5, **DECODE_HEAVY), fleet, even) is None


# ---- what it never does --------------------------------------------------------------------------------------------

RATES = st.lists(st.floats(0, 4), min_size=5, max_size=LONG)
LENGTHS = st.fixed_dictionaries({"prompt": st.integers(1, 2000), "output": st.integers(1, 300), "met": st.floats(0, 1)})
FLEETS = st.one_of(
    st.builds(ready, prefill=st.integers(1, 5), decode=st.integers(1, 5), mixed=st.integers(0, 2)),
    st.builds(ready, mixed=st.integers(1, 5)),
)


@given(FLEETS, RATES, LENGTHS, st.floats(0, 1), st.data())
@settings(max_examples=100)
def test_limits_are_never_broken(
    fleet: ScaledFleet, rates: list[float], lengths: dict[str, float], busy: float, data: st.DataObject
) -> None:
    total, roles = len(fleet.workers), {}
    for role in Role:
        least = data.draw(st.integers(1, max(1, fleet.count(role))))
        roles[role] = RoleLimits(least, data.draw(st.integers(max(least, fleet.count(role)), 8)))
    most = max(total + data.draw(st.integers(0, 2)), sum(each.least for each in roles.values()))
    limits = AutoscalerLimits(roles=roles, most_workers=most, flips=data.draw(st.booleans()))
    action = act(series(fleet, rates, busy=busy, **lengths), fleet, limits)
    after = applied(fleet, action)
    assert len(after.workers) <= most
    for role in fleet.roles:
        assert roles[role].least <= after.count(role) <= roles[role].most
    assert {each.role for each in after.workers} >= {each.role for each in fleet.workers}
    assert limits.flips or not isinstance(action, FlipWorker)
    if isinstance(action, DrainWorker | FlipWorker):
        assert action.worker_id in {each.worker_id for each in fleet.workers}


@given(FLEETS, RATES, LENGTHS, st.floats(1, 5))
@settings(max_examples=100)
def test_more_load_never_asks_for_fewer_workers(
    fleet: ScaledFleet, rates: list[float], lengths: dict[str, float], factor: float
) -> None:
    limits = AutoscalerLimits(flips=False)
    plain = {**lengths, "met": 1.0}
    more, less = {AddWorker: 1, DrainWorker: -1, type(None): 0}, [round(rate * INTERVAL) / INTERVAL for rate in rates]
    low = act(series(fleet, less, **plain), fleet, limits)
    high = act(series(fleet, [rate * factor for rate in less], **plain), fleet, limits)
    assert more[type(high)] >= more[type(low)]


@given(FLEETS, RATES, LENGTHS, st.sampled_from(["old", "early", "none", "starting", "draining", "unknown", "silent"]))
@settings(max_examples=60)
def test_nothing_is_done_on_stale_or_missing_figures(
    fleet: ScaledFleet, rates: list[float], lengths: dict[str, float], what: str
) -> None:
    observations, now = series(fleet, rates, **lengths), 0.0
    workers, last = list(fleet.workers), observations[-1]
    if what == "old":
        now = LIMITS.stale + 1
    elif what == "early":
        observations = observations[-1:]
    elif what == "none":
        workers_seen = tuple(replace(each, cost=None) for each in last.workers)
        observations[-1] = replace(last, workers=workers_seen)
    elif what in ("starting", "draining"):
        workers[0] = replace(workers[0], state="starting" if what == "starting" else "draining")
    elif what == "unknown":
        observations[-1] = replace(last, workers=last.workers[1:])
    else:
        silent = replace(last.workers[0], heard_seconds=LIMITS.stale + 1)
        observations[-1] = replace(last, workers=(silent, *last.workers[1:]))
    decision = decide(observations, ScaledFleet(tuple(workers), fleet.changed_at), LIMITS, now)
    words = {"old": "stale", "early": "measuring", "none": "measured", "unknown": "missing", "silent": "stale"}
    assert decision.action is None and words.get(what, what) in decision.reason


@given(FLEETS, RATES, LENGTHS, st.floats(0, 0.99))
def test_nothing_is_done_while_it_cools_down(
    fleet: ScaledFleet, rates: list[float], lengths: dict[str, float], share: float
) -> None:
    changed = replace(fleet, changed_at=-share * LIMITS.cool_down)
    decision = decide(series(fleet, rates, **lengths), changed, LIMITS, 0.0)
    assert decision.action is None and "cooling down" in decision.reason


@given(FLEETS, st.floats(0, 50), st.integers(1, 3), st.integers(0, 19), LENGTHS)
def test_a_burst_shorter_than_the_window_changes_nothing(
    fleet: ScaledFleet, peak: float, length: int, place: int, lengths: dict[str, float]
) -> None:
    """The window of scaling up holds four observations. Before and after, there is one request a minute."""
    plain = {**lengths, "met": 1.0}
    rates = [1 / INTERVAL] * 20
    rates[place : place + length] = [peak] * len(rates[place : place + length])
    limits = AutoscalerLimits(scale_down_window=600.0, scale_up=0.9, scale_down=0.8)
    if 1 / INTERVAL * (lengths["prompt"] * 0.02 + lengths["output"]) < 1:  # what is there without the burst is little
        assert not isinstance(act(series(fleet, rates, **plain), fleet, limits), AddWorker | FlipWorker)


@pytest.mark.parametrize("rate", [0.3, 0.9, 1.7])
def test_constant_load_causes_no_flapping_for_an_hour(rate: float) -> None:
    """Poisson arrivals, lengths that vary: no role gains and loses workers, and the fleet comes to rest."""
    generator, fleet = np.random.default_rng(2), ready(prefill=2, decode=2)
    observations: list[Observation] = []
    changes: list[tuple[float, Role, int]] = []
    for turn in range(1, 240):
        now, count = turn * INTERVAL, int(generator.poisson(rate * INTERVAL))
        prompt, output = (int(mean * generator.lognormal(0, 0.3 / max(1, count) ** 0.5)) for mean in (300, 40))
        observations.append(observation(now, fleet, count / INTERVAL, prompt=prompt, output=output))
        action = decide(observations[-LONG:], fleet, LIMITS, now).action
        if action is not None:
            after = replace(applied(fleet, action), changed_at=now)
            changes += [(now, role, after.count(role) - fleet.count(role)) for role in (P, D)]
            fleet = after
    for role in (P, D):
        assert len({change for _, changed, change in changes if changed is role and change}) <= 1
    assert len([at for at, _, change in changes if change and at > 900]) <= 2
