"""A plan as a Compose file, for `docker compose` and `podman-compose` alike. Pure: plan in, text out.

Workers of a group are replicas of one service; each node of the KV pool is a service of its own, as it keeps its name.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from deploy.placement.image import (
    API_PORT,
    CACHE,
    CONTAINERFILE,
    DISK,
    GRPC_PORT,
    HUB,
    STATUS_PORT,
    ImageSource,
    grace_seconds,
)
from deploy.placement.plan import ROUTER, DeploymentPlan, ServiceGroup, flags_of
from serving.config import HttpConfig

HEAD = """\
# Rendered by `millrace deploy render compose`: change the placement file, not this one.
# MILLRACE_CLUSTER_KEY (among the services) and MILLRACE_API_KEY (of clients) are passed on where they are set.
"""
EVERYWHERE = "0.0.0.0"  # noqa: S104 - in the containers' own network
ROUTER_ADDRESS = f"{ROUTER}:{GRPC_PORT}"
HEALTH = {"interval": "5s", "timeout": "5s", "retries": 3, "start_period": "600s"}
TO_ALL = ("MILLRACE_CLUSTER_KEY",)
TO_READERS = ("HF_TOKEN",)  # a private model of the hub
TMP, CACHE_TMP = "/tmp:mode=1777", f"{CACHE}:mode=1777,exec"  # noqa: S108 - in the container; kernels may be compiled


def render(plan: DeploymentPlan, image: ImageSource) -> str:
    """The Compose file. Raises ValueError for a port that is no fixed one."""
    import yaml  # on use: other commands start sooner without it

    services = {ROUTER: _router(plan, image)}
    services |= dict(_nodes(plan, image))
    services |= {group.name: _worker(plan, group, image) for group in plan.workers}
    data: dict[str, Any] = {"name": "millrace", "services": services}
    volumes = sorted({volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())})
    named: dict[str, Any] = {volume: {} for volume in volumes if "/" not in volume}
    if named:
        data["volumes"] = named
    text: str = yaml.safe_dump(data, sort_keys=False, width=120)
    return HEAD + text


def _router(plan: DeploymentPlan, image: ImageSource) -> dict[str, Any]:
    settings = dict(plan.router.settings)
    port = int(settings.pop("port", API_PORT))
    if port == 0:
        raise ValueError("[router] port = 0: a platform has to know the port; name one")
    host = settings.pop("host", "127.0.0.1")  # of the machine; in the container it listens to all of its network
    published = f"[{host}]" if ":" in host else host
    listens = [f"--host={EVERYWHERE}", f"--port={API_PORT}", f"--grpc-host={EVERYWHERE}", f"--grpc-port={GRPC_PORT}"]
    service = _service(plan, plan.router, image, ["router", *_model(plan), *listens, *flags_of(settings)])
    service["environment"] += ["MILLRACE_API_KEY", *TO_READERS]
    service["ports"] = [f"${{MILLRACE_PUBLISH:-{published}:{port}}}:{API_PORT}"]
    return service | _volumes(_model_volumes(plan))


def _worker(plan: DeploymentPlan, group: ServiceGroup, image: ImageSource) -> dict[str, Any]:
    reports = [f"--routers={ROUTER_ADDRESS}", f"--grpc-host={EVERYWHERE}"]
    service = _service(plan, group, image, [group.kind, *_model(plan), *reports, *flags_of(group.settings)])
    service["environment"] += [f"MILLRACE_METRICS_PORT={STATUS_PORT}", *TO_READERS]
    if group.count > 1:
        service["deploy"] = {"replicas": group.count}
    return service | {"depends_on": [ROUTER]} | _volumes(_model_volumes(plan))


def _nodes(plan: DeploymentPlan, image: ImageSource) -> list[tuple[str, dict[str, Any]]]:
    """Each with its own name, by which keys are shared out, and its own disk."""
    if plan.nodes is None:
        return []
    found = []
    for number in range(plan.nodes.count):
        name = plan.nodes.name if plan.nodes.count == 1 else f"{plan.nodes.name}-{number}"
        settings = dict(plan.nodes.settings)
        disk = settings.pop("disk", None)
        reports = [f"--routers={ROUTER_ADDRESS}", f"--grpc-host={EVERYWHERE}", f"--grpc-port={GRPC_PORT}"]
        own = [f"--worker-name={name}", *([f"--disk={DISK}"] if disk else [])]
        service = _service(plan, plan.nodes, image, ["kvcache", *reports, *own, *flags_of(settings)])
        service["environment"] += [f"MILLRACE_METRICS_PORT={STATUS_PORT}"]
        volumes = [_disk(disk, name)] if disk else []
        found.append((name, service | {"depends_on": [ROUTER]} | _volumes(volumes)))
    return found


def _disk(disk: str, node: str) -> str:
    """A folder of this machine, or by a plain name, a volume; one for each node."""
    if "/" not in disk:
        return f"{disk}-{node}:{DISK}"
    return f"{disk if disk.startswith(('.', '/', '~')) else './' + disk}/{node}:{DISK}"


def _service(plan: DeploymentPlan, group: ServiceGroup, image: ImageSource, command: list[str]) -> dict[str, Any]:
    """What all have: as little of the machine as they need, and time to drain."""
    service: dict[str, Any] = {"image": f"${{MILLRACE_IMAGE:-{image.name}}}"}
    if image.context is not None:
        target = {"target": "demo"} if plan.model is None else {}
        service["build"] = {"context": image.context, "dockerfile": CONTAINERFILE, **target}
    seconds = float(group.settings.get("shutdown_timeout", HttpConfig.shutdown_timeout))
    return service | {
        "command": [word.replace("$", "$$") for word in command],
        "environment": list(TO_ALL),
        "read_only": True,
        "tmpfs": [TMP, CACHE_TMP],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{grace_seconds(seconds)}s",
        "healthcheck": {"test": ["CMD", "python", "-m", "deploy.image.health"], **HEALTH},
    }


def _model(plan: DeploymentPlan) -> list[str]:
    return [] if plan.model is None else [plan.model]


def _model_volumes(plan: DeploymentPlan) -> list[str]:
    """A model of this machine is seen in the containers where it is here; one of the hub is fetched once for all."""
    if plan.model is None:
        return []
    if plan.model.startswith("/"):
        return [f"{PurePosixPath(plan.model)}:{PurePosixPath(plan.model)}:ro"]
    if plan.model.startswith((".", "~")) or plan.model.endswith(".gguf"):
        raise ValueError(f"model = {plan.model!r}: name it by its whole path, which is its path in the containers too")
    return [f"hub:{HUB}"]


def _volumes(volumes: list[str]) -> dict[str, Any]:
    return {"volumes": volumes} if volumes else {}
