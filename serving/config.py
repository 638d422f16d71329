"""Configuration as frozen dataclasses: one field is a TOML key, an environment variable and a command-line flag.

A TOML file, then the environment (MILLRACE_<FIELD>), then flags; the last one given wins. Unknown keys are errors,
and nothing changes a config after it is built. Sizes in bytes may be written `512MiB`, `4GiB`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from serving.errors import InvalidRequest

ENV_PREFIX = "MILLRACE_"
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class ConfigError(InvalidRequest):
    """A setting is unknown or has no meaning; `param` names it."""


def option(default: Any, help: str, *, choices: Sequence[str] | None = None, secret: bool = False) -> Any:
    """A configurable field. `secret` ones may come from the environment and never appear in output."""
    metadata = {"help": help, "choices": choices, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is served."""

    dtype: str = option(
        "auto", "type of the weights and of the KV cache", choices=("auto", "float32", "bfloat16", "float16")
    )
    served_model_name: str | None = option(None, "the model's name in the API; default: the model's own")
    max_model_len: int | None = option(None, "tokens of prompt and output at most; default: what the model allows")
    device: str = option("cpu", "torch device of the workers")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a worker batches, and how much KV it holds."""

    block_size: int = option(16, "tokens a KV block")
    kv_cache_memory: int = option(2 << 30, "bytes of KV cache a worker, such as 2GiB")
    num_kv_blocks: int | None = option(None, "KV blocks a worker; overrides --kv-cache-memory")
    max_num_seqs: int = option(128, "sequences a worker holds at most")
    max_num_batched_tokens: int = option(512, "tokens a step computes at most: longer prompts go in chunks")
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings")
    threads: int | None = option(None, "compute threads a worker; default: the host's cores shared out")


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """The HTTP door."""

    host: str = option("0.0.0.0", "address to listen on")  # noqa: S104 - what users of such servers expect
    port: int = option(8000, "port of the HTTP API")
    api_key: str | None = option(
        None, "require this key (Authorization: Bearer ...); better set MILLRACE_API_KEY", secret=True
    )
    shutdown_timeout: float = option(120.0, "seconds running requests may take to finish after SIGTERM")
    max_body_size: int = option(4 << 20, "bytes of a request body at most")
    body_timeout: float = option(20.0, "seconds a client may take to send a request's body")
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How long requests wait, and when a worker is given up."""

    queue_patience: float = option(60.0, "seconds a request may wait for room before it gets a 429")
    max_waiting: int = option(1024, "requests that may wait for room; more get a 429 at once")
    heartbeat_interval: float = option(1.0, "seconds between a worker's heartbeats")
    heartbeat_timeout: float = option(5.0, "seconds of silence after which a worker is taken for dead")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How services reach each other."""

    grpc_host: str = option("127.0.0.1", "address a service's gRPC listens on")
    grpc_port: int = option(0, "port of a service's gRPC; 0 takes a free one (the router's default is 8100)")
    advertise: str | None = option(None, "host:port others reach this service's gRPC at; default: where it listens")
    routers: str = option("127.0.0.1:8100", "routers a worker reports to: host:port, comma-separated")
    worker_name: str | None = option(None, "the worker's name; default: role, host and process id")
    metrics_port: int | None = option(None, "port of a worker's own /health, /metrics and /audit; default: none")
    cluster_key: str | None = option(None, "key services show each other; set MILLRACE_CLUSTER_KEY", secret=True)


C = TypeVar("C")


def parse_bytes(text: str) -> int:
    """`4GiB`, `512 MiB`, `1000000` → bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]i?)?[bB]?\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _kind(annotation: Any) -> type:
    """The plain type of a field that may also be None."""
    kinds: list[type] = [kind for kind in get_args(annotation) if kind is not NoneType] or [annotation]
    return kinds[0]


def _convert(name: str, kind: type, value: Any, choices: Sequence[str] | None) -> Any:
    try:
        if kind is bool:
            return _to_bool(value)
        if kind is int and isinstance(value, str):
            return parse_bytes(value)
        if kind is float and isinstance(value, int | str):
            return float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a {kind.__name__}")
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", param=name) from None
    if choices and value not in choices:
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}", param=name)
    return value


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise ValueError(f"{value!r} is not true or false")
    return words[str(value).lower()]


def _fields(config: type[C]) -> Iterator[tuple[str, type, Any]]:
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        yield field.name, _kind(hints[field.name]), field


def add_flags(parser: argparse.ArgumentParser, *configs: type) -> None:
    """A flag for every field of these configs, in a group each; flags not given stay out of the namespace."""
    for config in configs:
        title = (config.__doc__ or config.__name__).strip().splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        for name, kind, field in _fields(config):
            flag = "--" + name.replace("_", "-")
            text = field.metadata["help"].replace("%", "%%")
            if field.default is not None and not field.metadata["secret"]:
                text += f" (default: {field.default})"
            if kind is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            else:
                group.add_argument(
                    flag,
                    default=argparse.SUPPRESS,
                    help=text,
                    metavar=kind.__name__.upper(),
                    choices=field.metadata["choices"],
                )


def load_file(path: Path | None, known: Sequence[str]) -> dict[str, Any]:
    """A flat TOML file of settings, dashes or underscores. Raises ConfigError on anything unknown."""
    if path is None:
        return {}
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}", param="config") from None
    found = {key.replace("-", "_"): value for key, value in data.items()}
    for key in found:
        if key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}; known are {', '.join(sorted(known))}", param=key)
    return found


def build(config: type[C], file: Mapping[str, Any], environ: Mapping[str, str], flags: Mapping[str, Any]) -> C:
    """The config from its three sources. Raises ConfigError naming the setting."""
    values = {}
    for name, kind, field in _fields(config):
        variable = ENV_PREFIX + name.upper()
        for source, key, label in (
            (flags, name, "--" + name.replace("_", "-")),
            (environ, variable, variable),
            (file, name, name),
        ):
            if key in source:
                values[name] = _convert(label, kind, source[key], field.metadata["choices"])
                break
    return config(**values)


def names(*configs: type) -> list[str]:
    """Every setting's name."""
    return [name for config in configs for name, _, _ in _fields(config)]
