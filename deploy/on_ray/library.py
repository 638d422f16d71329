"""The Ray library, imported on use: only those who deploy on Ray install it."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

log = logging.getLogger(__name__)

OLDEST = (2, 50)


def the_ray_library() -> Any:
    """The module `ray`. Raises ValueError, saying what to install, where there is none or one too old."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else every start warns of a coming default
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ValueError(f"Ray is not installed ({error}): pip install 'millrace[ray]'") from None
    found = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(f"Ray {ray.__version__} is older than {oldest}: pip install 'millrace[ray]'")
    return ray


def own_niceness() -> dict[str, Any]:
    """The runtime environment of an actor to whose niceness Ray adds this process's, if that is not negative.

    Ray would add 15: a thirtieth of a core beside a process that computes.
    """
    return {"env_vars": {"RAY_worker_niceness": str(max(0, os.getpriority(os.PRIO_PROCESS, 0)))}}


def connect(address: str | None, namespace: str, *, logs: bool) -> Any:
    """The library, connected to the cluster at `address` (None: $RAY_ADDRESS, else the one of this host).

    With `logs`, what workers log is seen on our standard error too. Raises ValueError where there is no such cluster.
    """
    ray = the_ray_library()
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in wanted:
        raise ValueError(
            f"--address {wanted}: run millrace on a node of the cluster, with --address auto or HOST:PORT of its head;"
            " `ray job submit -- millrace serve --on ray` runs it there"
        )
    try:
        ray.init(address=wanted, namespace=namespace, log_to_driver=logs, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        line = str(error).strip().splitlines()[0]
        told = f"no Ray cluster at {wanted} ({line}): start one with `ray start --head`"
        raise ValueError(
            f"{told}; one that asks for a token wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here"
        ) from error
    return ray
