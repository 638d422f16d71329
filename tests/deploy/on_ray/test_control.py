"""What the control door asks of a deployment on Ray: one more, this one less, and a role that a worker has taken."""

from __future__ import annotations

import pytest

from deploy.on_ray.supervisor import RaySupervisor
from serving.errors import InvalidRequest
from serving.messages import Role
from tests.deploy.on_ray.played_ray import PlayedRay
from tests.deploy.on_ray.test_cluster import deployed_on, settle, told


def test_workers_come_and_go_by_name() -> None:
    ray = PlayedRay()
    deployment = deployed_on(ray, decode=2)
    below = RaySupervisor(deployment)
    settle(deployment)
    below.add(Role.DECODE)
    settle(deployment)
    assert below.roles()["decode-2"] is Role.DECODE
    below.let_go("decode-0")
    deployment.tick()
    assert below.leaving() == ["decode-0"] and "decode-0" not in below.roles()
    settle(deployment)
    assert below.leaving() == [] and set(told(ray).services) == {"prefill-0", "decode-1", "decode-2"}
    assert told(ray).counts == {"prefill": 1, "decode": 2}


def test_what_there_is_no_group_or_worker_of_is_refused() -> None:
    below = RaySupervisor(deployed_on(PlayedRay()))
    with pytest.raises(InvalidRequest, match="no group of this deployment has mixed workers"):
        below.add(Role.MIXED)
    with pytest.raises(InvalidRequest, match="decode-7 is no worker of this deployment"):
        below.let_go("decode-7")


def test_one_that_has_flipped_is_begun_in_its_new_role_until_it_leaves() -> None:
    ray = PlayedRay()
    deployment = deployed_on(ray, decode=2)
    below = RaySupervisor(deployment)
    settle(deployment)
    below.flipped("decode-1", Role.PREFILL)
    deployment.tick()
    assert ray.actors["decode-1"].changed == ["prefill"], "its child is, should that die"
    assert below.roles()["decode-1"] is Role.PREFILL
    assert told(ray).counts == {"prefill": 1, "decode": 2}, "it is one of its group"
    ray.actors["decode-1"].dead = True
    settle(deployment)
    assert ray.actors["decode-1"].command[0] == "prefill", "nor does its next actor know of another role"
    below.let_go("decode-1")
    settle(deployment)
    below.add(Role.DECODE)
    settle(deployment)
    assert below.roles()["decode-1"] is Role.DECODE
