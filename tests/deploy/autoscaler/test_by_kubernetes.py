"""The Kubernetes actuator against an API server that keeps versions: replicas stay true, refusals say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.autoscaler.actuator import ActuatorError, FleetWorker
from deploy.autoscaler.by_kubernetes import COST, KubernetesActuator
from deploy.autoscaler.kube_api import KubeApi
from deploy.autoscaler.kube_lease import LEASE_SECONDS, KubeLease
from serving.messages import Role
from tests.deploy.autoscaler.kube_server import LEASES, POD, SCALE, KubeServer
from tests.fakes.clock import ManualClock

PODS = ("m-prefill-7d9f-aaaaa", "m-decode-55c4-bbbbb", "m-decode-55c4-ccccc")
DEPLOYMENTS = {Role.PREFILL: "m-prefill", Role.DECODE: "m-decode"}


class ReportingPods:
    """What the router's control door would say (RouterActuator)."""

    def __init__(self) -> None:
        self.found = [FleetWorker(pod, Role(pod.split("-")[1]), "ready") for pod in PODS]

    async def workers(self) -> list[FleetWorker]:
        return self.found

    async def close(self) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubeServer]:
    with KubeServer(tmp_path) as made:
        made.scale("m-prefill", 1)
        made.scale("m-decode", 2)
        for pod in PODS:
            made.put(POD.format(pod), kind="Pod", spec={})
        yield made


@pytest.fixture
def actuator(server: KubeServer) -> KubernetesActuator:
    return KubernetesActuator(server.api(), DEPLOYMENTS, ReportingPods())  # type: ignore[arg-type]


async def test_one_more_is_a_replica_more_and_starts_until_it_reports(
    server: KubeServer, actuator: KubernetesActuator
) -> None:
    await actuator.add(Role.PREFILL)
    assert (server.replicas("m-prefill"), server.replicas("m-decode")) == (2, 2)
    starting = [each for each in await actuator.workers() if each.state == "starting"]
    assert [(each.role, each.worker_id) for each in starting] == [(Role.PREFILL, "m-prefill-?0")]
    assert ("PATCH", SCALE.format("m-prefill"), "application/merge-patch+json") in server.asked


async def test_the_worker_that_drains_is_the_pod_that_goes_first(
    server: KubeServer, actuator: KubernetesActuator
) -> None:
    await actuator.drain(PODS[2])
    assert server.replicas("m-decode") == 1
    marked = {pod: server.objects[POD.format(pod)]["metadata"].get("annotations", {}) for pod in PODS}
    assert {pod for pod, found in marked.items() if COST in found} == {PODS[2]}
    with pytest.raises(ActuatorError, match="was told to drain before"):
        await actuator.drain(PODS[2])
    assert server.replicas("m-decode") == 1, "asked twice, it takes one away"


@pytest.mark.parametrize("status", [403, 409, 500])
async def test_a_drain_that_failed_half_way_is_done_the_next_time(
    server: KubeServer, actuator: KubernetesActuator, status: int
) -> None:
    server.refuses = lambda method, path: status if method == "PATCH" and "scale" in path else None
    with pytest.raises(ActuatorError):
        await actuator.drain(PODS[2])
    assert COST in server.objects[POD.format(PODS[2])]["metadata"]["annotations"]
    server.refuses = lambda method, path: None
    await actuator.drain(PODS[2])
    assert server.replicas("m-decode") == 1


async def test_changes_of_others_in_between_are_counted_in(server: KubeServer, actuator: KubernetesActuator) -> None:
    """Somebody scales after we have looked and before we write: 409, look again, and theirs stays."""
    others = iter((3, 4))

    def meanwhile() -> None:
        if (replicas := next(others, None)) is not None:
            server.scale("m-decode", replicas)

    server.before_change = meanwhile
    await actuator.add(Role.DECODE)
    assert server.replicas("m-decode") == 5
    server.before_change = lambda: server.scale("m-decode", 9)
    with pytest.raises(ActuatorError, match="changed by others 5 times"):
        await actuator.add(Role.DECODE)


@pytest.mark.parametrize(
    ("status", "told"),
    [(403, "is not for you; the Role of the chart's autoscaler"), (401, "token"), (404, "no Deployment m-decode")],
)
async def test_refusals_say_what_to_do(
    server: KubeServer, actuator: KubernetesActuator, status: int, told: str
) -> None:
    server.refuses = lambda method, path: status if "scale" in path else None
    with pytest.raises(ActuatorError, match=told):
        await actuator.add(Role.DECODE)


async def test_a_token_that_was_renewed_is_read_again(server: KubeServer, actuator: KubernetesActuator) -> None:
    token = server.folder / "token"
    good = token.read_text()
    token.write_text("of yesterday")
    with pytest.raises(ActuatorError, match="has expired"):
        await actuator.add(Role.DECODE)
    token.write_text(good)
    await actuator.add(Role.DECODE)
    assert server.replicas("m-decode") == 3


async def test_an_api_that_does_not_answer_is_given_up(server: KubeServer) -> None:
    server.silence.clear()
    silent = KubernetesActuator(server.api(timeout=0.05), DEPLOYMENTS, ReportingPods())  # type: ignore[arg-type]
    with pytest.raises(ActuatorError, match="no answer from the Kubernetes API"):
        await silent.add(Role.DECODE)


async def test_an_api_of_another_authority_is_not_believed(server: KubeServer, tmp_path: Path) -> None:
    with KubeServer(tmp_path / "other") as other:
        api = other.api()
        api.port = server.api().port
        with pytest.raises(ActuatorError, match="CERTIFICATE_VERIFY_FAILED"):
            await api.get(SCALE.format("m-decode"))


async def test_pods_keep_their_role_and_no_role_loses_its_last(
    server: KubeServer, actuator: KubernetesActuator
) -> None:
    with pytest.raises(ActuatorError, match="add a prefill worker and drain this one"):
        await actuator.flip(PODS[1], Role.PREFILL)
    with pytest.raises(ActuatorError, match="has one replica"):
        await actuator.drain(PODS[0])
    with pytest.raises(ActuatorError, match="no Deployment of mixed workers"):
        await actuator.add(Role.MIXED)
    with pytest.raises(ActuatorError, match="elsewhere-1-2 is no pod of"):
        await actuator.drain("elsewhere-1-2")
    assert (server.replicas("m-prefill"), server.replicas("m-decode")) == (1, 2)


def test_outside_of_a_pod_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pod"):
        KubeApi.of_this_pod({})
    with pytest.raises(ValueError, match="service account"):
        KubeApi.of_this_pod({"KUBERNETES_SERVICE_HOST": "127.0.0.1"}, tmp_path / "nowhere")


async def test_the_lease_is_held_by_one_until_it_was_seen_unchanged_for_long(server: KubeServer) -> None:
    clock = ManualClock()
    one, two = (KubeLease(server.api(), "m-autoscaler", name, clock) for name in ("one", "two"))
    assert await one.held() and await one.held()
    assert not await two.held()
    clock.now += LEASE_SECONDS - 1
    assert not await two.held()
    assert await one.held(), "it renews in time"
    clock.now += 2
    assert not await two.held(), "it was seen to change: the time counts anew"
    clock.now += LEASE_SECONDS + 1
    assert await two.held()
    assert not await one.held()
    spec = server.objects[f"{LEASES}/m-autoscaler"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("two", 1)
    await one.release()
    assert not await one.held(), "what others hold is not released"
    await two.release()
    assert await one.held()


async def test_of_two_that_take_a_lease_at_once_one_has_it(server: KubeServer) -> None:
    locks = [KubeLease(server.api(), "m-autoscaler", name) for name in ("one", "two", "three")]
    assert sorted(await asyncio.gather(*(lock.held() for lock in locks))) == [False, False, True]
