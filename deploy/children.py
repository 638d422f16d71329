"""The child processes of `millrace serve`: what each is called, and the command line it is started with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.runtime.cpu_binding import parse_cpus
from deploy.runtime.settings import Settings
from deploy.runtime.supervisor import ChildSpec
from serving.messages import Role
from serving.options import names


def child_specs(path: Path, children: Mapping[Role, int], router: str, settings: Settings) -> list[ChildSpec]:
    """The commands of the workers: our own model and worker flags, this router, an even share of the cores."""
    total = sum(children.values())
    cores = sorted(parse_cpus(settings.engine.cpus)) if settings.engine.cpus else None
    threads = settings.engine.threads or max(1, len(cores or os.sched_getaffinity(0)) // max(1, total))
    specs: list[ChildSpec] = []
    for role, count in children.items():
        for number in range(count):
            own = ["--threads", str(threads)]
            if cores:
                share = cores[len(specs) * len(cores) // total : (len(specs) + 1) * len(cores) // total] or cores
                own += ["--cpus", ",".join(map(str, share))]
            arguments = (role.value, str(path), *worker_flags(settings), *own)
            specs.append(_spec(f"{role}-{number}", router, arguments))
    return specs


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
    return common_flags(settings) + worker + config_flags(settings.pool)


def node_flags(settings: Settings) -> list[str]:
    """The settings of a node of the KV pool as flags for a child process; each child is given a folder of its own."""
    return common_flags(settings) + config_flags(settings.kvcache, but=("disk",))


def common_flags(settings: Settings) -> list[str]:
    """What every child is told."""
    return [
        *("--log-level", settings.http.log_level),
        *("--shutdown-timeout", str(settings.http.shutdown_timeout)),
        *("--heartbeat-interval", str(settings.placement.heartbeat_interval)),
        *("--heartbeat-timeout", str(settings.placement.heartbeat_timeout)),
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
