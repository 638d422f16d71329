"""The `millrace` command. It reads the settings and hands over; each command imports only what it needs."""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from deploy.foreign_flags import translate
from deploy.placement.given import check_given, load_placement, placed_settings
from deploy.placement.ray_table import RayTable
from deploy.runtime.secrets_known import secrets_of
from deploy.runtime.settings import (
    CONFIGS,
    NODE_CONFIGS,
    Settings,
    check_heartbeats,
    check_hosts,
    check_ranks,
    read_settings,
)
from deploy.runtime.signals import leave_at_once_on_signals
from deploy.runtime.tls import https_files
from deploy.runtime.traced import traced
from serving import __version__
from serving.collecting import loading_modules
from serving.config import PARALLEL_SIZES, ModelConfig
from serving.errors import MillraceError
from serving.grpc_tls import grpc_tls
from serving.log_config import JSON
from serving.log_lines import LogSetup, setup_of
from serving.logs import bare_line, setup_logging
from serving.messages import Role
from serving.options import ENV_PREFIX, ConfigError, add_flags, check_last_word
from serving.service_config import configured_classes

log = logging.getLogger(__name__)

DESCRIPTION = """Disaggregated LLM serving: prefill, decode and KV cache as services behind an OpenAI-compatible API.

  millrace serve                          one process, SmolLM2-135M-Instruct, http://localhost:8000/v1
  millrace serve MODEL                    a Hugging Face folder, a .gguf file, or a hub name
  millrace serve --prefill 2 --decode 1   each worker a process of its own
  millrace serve --mixed 2 --kvcache 1    two workers that share what they computed through a KV pool
  millrace serve --placement FILE         what a placement file says: roles, numbers, settings of each
  millrace router | prefill | decode      one service alone, on any host
  millrace kvcache --ram 4GiB             a node of the KV pool alone; millrace cache stat shows what it holds
  millrace explain ID | millrace top      why a request went where it went; a live view of the workers
  millrace keys create --tenant NAME      an API key with a tenant and limits of its own
  millrace deploy render compose FILE     the same placement as a Compose file; helm, ray: for those
  millrace plan --model opt-13b           which workers, in what numbers: a report and a placement file
  millrace serve --on ray --placement F   its workers as actors of a Ray cluster; millrace scale prefill=3
  millrace autoscale --dry-run            what would follow the traffic: workers more, fewer, or in another role
  millrace simulate --workers mixed=4     what a cluster would do, on virtual time; --trace FILE: under your traffic
  millrace bench                          measure this or any other OpenAI-compatible server
"""

COMMANDS = {
    "serve": "API, router and workers on this host",
    "router": "the API and the router alone; workers report to it",
    "prefill": "a prefill worker alone",
    "decode": "a decode worker alone",
    "mixed": "a worker that prefills and decodes, alone",
}
FOREIGN = "Flags of vLLM and SGLang are understood, or refused with what to use instead: docs/cli.md has the table."
FRONTS = ("serve", "router")  # commands with an HTTP API
WORKERS = tuple(Role)  # commands that run one worker alone
KVCACHE = "a node of the KV pool alone: prefixes that any worker computed, for all of them"
# Commands that read none of the settings: what each does, and the module that does it, imported once it is asked for.
ALONE = {
    "cache": ("show, drop or check what the nodes of a KV pool hold", "deploy.cache"),
    "explain": (
        "why a request went where it went, and how long everything took against what was predicted",
        "deploy.explain",
    ),
    "top": ("a live view of workers, queues and objectives met; q leaves", "deploy.top"),
    "deploy": ("write a placement file in the form of a platform", "deploy.placement.command"),
    "plan": (
        "find the workers and their parallelism that give the most goodput per device, or that splitting does not pay",
        "deploy.planner.command",
    ),
    "scale": ("more or fewer services of a deployment on Ray; those that leave finish what they have", "deploy.scale"),
    "autoscale": ("add, drain and flip workers as the traffic asks, or say what would be done", "deploy.autoscale"),
    "keys": (
        "make, list and revoke API keys with tenants and limits, in the file that --api-keys-file names",
        "deploy.keys",
    ),
    "simulate": (
        "what a cluster would do under a load: attainment of a rate or a trace, or the highest rate that attains",
        "deploy.simulator.arguments",
    ),
    "profile": (
        "write what a running worker has learned of its steps, as a profile for millrace simulate",
        "deploy.profile_worker",
    ),
    "bench": ("measure any OpenAI-compatible endpoint: latencies, throughput, goodput", "bench.command"),
    "quantize": (
        "write a model as INT8 weights and activations, in the compressed-tensors convention",
        "deploy.quantize",
    ),
    "upcycle": ("write a dense model as a mixture of experts that gives the same text", "deploy.upcycle"),
}


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Of all commands; with `only` the others have a name and a line of help, and none of their flags."""
    parser = argparse.ArgumentParser(
        prog="millrace", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"millrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=sentence(text), epilog=FOREIGN)
        if only in (None, name):
            _add_settings(command, name)
    node = commands.add_parser("kvcache", help=KVCACHE, description=sentence(KVCACHE))
    if only in (None, "kvcache"):
        node.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of any of millrace's settings")
        node.add_argument("--parent", type=int, help=argparse.SUPPRESS)
        add_flags(node, *NODE_CONFIGS)
    for name, (text, module) in ALONE.items():
        command = commands.add_parser(name, help=text, description=sentence(text))
        if only in (None, name):
            import_module(module).add_arguments(command)
    return parser


def _add_settings(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument(
        "model", nargs="?", help="a folder, a .gguf file or a hub name (default: SmolLM2-135M-Instruct)"
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of any of the settings below")
    if name == "serve":
        _add_counts(command)
    if name in WORKERS:
        command.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    add_flags(command, *CONFIGS)


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
        "--placement",
        type=load_placement,
        metavar="FILE",
        help="start what a placement file says (-: standard input), in place of the numbers here and of --config"
        " (docs/placement.md)",
    )
    group.add_argument(
        "--on", choices=("ray",), help="start workers and nodes as actors of a Ray cluster (docs/deploy-ray.md)"
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of the Ray cluster, with --on ray (default: $RAY_ADDRESS, else auto: the cluster of this host)",
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
    arguments, told = list(sys.argv[1:] if arguments is None else arguments), list[str]()
    try:
        if arguments[:1] and arguments[0] in COMMANDS:
            known = translate(arguments)
            arguments, told = known.arguments, known.told
        parsed = make_parser(_asked_for(arguments)).parse_args(arguments)
        if parsed.command in ALONE:
            _, module = ALONE[parsed.command]
            code: int = import_module(module).run(parsed)
            sys.stdout.flush()
            return code
        given = vars(parsed)
        if parsed.command != "kvcache":
            check_last_word(arguments, given, "model", *CONFIGS)
        _log_early(parsed.command, given)
        settings = _read(given)
        check_heartbeats(settings.placement)
        _check_hosts(given, settings)
        for role in _roles(given):
            decodes = role is Role.DECODE or parsed.command == Role.MIXED
            check_ranks(settings.engine, settings.model_config.of(role), decodes=decodes)
        grpc_tls(settings.security)
        https_files(settings.http)  # certificates that cannot be used are told of before anything has started
        configured_classes(settings.service)
        if parsed.command in FRONTS:
            from deploy.runtime.key_file import key_file

            key_file(settings.service, os.environ)
        name = settings.cluster.worker_name or parsed.command
        setup_logging(setup_of(settings.logs, parsed.command, name), secrets_of(settings, os.environ))
        for line in told:
            log.info("%s", line)
        with traced(settings.tracing, parsed.command, name):
            return _start(given, settings)
    except (MillraceError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left(sys.stdout.fileno()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the last flush fail
            return 128 + signal.SIGPIPE
        sys.stderr.write(bare_line(str(error)).decode())
        return 2
    except KeyboardInterrupt:
        return 130


def _asked_for(arguments: Sequence[str]) -> str | None:
    """The command, or what stands in its place; None for a flag that is not known: its error goes by all commands."""
    first, *_ = (*arguments, "")
    return None if first.startswith("-") and first not in ("-h", "--help", "--version") else first


def _log_early(command: str, given: Mapping[str, Any]) -> None:
    """Where JSON is asked for, what is wrong with the settings is told in it too."""
    if given.get("log_format", os.environ.get(f"{ENV_PREFIX}LOG_FORMAT")) == JSON:
        setup_logging(LogSetup(name=command, role=command, form=JSON))


def _check_hosts(given: Mapping[str, Any], settings: Settings) -> None:
    """Raises ConfigError for ranks on several hosts that cannot be."""
    if given["command"] == "kvcache":
        return
    if given.get("placement") is not None:
        if settings.hosts.headless:
            raise ConfigError("--headless starts this host's ranks, and --placement services: leave out one of the two")
        return
    workers = sum(given.get(role.value, 0) for role in Role) if given["command"] == "serve" else 1
    check_hosts(settings.hosts, settings.model_config, workers)
    if settings.hosts.headless and given["command"] == "router":
        raise ConfigError("--headless holds experts, and a router none: `millrace serve MODEL --headless`")


def _read(given: Mapping[str, Any]) -> Settings:
    """Our own settings: with --placement, the router's."""
    plan = given.get("placement")
    if plan is None:
        return read_settings(given)
    check_given(given)
    return placed_settings(given, plan, plan.router)


def _roles(given: Mapping[str, Any]) -> list[Role]:
    """Of the workers that our own settings may be for; with --placement each group has settings of its own."""
    if given["command"] == "kvcache" or given.get("placement") is not None:
        return []
    return [Role(given["command"])] if given["command"] in WORKERS else list(Role)


def _reader_has_left(output: int) -> bool:
    """The reader of our output has seen enough, as in `millrace cache ls | head`; it is no other pipe that broke."""
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _start(given: Mapping[str, Any], settings: Settings) -> int:
    import uvloop

    leave_at_once_on_signals()
    command, parent = given["command"], given.get("parent")
    if settings.hosts.headless and command != "kvcache":
        from deploy.rank_host import RankHost

        return RankHost(settings).run()
    if command == "kvcache":
        with loading_modules():
            from deploy.kvcache_process import KvcacheProcess

        return uvloop.run(KvcacheProcess(settings, parent=parent).run())
    if command in WORKERS:
        with loading_modules():
            from deploy.worker.process import WorkerProcess

        return uvloop.run(WorkerProcess(Role(command), settings, parent=parent).run())
    with loading_modules():
        from deploy.children import Children, alike, placed
        from deploy.serve import serve_embedded, serve_front

    children, plan = Children(), given.get("placement")
    if plan is not None:
        children = placed(plan, lambda group: placed_settings(given, plan, group))
    elif command == "serve":
        children = alike(children_of(given), given["kvcache"], settings)
    if command == "serve":
        check_roles({group.role: group.count for group in children.workers}, settings.model_config)
    if given.get("on") == "ray":
        from deploy.serve_on_ray import serve_on_ray

        return serve_on_ray(settings, children, plan.ray if plan is not None else RayTable(), given["address"])
    if given.get("address") is not None:
        raise ValueError("--address is the Ray cluster's: with --on ray")
    if command == "serve" and not children.workers:
        if settings.service.strict_disaggregation:
            raise ValueError("--strict-disaggregation needs workers apart: --prefill N --decode M, say")
        return uvloop.run(serve_embedded(settings))
    return uvloop.run(serve_front(settings, children))


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


def check_roles(children: Mapping[Role, int], model: ModelConfig) -> None:
    """Raises ValueError for settings of workers of one role, where none are started."""
    for role in (Role.PREFILL, Role.DECODE):
        for name in PARALLEL_SIZES:
            own = f"{role}_{name}"
            if not children.get(role) and getattr(model, own) is not None:
                flag = own.replace("_", "-")
                raise ValueError(f"--{flag} is for {role} workers, of which none are started: --prefill N --decode M")


if __name__ == "__main__":
    sys.exit(main())
