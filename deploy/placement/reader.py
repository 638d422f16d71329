"""Reads a placement file into a plan, or says what is wrong with it, by key and line. Pure: text in, plan out.

docs/placement.md describes the file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.placement.plan import HEARTBEATS, KVCACHE, LEADERS, READS, ROUTER, DeploymentPlan, ServiceGroup, Values
from deploy.placement.ray_table import read_ray_table
from serving.config import (
    ClusterConfig,
    EngineConfig,
    HttpConfig,
    KvCacheConfig,
    ModelConfig,
    PlacementConfig,
    PoolConfig,
)
from serving.log_config import LogConfig
from serving.messages import Role
from serving.options import ConfigError, build, names
from serving.rank_hosts_config import RankHostsConfig
from serving.security_config import SecurityConfig
from serving.service_config import ServiceConfig
from serving.tracing_config import TracingConfig

CONFIGS = (
    ModelConfig,
    EngineConfig,
    HttpConfig,
    ServiceConfig,
    PlacementConfig,
    PoolConfig,
    KvCacheConfig,
    LogConfig,
    SecurityConfig,
    TracingConfig,
    RankHostsConfig,
)
CONFIG_OF = {name: config for config in CONFIGS for name in names(config)}
SECRETS = ("api_key", "cluster_key")
OF_A_HOST = tuple(name for name in names(RankHostsConfig) if name not in LEADERS)
GIVEN = tuple(name for name in names(ClusterConfig) if name not in SECRETS)
COMMON, RAY = "common", "ray"
TOP = ("model", COMMON, ROUTER, "workers", KVCACHE, RAY)
OWN_KEYS = {COMMON: (), ROUTER: (), "workers": ("role", "count", "name"), KVCACHE: ("count",)}
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # a label of DNS, with room for a number
MOST = 1000  # services of a group: more is a slip of the finger

Place = tuple[str | int, ...]
"""Where something stands: keys of tables, and numbers of an array's elements."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The text and its name, for errors."""

    text: str
    name: str

    def fault(self, where: Place, message: str) -> ConfigError:
        """An error that names the line, the table and the key."""
        line = line_of(self.text, where)
        place = self.name if line is None else f"{self.name}:{line}"
        key = next((str(part) for part in reversed(where) if isinstance(part, str)), None)
        table = _shown(where[:-1])
        return ConfigError(f"{place}: {f'{table}: ' if table else ''}{message}", param=key)


def read_placement(text: str, name: str = "placement.toml") -> DeploymentPlan:
    """The plan that the text of a placement file means. Raises ConfigError naming line, table and key."""
    source = _Source(text, name)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}") from None
    for key in data:
        if key not in TOP:
            raise source.fault((key,), f"unknown key {key!r}{_meant(key, TOP)}; known are {', '.join(TOP)}")
    model = data.get("model")
    if model is not None and not (isinstance(model, str) and model.strip() and not model.startswith("-")):
        raise source.fault(("model",), f"model = {model!r} is not a folder, a .gguf file or a hub name")
    common = _settings(source, (COMMON,), _table(source, data, COMMON), COMMON)
    workers = _workers(source, data, common)
    nodes = None
    if KVCACHE in data:
        table = _table(source, data, KVCACHE)
        own = _settings(source, (KVCACHE,), table, KVCACHE)
        count = _count(source, (KVCACHE,), table)
        nodes = ServiceGroup(name=KVCACHE, kind=KVCACHE, count=count, settings=_read_by(KVCACHE, common) | own)
    own = _settings(source, (ROUTER,), _table(source, data, ROUTER), ROUTER)
    router = ServiceGroup(name=ROUTER, kind=ROUTER, settings=_read_by(ROUTER, common) | own)
    groups = [group.name for group in (*workers, *([nodes] if nodes is not None else []))]
    ray = read_ray_table(_table(source, data, RAY), groups, source.fault)
    return DeploymentPlan(model=model, router=router, workers=workers, nodes=nodes, ray=ray, source=text)


def _workers(source: _Source, data: Mapping[str, Any], common: Values) -> tuple[ServiceGroup, ...]:
    tables = data.get("workers")
    if tables is None or tables == []:
        raise source.fault((), "there are no workers: add [[workers]] with a role")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise source.fault(("workers",), "workers are tables of an array: write [[workers]] above each")
    groups: list[ServiceGroup] = []
    for number, table in enumerate(tables):
        group = _group(source, ("workers", number), table, common)
        if group.name in {other.name for other in groups}:
            told = f"there is a group {group.name!r} already: give this one a name of its own"
            raise source.fault(("workers", number, "name" if "name" in table else "role"), told)
        groups.append(group)
    roles = {group.kind for group in groups}
    if Role.MIXED not in roles and len(roles) == 1:
        (role,) = roles
        other = Role.DECODE if role == Role.PREFILL else Role.PREFILL
        raise source.fault(("workers", 0, "role"), f"{role} workers need {other} workers too, or mixed ones")
    return tuple(groups)


def _group(source: _Source, where: Place, table: Mapping[str, Any], common: Values) -> ServiceGroup:
    roles = tuple(role.value for role in Role)
    if "role" not in table:
        raise source.fault((*where, "role"), f"role is missing: {', '.join(roles)}")
    role = table["role"]
    if role not in roles:
        raise source.fault((*where, "role"), f"role = {role!r} is none of {', '.join(roles)}")
    name = table.get("name", role)
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.startswith((ROUTER, KVCACHE)):
        told = "is no name of a group: small letters, digits and dashes, at most 40, not beginning as router or kvcache"
        raise source.fault((*where, "name"), f"name = {name!r} {told}")
    own = _settings(source, where, table, role)
    settings = _read_by(role, common) | own
    return ServiceGroup(name=name, kind=role, count=_count(source, where, table), settings=settings)


def _settings(source: _Source, where: Place, table: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The settings of a table, under their names with underscores. Raises ConfigError."""
    reserved = OWN_KEYS.get(kind, OWN_KEYS["workers"])
    known = frozenset[str]().union(*READS.values()) if kind == COMMON else READS[kind]
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in reserved:
            continue
        name = key.replace("-", "_")
        told = _refusal(key, name, kind, known, reserved)
        if told is None and name in found:
            told = f"{name} is given twice, with a dash and with an underscore"
        if told is not None:
            raise source.fault((*where, key), told)
        try:
            build(CONFIG_OF[name], {name: value}, {}, {})
        except ConfigError as error:
            raise source.fault((*where, key), error.message) from None
        found[name] = value
    return found


def _refusal(key: str, name: str, kind: str, known: frozenset[str], reserved: Sequence[str]) -> str | None:
    """Why a table of this kind may not have the setting; None where it may."""
    if name in SECRETS:
        return f"{key}: keys do not belong in a file: set MILLRACE_{name.upper()} in the environment"
    if name in OF_A_HOST:
        return f"{key}: hosts of a worker's ranks are no services: start each there, `millrace serve MODEL --headless`"
    if name in GIVEN:
        return f"{key} follows from the placement: leave it out"
    if kind != COMMON and name in HEARTBEATS:
        return f"{key} is the same for all services: put it under [{COMMON}]"
    if name in known:
        return None
    if name in CONFIG_OF:
        readers = [reader for reader, settings in READS.items() if name in settings]
        return f"{key} is no setting of {_named(kind)}, but of {', '.join(readers)}"
    return f"unknown setting {key!r}{_meant(name, [*known, *reserved])}; docs/cli.md has all of them"


def _table(source: _Source, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise source.fault((key,), f"{key} is a table: write [{key}] above its settings")
    return table


def _count(source: _Source, where: Place, table: Mapping[str, Any]) -> int:
    count = table.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
        raise source.fault((*where, "count"), f"count = {count!r} is not a number from 1 to {MOST}")
    return count


def _read_by(kind: str, common: Values) -> dict[str, Any]:
    return {name: value for name, value in common.items() if name in READS[kind]}


def _named(kind: str) -> str:
    return {ROUTER: "the router", KVCACHE: "a node of the KV pool"}.get(kind, f"a {kind} worker")


def _meant(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _shown(where: Place) -> str:
    """A table as it is written: `[router]`, `[ray.prefill]`, `[[workers]] number 2`."""
    if not where:
        return ""
    if isinstance(where[-1], int):
        return f"[[{where[0]}]] number {where[-1] + 1}"
    return f"[{'.'.join(map(str, where))}]"


def line_of(text: str, where: Place) -> int | None:
    """The line, from 1, on which what stands at `where` is there in full; of what is missing, its table's line.

    None where not even that is there. It is the first line up to which the text is TOML with this key in it.
    """
    while where:
        key = next((part for part in reversed(where) if isinstance(part, str)), "")
        lines, open_ = text.split("\n"), False
        for number, line in enumerate(lines, 1):
            open_ = open_ or key in line
            begun = _parsed("\n".join(lines[:number])) if open_ else None
            if begun is not None:
                if _holds(begun, where):
                    return number
                open_ = False
        where = where[:-1]
    return None


def _parsed(text: str) -> Mapping[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _holds(data: Any, where: Place) -> bool:
    for part in where:
        if isinstance(part, str):
            if not isinstance(data, dict) or part not in data:
                return False
        elif not isinstance(data, list) or part >= len(data):
            return False
        data = data[part]
    return True
