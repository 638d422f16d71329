"""A placement file as a command is given it: read, and its services' settings under the flags and the environment.

Flags and environment go before the file for every service, as they go before `--config`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from deploy.placement.plan import KVCACHE, DeploymentPlan, ServiceGroup
from deploy.placement.rank_hosts import check_ports, hosts_of
from deploy.placement.reader import read_placement
from deploy.runtime.settings import Settings, check_heartbeats, check_hosts, check_ranks, read_settings
from serving.config import EngineConfig, ModelConfig, PlacementConfig
from serving.given_files import read_given_text
from serving.messages import Role
from serving.options import ConfigError, build
from serving.rank_hosts_config import RankHostsConfig


def load_placement(path: str) -> DeploymentPlan:
    """The plan in the file at `path`, or of "-", on standard input. Raises ConfigError."""
    try:
        text = sys.stdin.read() if path == "-" else read_given_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--placement {path}: {error}", param="placement") from None
    return read_placement(text, path)


def check_given(given: Mapping[str, Any]) -> None:
    """Raises ValueError for flags that say what the placement file has to say."""
    if given.get("config") is not None:
        raise ValueError("--config and --placement: put the file's settings into the placement's [common]")
    for name in (*(role.value for role in Role), KVCACHE):
        if given.get(name):
            raise ValueError(f"--{name} and --placement: the placement file says how many there are of each")


def placed_settings(given: Mapping[str, Any], plan: DeploymentPlan, group: ServiceGroup) -> Settings:
    """The settings of a service of this group. Raises ValueError."""
    model = given.get("model") if given.get("model") is not None else plan.model
    settings = read_settings({**given, "model": model}, group.settings)
    _check(group, settings.engine, settings.model_config, settings.placement, settings.hosts)
    return settings


def check_plan(plan: DeploymentPlan, *, apart: bool = False) -> None:
    """Raises ValueError for settings of a group that no service could start with, whatever this machine's environment.

    Each of them alone is right, as the file was read. Workers that are `apart` have an address each.
    """
    for group in plan.groups:
        engine, model = build(EngineConfig, group.settings, {}, {}), build(ModelConfig, group.settings, {}, {})
        hosts = build(RankHostsConfig, group.settings, {}, {})
        _check(group, engine, model, build(PlacementConfig, group.settings, {}, {}), hosts)
    if not apart:
        waiting = ((group.name, hosts_of(group)) for group in plan.workers)
        check_ports((name, hosts) for name, hosts in waiting if hosts is not None)


def _check(
    group: ServiceGroup, engine: EngineConfig, model: ModelConfig, placement: PlacementConfig, hosts: RankHostsConfig
) -> None:
    try:
        check_heartbeats(placement)
        if group.kind in list(Role):
            check_ranks(engine, model.of(group.kind), decodes=group.kind != Role.PREFILL)
            check_hosts(hosts, model.of(group.kind), group.count)
    except (ConfigError, ValueError) as error:
        raise ValueError(f"{group.name}: {error}") from error
