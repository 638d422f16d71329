"""What a deployment does on a cluster that has no room, loses answers, or takes away what it gave: Ray is played."""

from __future__ import annotations

import time

import pytest

from deploy.on_ray import cluster
from deploy.on_ray.actors import Deployed, DeploymentActor
from deploy.on_ray.cluster import RayDeployment
from deploy.on_ray.layout import RayGroup, RayLayout
from deploy.scale import is_answered
from serving.log_config import LogConfig
from tests.deploy.on_ray.played_ray import GetTimeoutError, PlayedRay


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
