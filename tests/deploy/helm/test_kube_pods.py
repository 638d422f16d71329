"""Rendered manifests as pods to play: filled in as a kubelet would, and less what podman does not take.

What the pods then do is seen by running `python -m scripts.kube_play`.
"""

from __future__ import annotations

from collections import Counter

import kubernetes_validate
import pytest

from scripts.kube_pods import PlannedPod, expanded, plan_pods
from tests.deploy.helm.chart import KUBERNETES, NAMESPACE
from tests.deploy.helm.manifests import golden

KEYS = {
    "millrace-keys": {"cluster-key": "the-cluster", "api-key": "the-api"},
    "hub": {"token": "the-hub"},
}


def planned(name: str) -> list[PlannedPod]:
    return plan_pods(golden(name), NAMESPACE, (f"10.0.0.{number}" for number in range(1, 99)), KEYS)


def test_each_replica_is_a_pod_with_its_own_name_address_and_disk() -> None:
    pods = planned("pool")
    assert Counter(pod.component for pod in pods) == {"router": 2, "prefill": 1, "decode": 1, "kvcache": 3}
    assert len({pod.address for pod in pods}) == len({pod.name for pod in pods}) == 7
    nodes = [pod for pod in pods if pod.component == "kvcache"]
    assert [one["metadata"]["name"] for pod in nodes for one in pod.claims] == [
        f"disk-millrace-kvcache-{number}" for number in range(3)
    ]
    for pod in nodes:
        words = pod.manifest["spec"]["containers"][0]["args"]
        assert f"--advertise={pod.address}:8100" in words and f"--worker-name={pod.name}" in words


def test_names_of_headless_services_have_the_address_of_each_pod_behind_them() -> None:
    pods = planned("pool")
    routers = sorted(pod.address for pod in pods if pod.component == "router")
    for pod in pods:
        lines = pod.manifest["spec"]["hostAliases"]
        found = [line["ip"] for line in lines if line["hostnames"] == ["millrace-routers.serving.svc"]]
        assert sorted(found) == routers


def test_secrets_are_put_in_and_what_podman_does_not_take_is_told_apart() -> None:
    for pod in planned("pool"):
        (container,) = pod.manifest["spec"]["containers"]
        env = {one["name"]: one["value"] for one in container["env"]}
        assert env["MILLRACE_CLUSTER_KEY"] == "the-cluster" and env["POD_IP"] == pod.address
        assert env.get("MILLRACE_API_KEY") == ("the-api" if pod.component == "router" else None)
        assert not {"lifecycle", "startupProbe", "ports"} & set(container)
        assert set(pod.probes) == {"startup", "readiness", "liveness"} and pod.pre_stop == {"sleep": {"seconds": 5}}
        assert pod.grace == {"router": 50, "kvcache": 160}.get(pod.component, 140)
        assert container["securityContext"]["runAsUser"] == 65532
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod.manifest["spec"]["volumes"]}
        for manifest in (pod.manifest, *pod.claims):
            kubernetes_validate.validate(manifest, KUBERNETES.rsplit(".", 1)[0], strict=True)


def test_hosts_of_ranks_have_no_doors_and_find_their_worker() -> None:
    pods = {pod.component: pod for pod in planned("hosts")}
    for name in ("moe-host-1", "moe-host-2"):
        assert not pods[name].probes and not pods[name].ports and pods[name].pre_stop is None
        names = {line["ip"]: line["hostnames"] for line in pods[name].manifest["spec"]["hostAliases"]}
        assert names[pods["moe"].address] == ["millrace-moe.serving.svc"]
        assert (
            "--data-parallel-address=millrace-moe.serving.svc" in pods[name].manifest["spec"]["containers"][0]["args"]
        )
    assert f"--data-parallel-address={pods['moe'].address}" in pods["moe"].manifest["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("a$(X)b", "a1b"), ("$$(X)", "$(X)"), ("$(Y)", "$(Y)"), ("$$$(X)", "$1"), ("5$", "5$")],
)
def test_variables_are_put_in_as_the_kubelet_does(text: str, told: str) -> None:
    assert expanded(text, {"X": "1"}) == told
