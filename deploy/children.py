"""The child processes of `millrace serve`: what each is called, and the command line it is started with."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.placement.plan import DeploymentPlan, ServiceGroup
from deploy.placement.rank_hosts import check_ports
from deploy.placement.reservation import processes_of
from deploy.runtime.cpu_binding import parse_cpus
from deploy.runtime.devices import VISIBLE, asked_index, device_of, visible_devices
from deploy.runtime.settings import Settings
from deploy.runtime.supervisor import ChildSpec
from serving.messages import Role
from serving.options import names

log = logging.getLogger(__name__)

ON_A_SHARED_GPU = "2GiB"  # of KV for each worker that is told no size: a share of it would be that of the first alone


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """`count` workers of a role that are told the same. The first is called `name`-0."""

    name: str
    role: Role
    count: int
    settings: Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Children:
    """All that a front starts below it: workers, and `nodes` of the KV pool with these settings."""

    workers: tuple[WorkerGroup, ...] = ()
    nodes: int = 0
    node_settings: Settings | None = None


def alike(counts: Mapping[Role, int], nodes: int, settings: Settings) -> Children:
    """So many workers of each role and nodes of the pool, all told the same."""
    groups = (WorkerGroup(name=role, role=role, count=count, settings=settings) for role, count in counts.items())
    return Children(workers=tuple(groups), nodes=nodes, node_settings=settings)


def placed(plan: DeploymentPlan, settings_of: Callable[[ServiceGroup], Settings]) -> Children:
    """The workers and nodes of a placement file, each group told what `settings_of` it says.

    Raises ValueError where two workers would wait for hosts of their ranks at one port.
    """
    workers = tuple(
        WorkerGroup(name=group.name, role=Role(group.kind), count=group.count, settings=settings_of(group))
        for group in plan.workers
    )
    check_ports((group.name, group.settings.hosts) for group in workers if _waits_for_hosts(group))
    if plan.nodes is None:
        return Children(workers=workers)
    return Children(workers=workers, nodes=plan.nodes.count, node_settings=settings_of(plan.nodes))


def _waits_for_hosts(group: WorkerGroup) -> bool:
    return group.settings.hosts.spans_hosts(group.settings.model_config.of(group.role).data_parallel_size)


def child_specs(path: Path, groups: Sequence[WorkerGroup], router: str) -> list[ChildSpec]:
    """The commands of the workers: their own model and worker flags, this router, an even share of the cores.

    The cores are shared by all workers that are given the same `--cpus`, or none. One on a GPU has that which it was
    told, or that of the fewest others, and one of several ranks as many; where GPUs are shared, KV has a size and not a
    share of them.
    """
    specs: list[ChildSpec] = []
    gpus = visible_devices(os.environ)
    users = Counter(dict.fromkeys(gpus, 0))
    unsized: set[str] = set()
    placed: Counter[str | None] = Counter()
    totals: Counter[str | None] = Counter()
    for group in groups:
        totals[group.settings.engine.cpus] += group.count
        asked = asked_index(group.settings.model_config.device)
        if asked is not None and asked < len(gpus):
            users[gpus[asked]] += group.count
    for group in groups:
        cpus, total = group.settings.engine.cpus, totals[group.settings.engine.cpus]
        cores = sorted(parse_cpus(cpus)) if cpus else None
        threads = group.settings.engine.threads or max(1, len(cores or os.sched_getaffinity(0)) // total)
        for number in range(group.count):
            own = ["--threads", str(threads)]
            if cores:
                first = placed[cpus]
                share = cores[first * len(cores) // total : (first + 1) * len(cores) // total] or cores
                own += ["--cpus", ",".join(map(str, share))]
            placed[cpus] += 1
            wanted = group.settings.model_config.device
            freest = sorted(range(len(gpus)), key=lambda place: users[gpus[place]])
            ranks = processes_of(group.settings.model_config.of(group.role))
            device, environ = device_of(wanted, freest, gpus, ranks)
            if environ:
                users.update(environ[VISIBLE].split(",") if asked_index(wanted) is None else ())
                own += ["--device", device]
            arguments = (group.role.value, str(path), *worker_flags(group.settings), *own)
            specs.append(replace(_spec(f"{group.name}-{number}", router, arguments), environ=environ))
            if group.settings.engine.kv_cache_memory is None and group.settings.engine.num_kv_blocks is None:
                unsized.add(specs[-1].name)
    shared = {gpu for gpu, count in users.items() if count > 1}
    return [
        _sized(spec) if shared & {*spec.environ.get(VISIBLE, "").split(",")} and spec.name in unsized else spec
        for spec in specs
    ]


def _sized(spec: ChildSpec) -> ChildSpec:
    """A worker that shares its GPU: each measures what the others leave, and all of them start at once."""
    log.warning(
        "%s shares GPU %s: it has %s of KV; --kv-cache-memory says how much else",
        spec.name,
        spec.environ[VISIBLE],
        ON_A_SHARED_GPU,
    )
    return replace(spec, arguments=(*spec.arguments, "--kv-cache-memory", ON_A_SHARED_GPU))


def node_specs(count: int, router: str, settings: Settings) -> list[ChildSpec]:
    """The commands of the KV pool's nodes. They share the disk's path, not a folder of it."""
    specs: list[ChildSpec] = []
    for number in range(count):
        name, disk = f"kvcache-{number}", settings.kvcache.disk
        own = [] if disk is None else [f"--disk={Path(disk) / name}"]
        specs.append(_spec(name, router, ("kvcache", *node_flags(settings), *own)))
    return specs


def _spec(name: str, router: str, arguments: tuple[str, ...]) -> ChildSpec:
    own = ("--routers", router, "--worker-name", name, "--parent", str(os.getpid()))
    return ChildSpec(name=name, arguments=(*arguments, *own))


def worker_flags(settings: Settings) -> list[str]:
    """The settings of a worker as flags for a child process, but for those each child is given of its own."""
    worker = config_flags(settings.model_config) + config_flags(settings.engine, but=("threads", "cpus"))
    return common_flags(settings) + worker + config_flags(settings.hosts) + config_flags(settings.pool)


def node_flags(settings: Settings) -> list[str]:
    """The settings of a node of the KV pool as flags for a child process; each child is given a folder of its own."""
    return common_flags(settings) + config_flags(settings.kvcache, but=("disk",))


def common_flags(settings: Settings) -> list[str]:
    """What every child is told."""
    return [
        *("--shutdown-timeout", str(settings.http.shutdown_timeout)),
        *("--heartbeat-interval", str(settings.placement.heartbeat_interval)),
        *("--heartbeat-timeout", str(settings.placement.heartbeat_timeout)),
        *config_flags(settings.logs),
        *config_flags(settings.security),
        *config_flags(settings.tracing),
    ]


def config_flags(config: Any, but: Sequence[str] = ()) -> list[str]:
    """All settings of a config as flags."""
    flags: list[str] = []
    for name in names(type(config)):
        value = getattr(config, name)
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [f"{flag}={','.join(value)}"] if value else []
        elif value is not None and name not in but:
            flags.append(f"{flag}={value}")  # in one, since a value may begin with a dash
    return flags
