"""A worker that works but takes much longer is noticed, ranked behind for as long as it is slow, and told of."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.candidate import Candidate
from router.overview import RouterOverview
from router.policies import POLICIES, make_policy
from router.policy import Demand
from router.slowness import QUICK, SETTLED, SLOW, SUSTAINED, SlowWatch, median_beside
from serving.messages import Role, WorkerStatus
from serving.step_cost import StepCost
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import lease_view, make_status

COST = StepCost(fixed=0.01, token=0.0001, sequence=0.0001, context=1e-7, samples=SETTLED, error=0.1)


def status(name: str, times: float = 1.0, role: Role = Role.MIXED, samples: int = SETTLED) -> WorkerStatus:
    """A worker whose steps take so many times as long as usual."""
    cost = replace(COST, fixed=times * COST.fixed, token=times * COST.token, sequence=times * COST.sequence)
    return make_status(name, role, step_cost=replace(cost, context=times * COST.context, samples=samples))


Report = Callable[[float], Sequence[WorkerStatus]]


def watched(
    report: Report, seconds: float, watch: SlowWatch | None = None, began: float = 0.0
) -> list[tuple[str, bool, float]]:
    """Everybody reports each second; what was noticed, and when."""
    watch, found = watch or SlowWatch(), []
    for step in range(int(seconds)):
        now = began + step
        for each in report(now):
            watch.heard(each, now)
        found += [(instance.removesuffix("-life"), slow, now) for instance, slow in watch.judge(now)]
    return found


@pytest.mark.parametrize("role", list(Role))
def test_one_of_several_that_becomes_slow_is_noticed_and_returns_when_it_is_quick_again(role: Role) -> None:
    def report(now: float) -> list[WorkerStatus]:
        slow = 3.0 if 20 <= now < 60 else 1.0
        return [status("a", role=role), status("b", slow, role), status("c", role=role)]

    found = watched(report, 100)
    assert [(name, slow) for name, slow, _ in found] == [("b", True), ("b", False)]
    assert found[0][2] == 20 + SUSTAINED and found[1][2] == 60 + SUSTAINED


def test_the_only_one_of_its_kind_is_compared_with_what_it_used_to_take() -> None:
    found = watched(lambda now: [status("a", 3.0 if 20 <= now < 60 else 1.0)], 100)
    assert [(name, slow) for name, slow, _ in found] == [("a", True), ("a", False)]


def test_what_befalls_all_of_them_makes_none_slow() -> None:
    """The machine is busy, or their batches have grown beyond what their models knew."""
    assert watched(lambda now: [status(name, 4.0 if now >= 20 else 1.0) for name in "abcd"], 100) == []


def test_a_moment_is_not_enough() -> None:
    assert watched(lambda now: [status("a"), status("b", 5.0 if now % 10 < 4 else 1.0)], 100) == []


def test_workers_of_other_kinds_and_unsettled_models_are_not_compared() -> None:
    kinds = [status("p", 9.0, Role.PREFILL), status("d", role=Role.DECODE)]
    assert watched(lambda now: [*kinds, status("m"), status("n", 9.0, samples=SETTLED - 1)], 60) == []
    assert watched(lambda now: [make_status("x"), make_status("y")], 60) == []


def test_one_that_is_weaker_from_the_beginning_is_slow_beside_the_others() -> None:
    found = watched(lambda now: [status("a"), status("b"), status("weak", 2.5)], 60)
    assert [(name, slow) for name, slow, _ in found] == [("weak", True)]


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=9), st.data())
def test_the_median_of_the_others(numbers: list[float], data: st.DataObject) -> None:
    one = data.draw(st.sampled_from(numbers))
    others = list(numbers)
    others.remove(one)
    assert median_beside(sorted(numbers), one) == pytest.approx(median(others))


@given(st.lists(st.lists(st.floats(0.2, 20.0), min_size=3, max_size=3), min_size=1, max_size=40))
def test_it_changes_its_mind_only_after_a_while_and_for_a_reason(steps: list[list[float]]) -> None:
    watch, last = SlowWatch(), dict.fromkeys("abc", -SUSTAINED)
    slow = dict.fromkeys("abc", False)
    for step, times in enumerate(steps):
        now = float(step)
        for name, each in zip("abc", times, strict=True):
            watch.heard(status(name, each), now)
        for instance, is_slow in watch.judge(now):
            name = instance[0]
            assert is_slow is not slow[name] and now - last[name] >= SUSTAINED
            factor = watch.factor(instance)
            assert factor >= SLOW if is_slow else factor < QUICK
            slow[name], last[name] = is_slow, now
    watch.retain(())
    assert watch.factor("a-life") == 1.0 and not watch.slow("a-life")


# ---- what becomes of it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.MIXED, Role.PREFILL])
@pytest.mark.parametrize("name", [each for each in POLICIES if each != "goodput"])
def test_policies_rank_a_slow_worker_behind_and_still_use_it(name: str, role: Role) -> None:
    """Equal workers: the slow one gets less than its share, and not nothing once the others are loaded."""
    policy, chosen = make_policy(name), Counter[str]()
    workers = [Candidate(make_status(each, role), slow=each == "b") for each in "abcd"]
    others = [Candidate(make_status("d0", Role.DECODE))] if role is Role.PREFILL else []
    for salt in range(400):
        demand = Demand(tokens=50, salt=salt * 7919)
        decision = policy.choose(demand, lease_view(demand, [*workers, *others]), 0.0)
        assert decision is not None and decision.prefill is not None
        chosen[decision.prefill.status.name] += 1
    assert chosen["b"] <= 60, chosen
    loaded = {"leases": 7, "running": 7, "waiting_tokens": 900, "free_blocks": 10}
    full = [worker if worker.slow else Candidate(make_status(worker.status.name, role, **loaded)) for worker in workers]
    taken = 0
    for salt in range(20):
        demand = Demand(tokens=50, salt=salt)
        decision = policy.choose(demand, lease_view(demand, [*full, *others]), 0.0)
        assert decision is not None and decision.prefill is not None
        taken += decision.prefill.status.name == "b"
    assert taken >= (2 if name == "round_robin" else 20), "it is behind by a bounded amount"


async def test_a_router_notices_tells_and_forgives(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for name in "abc":
        world.add(name)

    def pass_seconds(count: int, times: float) -> None:
        for _ in range(count):
            world.now += 1.0
            for name, worker in world.workers.items():
                worker.status = status(name, times if name == "b" else 1.0)
                world.fleet.heartbeat(worker.status)
            world.fleet.expire()

    def shown() -> dict[str, bool]:
        return {worker["name"]: worker["slow"] for worker in RouterOverview(world.router).workers()["workers"]}

    pass_seconds(10, 1.0)
    assert shown() == {"a": False, "b": False, "c": False}
    with caplog.at_level(logging.WARNING):
        pass_seconds(10, 3.0)
    assert shown() == {"a": False, "b": True, "c": False}
    assert "worker b is slow: its steps take 3.0 times as long" in caplog.text
    assert await world.tokens(wanted()) == expected(wanted())
    assert not world.workers["b"].opened
    with caplog.at_level(logging.WARNING):
        pass_seconds(10, 1.0)
    assert shown()["b"] is False and "worker b is as quick again" in caplog.text
    await world.fleet.close()
