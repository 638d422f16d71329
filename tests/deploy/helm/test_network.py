"""Who may talk to whom: the chart's policies let through what services call of each other, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.helm.chart import Manifest, render
from tests.deploy.helm.manifests import (
    RENDERS,
    SETS,
    component,
    container_of,
    golden,
    of_kind,
    selects,
    services,
    workloads,
)

MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def reaches(manifests: list[Manifest], source: Manifest, target: Manifest, port: int) -> bool:
    """True if the policies of both pods let a connection through."""
    return _lets(manifests, source, target, port, "Egress") and _lets(manifests, target, source, port, "Ingress")


def _lets(manifests: list[Manifest], own: Manifest, other: Manifest, port: int, way: str) -> bool:
    mine, theirs = (one["spec"]["template"]["metadata"]["labels"] for one in (own, other))
    rules, peers = ("egress", "to") if way == "Egress" else ("ingress", "from")
    policies = [one["spec"] for one in of_kind(manifests, "NetworkPolicy") if selects(one["spec"]["podSelector"], mine)]
    policies = [policy for policy in policies if way in policy["policyTypes"]]
    if not policies:
        return True
    for rule in (rule for policy in policies for rule in policy.get(rules, ())):
        numbers = [one["port"] for one in rule.get("ports", ())]
        if (not numbers or port in numbers) and (
            peers not in rule
            or any(selects(peer["podSelector"], theirs) for peer in rule[peers] if set(peer) == {"podSelector"})
        ):
            return True
    return False


def edges(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest, bool]]:
    """All pairs of workloads, and whether the one calls the other's gRPC."""
    roles = {component(one): container_of(one)["args"][0] for one in services(manifests)}
    calls = {("router", role) for role in ("prefill", "decode", "mixed")}
    calls |= {(role, "router") for role in ("prefill", "decode", "mixed", "kvcache")}
    calls |= {(role, "kvcache") for role in ("prefill", "decode", "mixed")}
    calls |= {(giving, taking) for giving in ("prefill", "mixed") for taking in ("decode", "mixed")}
    for one in workloads(manifests):
        for other in workloads(manifests):
            yield one, other, (roles.get(component(one)), roles.get(component(other))) in calls


@RENDERS
@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_groups_of_one_role_have_policies_that_kubernetes_takes(role: str) -> None:
    """`In` takes no empty list, as of those that a lone prefill worker hands its KV to."""
    for policy in of_kind(render({"workers": [{"name": role, "role": role}]})[0], "NetworkPolicy"):
        (rule,) = [*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())] or [{}]
        peers = [policy["spec"], *rule.get("from", ()), *rule.get("to", ())]
        for peer in (one["podSelector"] for one in peers):
            assert all(one["values"] for one in peer.get("matchExpressions", ()))


@pytest.mark.parametrize("name", [name for name in SETS if name != "mixed"])
def test_the_network_lets_through_what_services_call_and_nothing_else(name: str) -> None:
    manifests = golden(name)
    for one, other, calls in edges(manifests):
        assert reaches(manifests, one, other, 8100) == calls, (component(one), component(other))
        assert not reaches(manifests, one, other, 9100)
    stranger = {"spec": {"template": {"metadata": {"labels": {"app": "stranger"}}}}}
    read = [one["spec"] for one in of_kind(manifests, "NetworkPolicy") if one["metadata"]["name"].endswith("-status")]
    assert [one["ingress"][0]["from"] for one in read] == ([MONITORING] if name in ("tls", "hosts") else [])
    for workload in workloads(manifests):
        assert not reaches(manifests, stranger, workload, 8100)
        clients = component(workload) == "router" and name not in ("tls", "gateway")
        assert reaches(manifests, stranger, workload, 8000) == clients
        assert _lets(manifests, workload, stranger, 53, "Egress") and not _lets(
            manifests, workload, stranger, 80, "Egress"
        )
        hub = name == "pool" and component(workload) != "kvcache"
        assert _lets(manifests, workload, stranger, 443, "Egress") == hub
