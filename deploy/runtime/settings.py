"""What a command is configured with: every group of settings, read from file, environment and flags, and frozen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

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
from serving.options import ConfigError, build, load_file, names
from serving.rank_hosts_config import RankHostsConfig
from serving.security_config import SecurityConfig
from serving.service_config import ServiceConfig
from serving.tracing_config import TracingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything a command may be configured with."""

    model: str | None
    model_config: ModelConfig
    hosts: RankHostsConfig = field(default_factory=RankHostsConfig)
    engine: EngineConfig
    http: HttpConfig
    service: ServiceConfig = field(default_factory=ServiceConfig)
    placement: PlacementConfig
    cluster: ClusterConfig
    logs: LogConfig = field(default_factory=LogConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    pool: PoolConfig
    kvcache: KvCacheConfig


GROUPS = {name: kind for name, kind in get_type_hints(Settings).items() if name != "model"}
CONFIGS = tuple(GROUPS.values())
# What a node of the KV pool reads.
NODE_CONFIGS = (KvCacheConfig, HttpConfig, PlacementConfig, ClusterConfig, LogConfig, SecurityConfig, TracingConfig)


def read_settings(given: Mapping[str, Any], placed: Mapping[str, Any] | None = None) -> Settings:
    """The settings of parsed flags, over the environment, over the file they name. Raises ConfigError.

    `placed` stands in for that file: what a placement file says of a service.
    """
    file = load_file(given.get("config"), names(*CONFIGS)) if placed is None else placed
    environ = _environment(os.environ)
    groups: dict[str, Any] = {name: build(kind, file, environ, given) for name, kind in GROUPS.items()}
    return Settings(model=given.get("model"), **groups)


def check_ranks(engine: EngineConfig, model: ModelConfig, *, decodes: bool) -> None:
    """Raises ValueError for what a worker of several ranks, if it is one, cannot do, or one of a single rank.

    One that does not decode makes no drafts, whatever is said of them.
    """
    asked = engine.speculation()
    if decodes and model.rank_flags and asked.method == "mtp" and asked.num_speculative_tokens:
        raise ValueError(
            f"--speculative-config: with {model.rank_flags} the hidden states that mtp drafts from lie with several"
            " ranks: choose draft_model or ngram, or leave out one of the two"
        )
    mapped = model.data_parallel_size > 1 and model.device == "cpu"  # all ranks have the leader's memory
    if engine.host_kv_memory and model.rank_flags and not mapped:
        raise ValueError(
            f"--host-kv-memory: with {model.rank_flags} KV lies in the KV cache alone: leave out one of the two"
        )
    if engine.attention_backend != "auto" and (model.device == "cpu" or engine.kernels == "torch"):
        why = "--device is cpu, and it computes on CUDA alone" if model.device == "cpu" else "--kernels torch attends"
        raise ValueError(f"--attention-backend {engine.attention_backend}: {why}; choose --attention-backend auto")
    spreads = model.data_parallel_size > 1
    if model.rank_flags and spreads != (model.device == "cpu"):  # the others have kernels
        check_kernels(engine, model.rank_flags)
    model.eplb()  # wrong words are told before anything is loaded


def check_hosts(hosts: RankHostsConfig, model: ModelConfig, workers: int) -> None:
    """Raises ConfigError for ranks on several hosts that the `workers` which are started here cannot have."""
    spread = model.data_parallel_size > 1 and model.enable_expert_parallel and model.device == "cpu"
    hosts.check(model.data_parallel_size, spread=spread, balanced=model.enable_eplb, workers=workers)


def check_kernels(engine: EngineConfig, rank_flags: str) -> None:
    """Raises ValueError for kernels that a worker asked for so cannot compute with, which is with torch alone."""
    spread = f"with {rank_flags} a step is computed by torch"
    if engine.deterministic:
        raise ValueError(f"--deterministic needs the compiled kernels, but {spread}: leave out one of the two")
    if engine.kernels == "compiled":
        raise ValueError(f"--kernels compiled: {spread}; choose --kernels auto")
    if engine.attention_backend != "auto":
        raise ValueError(f"--attention-backend {engine.attention_backend}: {spread}; choose --attention-backend auto")


def check_heartbeats(placement: PlacementConfig) -> None:
    """Raises ValueError for a timeout that one late heartbeat would pass."""
    least = 2 * placement.heartbeat_interval
    if not placement.heartbeat_timeout > least:
        raise ValueError(
            f"--heartbeat-timeout {placement.heartbeat_timeout:g} with --heartbeat-interval "
            f"{placement.heartbeat_interval:g}: a worker would be taken for dead for one heartbeat that is late; give "
            f"routers and workers a timeout above {least:g} s, or a shorter interval"
        )


def _environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with vLLM's key as ours, for nobody is to believe it is asked for. Raises ConfigError."""
    key = environ.get("VLLM_API_KEY", "")
    if "," in key:
        raise ConfigError("VLLM_API_KEY: a key cannot have a comma here, where it parts keys", param="VLLM_API_KEY")
    return {"MILLRACE_API_KEY": key, **environ} if key else environ
