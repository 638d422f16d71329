"""Workers of the chart whose ranks are on several hosts: each pod has its ranks, and finds its worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.runtime.open_doors import check_rank_hosts
from deploy.runtime.settings import check_hosts
from serving.rank_hosts_config import RPC_PORT
from tests.deploy.helm.chart import NAMESPACE, Manifest, render
from tests.deploy.helm.manifests import (
    RENDERS,
    component,
    container_of,
    given,
    golden,
    holds_experts,
    of_kind,
    pod_of,
    selected,
    settings_of,
    workloads,
)
from tests.deploy.helm.test_network import reaches


@pytest.fixture
def manifests() -> list[Manifest]:
    return golden("hosts")


def named(manifests: list[Manifest], name: str) -> Manifest:
    (found,) = [one for one in workloads(manifests) if component(one) == name]
    return found


def test_each_rank_is_on_one_host(manifests: list[Manifest]) -> None:
    ranks = 6
    leader = settings_of(named(manifests, "moe"))
    held = list(range(leader.hosts.local(ranks)))
    for host in filter(holds_experts, workloads(manifests)):
        read = settings_of(host)
        start, count = read.hosts.hosted(ranks)
        held += range(start, start + count)
        assert read.model_config == leader.model_config and read.model == leader.model
        assert read.security == leader.security
        check_hosts(read.hosts, read.model_config, 1)
        assert host["spec"]["replicas"] == 1
    assert sorted(held) == list(range(ranks)) and leader.model_config.data_parallel_size == ranks
    check_hosts(leader.hosts, leader.model_config, 1)


def test_hosts_find_their_worker_before_it_is_ready_and_nobody_else_reaches_it_there(manifests: list[Manifest]) -> None:
    leader = named(manifests, "moe")
    for host in filter(holds_experts, workloads(manifests)):
        read = settings_of(host)
        name, namespace, svc = read.hosts.data_parallel_address.split(".")
        (service,) = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"] == name]
        assert (namespace, svc) == (NAMESPACE, "svc")
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        assert selected(manifests, {"matchLabels": service["spec"]["selector"]}) == [leader]
        assert [port["port"] for port in service["spec"]["ports"]] == [read.hosts.data_parallel_rpc_port] == [RPC_PORT]
    assert settings_of(leader).hosts.data_parallel_address == "$(POD_IP)"
    ports = {port["name"]: port["containerPort"] for port in container_of(leader)["ports"]}
    assert ports["ranks"] == RPC_PORT
    for one in workloads(manifests):
        for other in workloads(manifests):
            assert reaches(manifests, one, other, RPC_PORT) == (holds_experts(one) and other is leader)


def test_hosts_prove_themselves_by_the_key_of_a_secret() -> None:
    """Without certificates as well: then the key is all there is."""
    for workload in workloads(golden("hosts")):
        env = {one["name"] for one in container_of(workload)["env"]}
        read = settings_of(workload)
        assert "MILLRACE_CLUSTER_KEY" in env
        if read.hosts.spans_hosts(read.model_config.data_parallel_size):
            own = replace(read.security, grpc_tls_certfile=None, grpc_tls_ca=None)
            check_rank_hosts(read.hosts, replace(read.cluster, cluster_key="key"), own)


def test_the_next_pod_of_a_host_or_its_worker_comes_when_the_last_has_gone(manifests: list[Manifest]) -> None:
    """Two with the same ranks would keep each other out."""
    for workload in workloads(manifests):
        asked = settings_of(workload)
        apart = asked.hosts.spans_hosts(asked.model_config.data_parallel_size)
        assert workload["spec"]["strategy"]["type"] == ("Recreate" if apart else "RollingUpdate")


@RENDERS
@pytest.mark.parametrize(("settings", "drain"), [({}, 120), ({"shutdown_timeout": 7.5}, 8)], ids=str)
def test_a_host_hears_at_once_that_it_ends_and_stays_for_as_long_as_its_worker_takes(
    settings: Manifest, drain: int
) -> None:
    """One that slept first would join the worker's next pod meanwhile, and be killed under it."""
    values = given("hosts")
    values["workers"][0]["settings"] |= settings
    manifests, _ = render(values)
    worker = named(manifests, "moe")
    leaving = container_of(worker)["lifecycle"]["preStop"]["sleep"]["seconds"] + drain
    assert settings_of(worker).http.shutdown_timeout == settings.get("shutdown_timeout", drain)
    for host in filter(holds_experts, workloads(manifests)):
        assert "lifecycle" not in container_of(host)
        assert settings_of(host).http.shutdown_timeout == leaving
        assert pod_of(host)["terminationGracePeriodSeconds"] == pod_of(worker)["terminationGracePeriodSeconds"]
        assert pod_of(host)["terminationGracePeriodSeconds"] > leaving


def test_hosts_are_spread_over_nodes_with_their_worker(manifests: list[Manifest]) -> None:
    group = [named(manifests, name) for name in ("moe", "moe-host-1", "moe-host-2")]
    for workload in group:
        (spread,) = pod_of(workload)["topologySpreadConstraints"]
        assert selected(manifests, spread["labelSelector"]) == group
    assert [container_of(one)["args"][0] for one in group] == ["mixed"] * 3


@RENDERS
def test_a_generation_has_hosts_of_its_own() -> None:
    manifests, _ = render(given("hosts") | {"generations": {"base": {}, "b": {"settings": {"rank_timeout": 5}}}})
    hosts = {component(one): settings_of(one) for one in workloads(manifests) if holds_experts(one)}
    assert sorted(hosts) == ["moe-b-host-1", "moe-b-host-2", "moe-host-1", "moe-host-2"]
    addresses = {name: read.hosts.data_parallel_address.split(".")[0] for name, read in hosts.items()}
    assert addresses == {name: f"millrace-{name.partition('-host')[0]}" for name in hosts}
    assert hosts["moe-b-host-1"].model_config.rank_timeout == 5 != hosts["moe-host-1"].model_config.rank_timeout
