"""A deployment on Ray as a Ray Serve application: `serve run deploy.on_ray.serve_app:build placement=placement.toml`.

Its one replica runs the router as a child process and passes requests on to it. Only Ray Serve imports this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.on_ray.cluster import SLACK
from deploy.on_ray.relay import RouterRelay
from deploy.on_ray.router_process import RouterProcess
from deploy.placement.given import check_plan
from deploy.placement.rank_hosts import refuse_hosts
from deploy.placement.reader import read_placement
from serving.config import HttpConfig

ARGUMENTS = ("placement", "placement_toml", "insecure")
MOST = 100_000  # requests at once: the router has limits of its own, and says so in its own words
HEALTH_SECONDS = 2.0


class RouterReplica:
    """The replica: Ray Serve replaces it once the router's process has ended."""

    app: RouterRelay  # Ray Serve sets it

    async def check_health(self) -> None:
        router = self.app.router
        assert isinstance(router, RouterProcess)
        router.check()


def build(arguments: Mapping[str, Any]) -> Any:
    """The application. `placement` is a file's path, or `placement_toml` its text; `insecure` permits it without keys.

    Raises ValueError for arguments there are not, and for a placement that could not be served.
    """
    text, name = _placement(arguments)
    plan = read_placement(text, name)
    check_plan(plan)
    refuse_hosts(plan, "Ray")
    if "ssl_certfile" in plan.router.settings:
        raise ValueError("[router] ssl_certfile: Ray Serve has the port, and certificates of its own (http_options)")
    insecure = str(arguments.get("insecure", "false")).lower() in ("1", "true")
    drain = float(plan.router.settings.get("shutdown_timeout", HttpConfig.shutdown_timeout))
    serve = importlib.import_module("ray.serve")
    replica = serve.ingress(RouterRelay(RouterProcess(text, insecure=insecure)))(RouterReplica)
    return serve.deployment(
        name="router",
        num_replicas=1,
        max_ongoing_requests=MOST,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=2 * drain + 2 * SLACK,  # of requests here, and then of the services
        ray_actor_options={"num_cpus": 1},
    )(replica).bind()


def _placement(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """The text, and its name for errors."""
    for name in arguments:
        if name not in ARGUMENTS:
            raise ValueError(f"unknown argument {name!r}; known are {', '.join(ARGUMENTS)}")
    path, text = arguments.get("placement"), arguments.get("placement_toml")
    if (path is None) == (text is None):
        raise ValueError("the application needs placement=FILE, or placement_toml with the text of one")
    if text is not None:
        return str(text), "placement_toml"
    try:
        return Path(str(path)).read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"placement={path}: {error}") from None
