"""What a deployment does on a cluster without room, with the library of Ray played."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from deploy.on_ray.actors import ActorReport, Deployed, DeploymentActor
from deploy.on_ray.cluster import RayDeployment
from deploy.on_ray.layout import RayGroup, RayLayout
from deploy.scale import is_answered
from serving.log_config import LogConfig


class RayError(Exception):
    """Stands in for the library's."""


def full_cluster(holder: DeploymentActor) -> Any:
    """Groups wait for ever, and actors never answer."""
    ray = MagicMock()
    ray.exceptions.RayActorError = ray.exceptions.ActorUnavailableError = RayError
    ray.util.placement_group_table.return_value = {"state": "PENDING"}
    ray.wait.side_effect = lambda asked, timeout: ([], asked)
    ray.get.side_effect = lambda deployed, timeout: holder.exchange(deployed)
    return ray


def test_a_service_that_never_had_room_leaves_at_once() -> None:
    holder = DeploymentActor()
    ray = full_cluster(holder)
    group = RayGroup(name="prefill", kind="prefill", count=1, command=("prefill",), bundle={"CPU": 1}, threads=1)
    deployment = RayDeployment(ray, RayLayout.of([group], 1), "PACK", "router:1", None, 1.0, LogConfig())
    deployment._holder.exchange.remote = lambda deployed: deployed

    def tick() -> Deployed:
        deployment.tick()
        deployment.actors["prefill-0"].report = ActorReport(node="n", pid=1, leaving=False, left=False)
        found = holder.deployed()
        assert found is not None
        return found

    tick()
    holder.scale({"prefill": 3})
    tick()
    assert set(tick().services) == {"prefill-0", "prefill-1", "prefill-2"}
    command = holder.scale({"prefill": 1})
    for _ in range(3):
        told = tick()
    assert is_answered(told, command) and set(told.services) == {"prefill-0"}
    made, removed = ray.util.placement_group.call_count, ray.util.remove_placement_group.call_count
    assert made == 2 and removed == 1 and len(deployment.layout.sets) == 1
