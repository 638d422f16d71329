"""What a placement file says, as plain values: groups of services, and the settings each of them reads.

It may not know files, processes or any platform: readers make a plan, renderers and `millrace serve` use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.placement.ray_table import RayTable
from serving.config import EngineConfig, HttpConfig, KvCacheConfig, ModelConfig, PlacementConfig, PoolConfig
from serving.log_config import LogConfig
from serving.messages import Role
from serving.options import names
from serving.security_config import SecurityConfig
from serving.service_config import ServiceConfig
from serving.tracing_config import TracingConfig

ROUTER, KVCACHE = "router", "kvcache"
Values = Mapping[str, Any]
"""Settings by their names with underscores, as TOML has them: numbers, texts, booleans and lists of texts."""

# Of everyone, and to be equal everywhere: a worker is taken for dead by what it and the router both count on.
HEARTBEATS = ("heartbeat_interval", "heartbeat_timeout")
EVERYONES = ("shutdown_timeout", "metrics_prefix", *names(LogConfig, SecurityConfig, TracingConfig))
# What the router itself takes of the model's settings: how the model is shown.
SHOWN = ("served_model_name", "max_model_len", "generation_config")
# Of a worker with ranks on other hosts, which are started there by themselves.
LEADERS = ("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port")
_WORKERS = (*names(ModelConfig, EngineConfig, PoolConfig), *LEADERS, *EVERYONES)
READS: Mapping[str, frozenset[str]] = {
    ROUTER: frozenset({*names(HttpConfig, ServiceConfig, PlacementConfig), *EVERYONES, *SHOWN}),
    **{role.value: frozenset({*_WORKERS, *HEARTBEATS}) for role in Role},
    KVCACHE: frozenset({*names(KvCacheConfig), *EVERYONES, *HEARTBEATS}),
}
"""The settings that each kind of service reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceGroup:
    """`count` services of a kind (ROUTER, a role of workers, or KVCACHE) that are started alike.

    `settings` has what the group reads of the common settings, under its own.
    """

    name: str
    kind: str
    count: int = 1
    settings: Values = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentPlan:
    """A router, groups of workers, and nodes of the KV pool, over one model (None: the demonstration model).

    `ray` says how they lie on a Ray cluster; other platforms do not read it. `source` is the text that says all this.
    """

    model: str | None
    router: ServiceGroup
    workers: tuple[ServiceGroup, ...]
    nodes: ServiceGroup | None = None
    ray: RayTable = field(default_factory=RayTable)
    source: str = ""

    @property
    def groups(self) -> tuple[ServiceGroup, ...]:
        """All of them, in the order in which they are best started."""
        return (self.router, *((self.nodes,) if self.nodes is not None else ()), *self.workers)


def flags_of(settings: Values) -> list[str]:
    """Settings as flags of the `millrace` command, each one word."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            flags.append(f"{flag}={','.join(value)}")
        else:
            flags.append(f"{flag}={value}")
    return flags
