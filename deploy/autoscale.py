"""`millrace autoscale`: reads limits and where workers run, and keeps the loop going until it is told to leave.

It decides nothing; what each place does lies behind Actuator and ControllerLock.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from deploy.admin import Server, add_server_arguments
from deploy.autoscale_places import add_place_arguments, by_kubernetes, by_router
from deploy.autoscaler.actuator import Actuator, ActuatorError, FleetWorker
from deploy.autoscaler.controller import AutoscaleController, Wiring
from deploy.autoscaler.limits import MOST_WORKERS, AutoscalerLimits, RoleLimits
from deploy.autoscaler.lock import ControllerLock, FileLock
from deploy.autoscaler.observation import read_sample
from deploy.runtime.signals import on_signals
from serving.autoscaler_metrics import AutoscalerMetrics
from serving.config import HttpConfig
from serving.log_config import JSON, TEXT
from serving.log_lines import LogSetup
from serving.logs import setup_logging
from serving.messages import Role

log = logging.getLogger(__name__)

NUMBERS = {
    "attainment": ("SHARE", "of requests that are to meet each objective"),
    "scale_up": ("LOAD", "of a role, above which it needs more"),
    "scale_down": ("LOAD", "of a role with one worker fewer, below which it has one too many"),
    "scale_up_window": ("S", "seconds that a role must have been short"),
    "scale_down_window": ("S", "seconds that a role must have had one too many"),
    "cool_down": ("S", "seconds after a change in which nothing is done"),
    "interval": ("S", "seconds between two looks"),
}
"""Fields of AutoscalerLimits that are flags of the same name."""

Place = Callable[[argparse.Namespace, Server], tuple[Actuator, ControllerLock]]


class HttpSource:
    """GET /v1/workers of one router, beside the event loop (deploy.autoscaler.controller.RouterSource)."""

    def __init__(self, server: Server):
        self.server = server

    async def read(self) -> Any:
        return await asyncio.to_thread(self.server.get, "v1", "workers")


class WatchedFleet:
    """The workers as the router knows them, where nobody may change them: what --dry-run needs (an Actuator)."""

    def __init__(self, server: Server):
        self.server = server

    async def workers(self) -> Sequence[FleetWorker]:
        told = read_sample(await HttpSource(self.server).read()).workers
        return [
            FleetWorker(each.name, each.role, "draining" if each.state == "draining" else "ready")
            for each in told
            if each.state != "suspect"
        ]

    async def add(self, role: Role) -> None:
        raise ActuatorError("nothing is changed here: say with --on where the workers run, or use --dry-run")

    async def drain(self, worker_id: str) -> None:
        await self.add(Role.MIXED)

    async def flip(self, worker_id: str, role: Role) -> None:
        await self.add(role)


def watched(arguments: argparse.Namespace, server: Server) -> tuple[Actuator, ControllerLock]:
    """The lock is one of this host and user for this router's address."""
    name = sha256(server.address.encode()).hexdigest()[:16]
    path = arguments.lock_file or Path(tempfile.gettempdir()) / f"millrace-autoscale-{os.getuid()}-{name}.lock"
    return WatchedFleet(server), FileLock(path)


PLACES: Mapping[str, Place] = {"watch": watched, "router": by_router, "kubernetes": by_kubernetes}
"""Where workers run, by the word of --on. `watch` changes nothing."""


def placed(arguments: argparse.Namespace, server: Server) -> tuple[Actuator, ControllerLock, bool]:
    """What acts, the lock of who does, and whether it only says what it would do: then it keeps nobody from acting.

    Raises ValueError.
    """
    actuator, lock = PLACES[arguments.on](arguments, server)
    if arguments.dry_run:
        _, lock = watched(arguments, server)
    return actuator, lock, arguments.dry_run or arguments.on == "watch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace autoscale`."""
    add_server_arguments(parser)
    parser.add_argument("--on", choices=PLACES, default="watch", help="where the workers run (default: watch)")
    add_place_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="log what would be done and what it would gain")
    for role in Role:
        parser.add_argument(
            f"--{role}", type=role_limits, default=RoleLimits(), metavar="MIN:MAX", help=f"{role} workers (default: 1:)"
        )
    parser.add_argument("--most-workers", type=int, default=MOST_WORKERS, metavar="N", help="workers of all roles")
    parser.add_argument("--no-flips", action="store_true", help="only add and drain workers")
    plain = AutoscalerLimits()
    for name, (metavar, text) in NUMBERS.items():
        default = getattr(plain, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=default, metavar=metavar, help=f"{text} (default: {default:g})")
    parser.add_argument(
        "--lock-file", type=Path, metavar="FILE", help="held by the one autoscaler that acts, on a host"
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics and /health there")
    parser.add_argument("--host", default=HttpConfig().host, help=f"to serve them on (default: {HttpConfig().host})")
    parser.add_argument("--log-format", choices=(TEXT, JSON), default=TEXT, help="of its log lines (default: text)")


def role_limits(text: str) -> RoleLimits:
    """`2:8`, `2:` or `:8`. Raises argparse.ArgumentTypeError."""
    least, colon, most = text.partition(":")
    try:
        if not colon:
            raise ValueError("two numbers with a colon")
        return RoleLimits(int(least or 1), int(most or MOST_WORKERS))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MIN:MAX, such as 1:4: {error}") from None


def limits_of(arguments: argparse.Namespace) -> AutoscalerLimits:
    """Raises ValueError."""
    given = vars(arguments)
    return AutoscalerLimits(
        roles={role: given[role.value] for role in Role},
        flips=not arguments.no_flips,
        most_workers=arguments.most_workers,
        **{name: given[name] for name in NUMBERS},
    )


def run(arguments: argparse.Namespace) -> int:
    """Until a signal; the process's exit code. Raises MillraceError, ValueError, OSError."""
    limits, server = limits_of(arguments), Server.of(arguments)
    setup_logging(LogSetup(name="autoscaler", role="autoscaler", form=arguments.log_format))
    actuator, lock, dry_run = placed(arguments, server)
    wiring = Wiring(source=HttpSource(server), actuator=actuator, lock=lock, clock=time.monotonic, sleep=asyncio.sleep)
    asyncio.run(serve(AutoscaleController(wiring, limits, dry_run=dry_run), arguments.host, arguments.metrics_port))
    return 0


async def serve(controller: AutoscaleController, host: str, metrics_port: int | None) -> None:
    """The loop, and its metrics where a port is given, until a signal."""
    async with AsyncExitStack() as stack:
        if metrics_port is not None:
            from deploy.runtime.http_server import open_status_door
            from serving.api.status import status_app

            app = status_app(health=controller.health, metrics_text=AutoscalerMetrics(controller.figures).text)
            await open_status_door(app, HttpConfig(host=host), metrics_port, stack)
        looping = asyncio.create_task(controller.run(), name="autoscale")
        on_signals(looping.cancel)
        with suppress(asyncio.CancelledError):
            await looping
