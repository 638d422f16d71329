"""The chart's autoscaler: it may change replicas of workers and no more, reaches routers alone, and is off at first."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from deploy.autoscale import limits_of
from deploy.autoscaler.limits import RoleLimits
from deploy.cli import make_parser
from serving.messages import Role
from tests.deploy.helm.chart import KUBERNETES, Manifest, render
from tests.deploy.helm.manifests import RENDERS, component, container_of, named, of_kind, pod_of, workloads
from tests.deploy.helm.test_network import reaches

pytestmark = RENDERS
ON: Manifest = {
    "autoscaler": {"enabled": True, "settings": {"prefill": "1:4", "decode": "2:8", "cool_down": 90}},
    "grpcTls": {"secretName": "millrace-grpc"},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"name": "chat"}}}]},
}


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    found, _ = render(ON)
    for manifest in found:
        kubernetes_validate.validate(manifest, KUBERNETES.rsplit(".", 1)[0], strict=True)
    return found


def of_component(manifests: list[Manifest], name: str) -> Manifest:
    (found,) = [one for one in workloads(manifests) if component(one) == name]
    return found


def test_it_is_there_only_where_it_is_asked_for() -> None:
    off, _ = render({})
    assert not of_kind(off, "Role", "RoleBinding")
    assert "autoscaler" not in {component(one) for one in workloads(off)}
    assert all("replicas" in one["spec"] for one in workloads(off))


def test_it_may_scale_the_workers_mark_a_pod_and_hold_its_lease(manifests: list[Manifest]) -> None:
    (role,), (binding,) = of_kind(manifests, "Role"), of_kind(manifests, "RoleBinding")
    found = {
        (rule["resources"][0], tuple(rule.get("resourceNames", ())), tuple(rule["verbs"])) for rule in role["rules"]
    }
    assert found == {
        ("deployments/scale", ("millrace-decode", "millrace-prefill"), ("get", "patch")),
        ("pods", (), ("get", "patch")),
        ("leases", (), ("create",)),
        ("leases", ("millrace-autoscaler",), ("get", "update")),
    }
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert named(manifests, "ServiceAccount", subject["name"])
    with_token = [one for one in workloads(manifests) if pod_of(one)["automountServiceAccountToken"]]
    assert [component(one) for one in with_token] == ["autoscaler"]
    assert pod_of(with_token[0])["serviceAccountName"] == subject["name"]


def test_it_scales_the_deployments_there_are_which_say_no_number_themselves(manifests: list[Manifest]) -> None:
    words = container_of(of_component(manifests, "autoscaler"))["args"]
    assert {"--deployment=prefill=millrace-prefill", "--deployment=decode=millrace-decode"} <= set(words)
    assert {"--prefill=1:4", "--decode=2:8", "--cool-down=90", "--on=kubernetes"} <= set(words)
    given = make_parser().parse_args(words)
    assert limits_of(given).of(Role.DECODE) == RoleLimits(2, 8) and not limits_of(given).flips
    fixed = {component(one) for one in workloads(manifests) if "replicas" in one["spec"]}
    assert fixed == {"router", "autoscaler"}


def test_it_reaches_routers_alone_and_nobody_reaches_it(manifests: list[Manifest]) -> None:
    own = of_component(manifests, "autoscaler")
    for other in workloads(manifests):
        for port in (8000, 8100):
            assert reaches(manifests, own, other, port) == (component(other) == "router")
            assert not reaches(manifests, other, own, port)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"workerDefaults": {"autoscaling": {"enabled": True, "tokensPerSecond": 100}}},
            "each would undo what the other does",
        ),
        (
            {"workers": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "prefill"}]},
            "it scales one group of each role",
        ),
    ],
)
def test_what_it_cannot_scale_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        render(ON | more)


def test_behind_https_it_trusts_the_routers_certificate_and_does_not_see_its_key() -> None:
    found, _ = render({**ON, "tls": {"secretName": "web"}})
    made = of_component(found, "autoscaler")
    assert "--server-cert=/tls/tls.crt" in container_of(made)["args"]
    assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in container_of(made)["volumeMounts"]
    (secret,) = [volume["secret"] for volume in pod_of(made)["volumes"] if volume["name"] == "tls"]
    assert secret["secretName"] == "web" and secret["items"] == [{"key": "tls.crt", "path": "tls.crt"}]
    plain, _ = render(ON)
    assert not any("--server-cert" in word for word in container_of(of_component(plain, "autoscaler"))["args"])
