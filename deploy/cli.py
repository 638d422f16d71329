"""The `millrace` command. It reads the settings and hands over; each command imports only what it needs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import command as bench
from deploy import cache, explain, quantize, top
from serving import __version__
from serving.config import (
    ClusterConfig,
    EngineConfig,
    HttpConfig,
    KvCacheConfig,
    ModelConfig,
    PlacementConfig,
    PoolConfig,
    add_flags,
    build,
    load_file,
    names,
)
from serving.errors import MillraceError
from serving.logs import setup_logging
from serving.messages import Role
from serving.service_config import ServiceConfig, check_default, read_service_classes

CONFIGS = (
    ModelConfig,
    EngineConfig,
    HttpConfig,
    ServiceConfig,
    PlacementConfig,
    ClusterConfig,
    PoolConfig,
    KvCacheConfig,
)
NODE_CONFIGS = (KvCacheConfig, HttpConfig, PlacementConfig, ClusterConfig)  # what a node of the KV pool reads

# Commands that read none of the settings below.
ALONE = {
    "bench": bench.run,
    "quantize": quantize.run,
    "cache": cache.run,
    "explain": explain.run,
    "top": top.run,
}

DESCRIPTION = """Disaggregated LLM serving: prefill, decode and KV cache as services behind an OpenAI-compatible API.

  millrace serve                          one process, SmolLM2-135M-Instruct, http://localhost:8000/v1
  millrace serve MODEL                    a Hugging Face folder, a .gguf file, or a hub name
  millrace serve --prefill 2 --decode 1   each worker a process of its own
  millrace serve --mixed 2 --kvcache 1    two workers that share what they computed through a KV pool
  millrace router | prefill | decode      one service alone, on any host
  millrace kvcache --ram 4GiB             a node of the KV pool alone; millrace cache stat shows what it holds
  millrace explain ID | millrace top      why a request went where it went; a live view of the workers
  millrace bench                          measure this or any other OpenAI-compatible server
"""

COMMANDS = {
    "serve": "API, router and workers on this host",
    "router": "the API and the router alone; workers report to it",
    "prefill": "a prefill worker alone",
    "decode": "a decode worker alone",
    "mixed": "a worker that prefills and decodes, alone",
}
KVCACHE = "a node of the KV pool alone: prefixes that any worker computed, for all of them"
CACHE = "show, drop or check what the nodes of a KV pool hold"
EXPLAIN = "why a request went where it went, and how long everything took against what was predicted"
TOP = "a live view of workers, queues and objectives met; q leaves"
QUANTIZE = "write a model as INT8 weights and activations, in the compressed-tensors convention"
MEASURE = "measure any OpenAI-compatible endpoint: latencies, throughput, goodput"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"millrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=sentence(text))
        command.add_argument(
            "model", nargs="?", help="a folder, a .gguf file or a hub name (default: SmolLM2-135M-Instruct)"
        )
        command.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of any of the settings below")
        if name == "serve":
            _add_counts(command)
        if name in ("prefill", "decode", "mixed"):
            command.add_argument("--parent", type=int, help=argparse.SUPPRESS)
        add_flags(command, *CONFIGS)
    node = commands.add_parser("kvcache", help=KVCACHE, description=sentence(KVCACHE))
    node.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of any of millrace's settings")
    node.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    add_flags(node, *NODE_CONFIGS)
    cache.add_arguments(commands.add_parser("cache", help=CACHE, description=sentence(CACHE)))
    explain.add_arguments(commands.add_parser("explain", help=EXPLAIN, description=sentence(EXPLAIN)))
    top.add_arguments(commands.add_parser("top", help=TOP, description=sentence(TOP)))
    bench.add_arguments(commands.add_parser("bench", help=MEASURE, description=sentence(MEASURE)))
    quantize.add_arguments(commands.add_parser("quantize", help=QUANTIZE, description=sentence(QUANTIZE)))
    return parser


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _add_counts(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("Workers as processes of their own")
    for role in Role:
        group.add_argument(
            f"--{role}",
            type=int,
            default=0,
            metavar="N",
            help=f"start N {role} workers (default: 0; with none of any kind, all in one process)",
        )
    group.add_argument(
        "--kvcache",
        type=int,
        default=0,
        metavar="N",
        help="start N nodes of the KV pool (default: 0); without workers of any kind beside them, one mixed worker too",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    parsed = make_parser().parse_args(arguments)
    try:
        if parsed.command in ALONE:
            code = ALONE[parsed.command](parsed)
            sys.stdout.flush()
            return code
        return _run(vars(parsed))
    except BrokenPipeError:  # the reader of our output has seen enough, as in `millrace cache ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the last flush fail
        return 128 + signal.SIGPIPE
    except (MillraceError, ValueError, OSError) as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(given: dict[str, Any]) -> int:
    from deploy.serve import Settings

    file = load_file(given.get("config"), names(*CONFIGS))
    flags = {key: value for key, value in given.items() if key in names(*CONFIGS)}
    service = build(ServiceConfig, file, os.environ, flags)
    classes = read_service_classes(service.service_classes)
    check_default(service.default_service_class, classes)
    settings = Settings(
        model=given.get("model"),
        model_config=build(ModelConfig, file, os.environ, flags),
        engine=build(EngineConfig, file, os.environ, flags),
        http=build(HttpConfig, file, os.environ, flags),
        placement=build(PlacementConfig, file, os.environ, flags),
        cluster=build(ClusterConfig, file, os.environ, flags),
        pool=build(PoolConfig, file, os.environ, flags),
        kvcache=build(KvCacheConfig, file, os.environ, flags),
        service=service,
        classes=classes,
    )
    setup_logging(settings.cluster.worker_name or given["command"], settings.http.log_level)
    return _start(given, settings, worker_flags(settings))


def _start(given: Mapping[str, Any], settings: Any, child_flags: tuple[str, ...]) -> int:
    import uvloop

    from deploy.serve import serve_embedded, serve_front

    command = given["command"]
    if command == "serve":
        children = children_of(given)
        if not children and settings.service.strict_disaggregation:
            raise ValueError("--strict-disaggregation needs workers apart: --prefill N --decode M, say")
        if not children:
            return uvloop.run(serve_embedded(settings))
        return uvloop.run(serve_front(settings, children, child_flags, given["kvcache"], node_flags(settings)))
    if command == "router":
        return uvloop.run(serve_front(settings, {}, ()))
    if command == "kvcache":
        return uvloop.run(_node(settings, given.get("parent")))
    return uvloop.run(_host(Role(command), settings, given.get("parent")))


async def _node(settings: Any, parent: int | None) -> int:
    from deploy.kvcache_process import KvcacheProcess

    return await KvcacheProcess(
        settings.kvcache, settings.cluster, settings.http, settings.placement, parent=parent
    ).run()


async def _host(role: Role, settings: Any, parent: int | None) -> int:
    from deploy.worker.process import WorkerProcess

    return await WorkerProcess(role, settings, parent=parent).run()


def children_of(given: Mapping[str, Any]) -> dict[Role, int]:
    """How many workers of each role to start. Nodes of the pool alone serve no request: a mixed worker comes along.

    Raises ValueError for numbers that could never serve.
    """
    children = {role: given[role.value] for role in Role if given[role.value]}
    check_counts(children)
    if given["kvcache"] < 0:
        raise ValueError("--kvcache: a number of pool nodes cannot be negative")
    return children or ({Role.MIXED: 1} if given["kvcache"] else {})


def check_counts(children: Mapping[Role, int]) -> None:
    """Raises ValueError for numbers of workers that could never serve."""
    if any(count < 0 for count in children.values()):
        raise ValueError("a number of workers cannot be negative")
    if children and not children.get(Role.MIXED):
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if children.get(role) and not children.get(other):
                raise ValueError(f"--{role} {children[role]} needs --{other} too, or --mixed")


def worker_flags(settings: Any) -> tuple[str, ...]:
    """The settings of a worker as flags for a child process, but for those each child is given of its own."""
    worker = config_flags(settings.model_config) + config_flags(settings.engine, but=("threads", "cpus"))
    return (*common_flags(settings), *worker, *config_flags(settings.pool))


def node_flags(settings: Any) -> tuple[str, ...]:
    """The settings of a node of the KV pool as flags for a child process; each child is given a folder of its own."""
    return (*common_flags(settings), *config_flags(settings.kvcache, but=("disk",)))


def common_flags(settings: Any) -> tuple[str, ...]:
    """What every child is told."""
    flags: list[str] = ["--log-level", settings.http.log_level]
    flags += ["--shutdown-timeout", str(settings.http.shutdown_timeout)]
    flags += ["--heartbeat-interval", str(settings.placement.heartbeat_interval)]
    return tuple(flags)


def config_flags(config: Any, but: Sequence[str] = ()) -> list[str]:
    """All settings of a config as flags."""
    flags: list[str] = []
    for name in names(type(config)):
        value = getattr(config, name)
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None and name not in but:
            flags.append(f"{flag}={value}")  # in one, since a value may begin with a dash
    return flags


if __name__ == "__main__":
    sys.exit(main())
