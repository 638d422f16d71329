"""What a deployment does on a cluster that has no room, loses answers, or takes away what it gave: Ray is played."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.on_ray import cluster
from deploy.on_ray.actors import Deployed, DeploymentActor
from deploy.on_ray.cluster import RayDeployment
from deploy.on_ray.layout import RayGroup, RayLayout
from deploy.scale import is_answered
from serving.log_config import LogConfig
from tests.deploy.on_ray.played_ray import GetTimeoutError, PlayedRay, RayError


def group(name: str, count: int) -> RayGroup:
    return RayGroup(name=name, kind=name, count=count, command=(name,), bundle={"CPU": 1}, threads=1)


def deployed_on(ray: PlayedRay, prefill: int = 1, decode: int = 1) -> RayDeployment:
    layout = RayLayout.of([group("prefill", prefill), group("decode", decode)], 1)
    return RayDeployment(ray, layout, "PACK", "router:1", None, 1.0, LogConfig())


def holder_of(ray: PlayedRay) -> DeploymentActor:
    assert ray.holder is not None
    return ray.holder


def told(ray: PlayedRay) -> Deployed:
    """What `millrace scale` is told."""
    found = holder_of(ray).deployed()
    assert found is not None
    return found


def settle(deployment: RayDeployment, looks: int = 6) -> None:
    for _ in range(looks):
        deployment.tick()


def test_a_service_that_never_had_room_leaves_at_once() -> None:
    ray = PlayedRay()
    deployment = deployed_on(ray)
    settle(deployment)
    ray.room = False
    holder_of(ray).scale({"prefill": 3})
    settle(deployment)
    assert set(told(ray).services) == {"prefill-0", "prefill-1", "prefill-2", "decode-0"}
    command = holder_of(ray).scale({"prefill": 1})
    settle(deployment)
    assert is_answered(told(ray), command) and set(told(ray).services) == {"prefill-0", "decode-0"}
    assert [one.state for one in ray.groups] == ["CREATED", "REMOVED"] and len(deployment.layout.sets) == 1


def test_a_wish_outlives_answers_that_are_lost() -> None:
    ray = PlayedRay()
    deployment = deployed_on(ray)
    settle(deployment)
    command, ray.lost = holder_of(ray).scale({"decode": 2}), 1
    with pytest.raises(GetTimeoutError):
        deployment.tick()
    settle(deployment)
    assert is_answered(told(ray), command) and told(ray).counts == {"prefill": 1, "decode": 2}


def test_a_wish_outlives_the_actor_that_has_told_of_it_and_none_is_taken_for_an_older_one() -> None:
    """The actor is restarted, with nothing of what it had: its next command is no number that was taken before."""
    ray = PlayedRay()
    deployment = deployed_on(ray)
    for count in (2, 3):
        holder_of(ray).scale({"decode": count})
        settle(deployment)
    holder_of(ray).__init__(("prefill", "decode"))  # type: ignore[misc]  # as Ray does
    command = holder_of(ray).scale({"decode": 1})
    assert told_nothing(ray)
    settle(deployment)
    assert is_answered(told(ray), command) and told(ray).counts == {"prefill": 1, "decode": 1}


def told_nothing(ray: PlayedRay) -> bool:
    return holder_of(ray).deployed() is None


def test_of_two_commands_at_once_the_one_that_cannot_be_is_refused_and_the_other_taken() -> None:
    ray = PlayedRay()
    deployment = deployed_on(ray)
    settle(deployment)
    command = holder_of(ray).scale({"decode": 2})
    for wrong in ({"decode": 0}, {"prefill": 2, "draft": 1}):
        with pytest.raises(ValueError, match="group"):
            holder_of(ray).scale(wrong)
    settle(deployment)
    assert is_answered(told(ray), command) and told(ray).counts == {"prefill": 1, "decode": 2}


def test_a_command_is_not_answered_while_its_placement_group_cannot_be_made() -> None:
    ray = PlayedRay()
    deployment = deployed_on(ray)
    settle(deployment)
    command, ray.fails = holder_of(ray).scale({"decode": 2}), 2
    for _ in range(2):
        with pytest.raises(RuntimeError):
            deployment.tick()
        assert not is_answered(told(ray), command)
    settle(deployment)
    assert is_answered(told(ray), command) and told(ray).services["decode-1"] == "running"


def test_one_that_dies_while_it_leaves_is_not_begun_anew() -> None:
    ray = PlayedRay(drains=False)
    deployment = deployed_on(ray, decode=2)
    settle(deployment)
    command = holder_of(ray).scale({"decode": 1})
    settle(deployment)
    assert told(ray).services["decode-1"] == "leaving"
    ray.actors["decode-1"].dead = True
    settle(deployment)
    assert ray.actors["decode-1"].begun == 1 and is_answered(told(ray), command)


def test_one_that_leaves_a_group_that_is_taken_away_is_not_begun_anew() -> None:
    ray = PlayedRay(drains=False)
    deployment = deployed_on(ray, decode=2)
    settle(deployment)
    command = holder_of(ray).scale({"decode": 1})
    settle(deployment)
    ray.groups[0].state = "REMOVED"
    settle(deployment)
    assert {name: actor.begun for name, actor in ray.actors.items()} == {"prefill-0": 2, "decode-0": 2, "decode-1": 1}
    assert is_answered(told(ray), command) and [one.state for one in ray.groups] == ["REMOVED", "CREATED"]


def test_a_set_without_room_is_told_of_each_time_its_group_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ray = PlayedRay(room=False)
    deployment = deployed_on(ray)
    for count in (1, 2):
        for _ in range(5):
            deployment.tick()
            now[0] += cluster.PATIENCE
        assert caplog.text.count("waits for room") == count
        ray.groups[-1].state = "REMOVED"


@given(broken=st.dictionaries(st.integers(1, 160), st.booleans(), max_size=12), drains=st.booleans())
def test_whatever_calls_fail_in_the_end_all_is_as_wished_and_nothing_is_left_over(
    broken: dict[int, bool], drains: bool
) -> None:
    """Also calls that have done what they were to do, and whose answer was lost."""
    ray = PlayedRay(drains=drains)
    deployment = deployed_on(ray)
    settle(deployment)
    ray.breaking = {ray.calls + call: done for call, done in broken.items()}

    def look(times: int) -> None:
        for _ in range(times):
            with suppress(RayError, ValueError):  # as the supervisor does
                deployment.tick()

    for count in (3, 1, 2):
        holder_of(ray).scale({"decode": count})
        look(5)
        ray.groups[0].state = "REMOVED"
        look(2)
    ray.breaking, ray.drains = {}, True
    for actor in ray.actors.values():
        actor.left = actor.leaving
    look(12)
    assert told(ray).counts == {"prefill": 1, "decode": 2} and len(told(ray).services) == 3
    check_nothing_is_left_over(ray)


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("call", range(1, 13))
def test_one_call_fails_and_the_next_command_takes_back_what_it_was_for(before: int, done: bool, call: int) -> None:
    ray = PlayedRay()
    deployment = deployed_on(ray)
    holder_of(ray).scale({"decode": before})
    settle(deployment)
    holder_of(ray).scale({"decode": 3 - before})
    ray.breaking = {ray.calls + call: done}
    with suppress(RayError):
        settle(deployment)
    holder_of(ray).scale({"decode": 1})
    settle(deployment)
    assert len(told(ray).services) == 2
    check_nothing_is_left_over(ray)


def check_nothing_is_left_over(ray: PlayedRay) -> None:
    """All run that are told of; they alone live, and there are no other placement groups than theirs."""
    services, living = told(ray).services, {name: one for name, one in ray.actors.items() if not one.dead}
    assert set(services.values()) == {"running"} and set(living) == set(services)
    kept = [placed for placed in ray.groups if placed.state == "CREATED"]
    assert {id(placed) for placed in kept} == {id(actor.group) for actor in living.values()}
