"""`millrace scale GROUP=N …`: how many services of a group a deployment on Ray has, from now on.

It leaves the wish with the deployment's own actor, and waits until the router's process has made it true.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from deploy.on_ray.actors import Deployed
from deploy.on_ray.cluster import CALL_SECONDS, DEPLOYMENT
from deploy.on_ray.library import connect
from deploy.placement.ray_table import RayTable
from serving.errors import Unavailable

POLL_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace scale`."""
    parser.add_argument(
        "counts",
        nargs="*",
        type=_count,
        metavar="GROUP=N",
        help="a group, such as prefill, and how many it is to have; without any, print what there is",
    )
    parser.add_argument("--name", default=RayTable().name, help="of the deployment (default: millrace)")
    parser.add_argument("--address", metavar="HOST:PORT", help="of the Ray cluster (default: $RAY_ADDRESS, else auto)")
    parser.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="seconds to wait for it (default: 600)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Scale, wait, print; the exit code: 0 once all is as it was asked for. Raises MillraceError, ValueError."""
    wanted = dict(arguments.counts)
    if len(wanted) < len(arguments.counts):
        raise ValueError("a group is named twice: say once how many it is to have")
    ray = connect(arguments.address, arguments.name, logs=False)
    errors = ray.exceptions
    try:
        holder = _holder(ray, arguments.name)
        command = _ask(ray, holder, wanted) if wanted else 0
        deadline = time.monotonic() + arguments.timeout
        deployed, told = _deployed(ray, holder, deadline), ""
        while wanted and not is_answered(deployed, command):
            if time.monotonic() > deadline:
                raise Unavailable(f"not within {arguments.timeout:g} s; there are {_shown(deployed)}")
            if (shown := _shown(deployed)) != told:
                told = shown
                print(f"waiting: {told}", file=sys.stderr, flush=True)
            time.sleep(POLL_SECONDS)
            deployed = _deployed(ray, holder, deadline)
    except errors.RayError as error:
        raise Unavailable(f"the deployment {arguments.name!r} has ended: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()
    if any(deployed.counts.get(group) != count for group, count in wanted.items()):
        raise Unavailable(f"another command has changed it since; there are {_shown(deployed)}")
    sys.stdout.write(f"{_shown(deployed)}\n")
    return 0


def _count(text: str) -> tuple[str, int]:
    group, _, number = text.partition("=")
    if not group or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form prefill=3")
    return group, int(number)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # nor NaN, by which no wait would end
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0")
    return seconds


def _holder(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(DEPLOYMENT, namespace=name)
    except ValueError:
        raise ValueError(f"no deployment {name!r} runs on this Ray cluster") from None


def _ask(ray: Any, holder: Any, wanted: Mapping[str, int]) -> int:
    """Leave the wish; the command's number. Raises ValueError for one that cannot be granted."""
    try:
        command: int = ray.get(holder.scale.remote(wanted), timeout=CALL_SECONDS)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise ValueError(str(error.cause)) from None
        raise
    except ray.exceptions.GetTimeoutError:
        raise Unavailable(
            "no answer from the cluster: the command may have been taken, or not; give it again"
        ) from None
    return command


def _deployed(ray: Any, holder: Any, deadline: float) -> Deployed:
    """What the router's process last said; asked again until the deadline where the answer does not come."""
    while True:
        try:
            found: Deployed | None = ray.get(holder.deployed.remote(), timeout=CALL_SECONDS)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            if time.monotonic() > deadline:
                raise
        else:
            return found or Deployed(counts={}, services={})


def is_answered(deployed: Deployed, command: int) -> bool:
    """True once that command was taken, and all services run. What is told of an earlier one is no answer."""
    return deployed.scaled >= command and all(state == "running" for state in deployed.services.values())


def _shown(deployed: Deployed) -> str:
    counts = " ".join(f"{name}={count}" for name, count in deployed.counts.items())
    others = ", ".join(f"{name} {state}" for name, state in sorted(deployed.services.items()) if state != "running")
    return f"{counts} ({others})" if others else counts
