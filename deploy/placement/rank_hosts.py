"""Workers of a placement whose ranks are on other hosts too, as each platform has them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from deploy.placement.plan import DeploymentPlan, ServiceGroup
from deploy.runtime.addresses import EVERYWHERE
from serving.config import ModelConfig
from serving.messages import Role
from serving.options import build, names
from serving.rank_hosts_config import RankHostsConfig

OF_HOSTS = frozenset(names(RankHostsConfig))


def hosts_of(group: ServiceGroup) -> RankHostsConfig | None:
    """Where the ranks of its worker are; None where all are on the worker's own host."""
    if group.kind not in list(Role):
        return None
    model, hosts = build(ModelConfig, group.settings, {}, {}), build(RankHostsConfig, group.settings, {}, {})
    return hosts if hosts.spans_hosts(model.of(group.kind).data_parallel_size) else None


def pods_of(group: ServiceGroup) -> int:
    """How many pods share a worker's ranks evenly. Raises ValueError where they would not."""
    hosts = hosts_of(group)
    if hosts is None:
        return 1
    ranks = build(ModelConfig, group.settings, {}, {}).of(group.kind).data_parallel_size
    here = hosts.local(ranks)
    if ranks % here:
        raise ValueError(
            f"{group.name}: data_parallel_size_local = {here}: pods share {ranks} ranks evenly; give it a divisor"
        )
    return ranks // here


def check_ports(waiting: Iterable[tuple[str, RankHostsConfig]]) -> None:
    """Of workers on one machine that wait for hosts, by name. Raises ValueError where two would listen at one port."""
    found: list[tuple[str, RankHostsConfig]] = []
    for name, hosts in waiting:
        port, address = hosts.data_parallel_rpc_port, hosts.data_parallel_address
        for other, theirs in found:
            addresses = {address, theirs.data_parallel_address}
            if port == theirs.data_parallel_rpc_port and (len(addresses) == 1 or not addresses.isdisjoint(EVERYWHERE)):
                raise ValueError(
                    f"{other} and {name} both wait for hosts at data_parallel_rpc_port = {port} of {address}: give each"
                    " a port of its own"
                )
        found.append((name, hosts))


def refuse_hosts(plan: DeploymentPlan, platform: str) -> None:
    """Raises ValueError where a worker waits for hosts that the platform does not start."""
    for group in plan.workers:
        if hosts_of(group) is not None:
            raise ValueError(
                f"{group.name}: data_parallel_size_local: {platform} starts no hosts of ranks; leave it out, or start"
                " this worker elsewhere"
            )
