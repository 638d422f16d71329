"""A plan as a Compose file, for `docker compose` and `podman-compose` alike. Pure: plan in, text out.

Workers of a group are replicas of one service; each node of the KV pool is a service of its own, as it keeps its name.
"""

from __future__ import annotations

import ipaddress
import re
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
from deploy.placement.rank_hosts import hosts_of
from serving.checkpoint.hub import is_hub_name
from serving.config import HttpConfig
from serving.options import names
from serving.security_config import SecurityConfig

HEAD = """\
# Rendered by `millrace deploy render compose`: change the placement file, not this one.
# MILLRACE_CLUSTER_KEY (among the services) and MILLRACE_API_KEY (of clients) are passed on where they are set.
# MILLRACE_INSECURE=0 has services refuse to start without.
"""
EVERYWHERE = "0.0.0.0"  # noqa: S104 - in the containers' own network
ROUTER_ADDRESS = f"{ROUTER}:{GRPC_PORT}"
HEALTH = {"interval": "5s", "timeout": "5s", "retries": 3, "start_period": "600s"}
TO_ALL = ("MILLRACE_CLUSTER_KEY",)
INSECURE = "MILLRACE_INSECURE"  # reached from this network alone, and from loopback, services may do without keys
TO_READERS = ("HF_TOKEN",)  # a private model of the hub
TMP, CACHE_TMP = "/tmp:mode=1777", f"{CACHE}:mode=1777,exec"  # noqa: S108 - in the container; kernels may be compiled
TLS = tuple(name for name in names(SecurityConfig) if name.startswith("grpc_tls"))
KEYS, PEPPER = "api_keys_file", "key_pepper_file"
PEPPER_SECRET, KEYS_FOLDER = "key-pepper", "/api-keys"
VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
IMAGE_NAME = re.compile(r"[\w./:@-]+", re.ASCII)


def render(plan: DeploymentPlan, image: ImageSource) -> str:
    """The Compose file. Raises ValueError for what Compose cannot have, or would read as something else."""
    import yaml  # on use: other commands start sooner without it

    services = {ROUTER: _router(plan, image)}
    services |= dict(_nodes(plan, image))
    services |= {group.name: _worker(plan, group, image) for group in plan.workers}
    data: dict[str, Any] = {"name": "millrace", "services": services}
    if (pepper := plan.router.settings.get(PEPPER)) is not None:
        data["secrets"] = {PEPPER_SECRET: {"file": _here(pepper, PEPPER)}}
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
    published = _published(host, "[router] host")
    certificate = settings.pop("ssl_certfile", None)
    keys = _keys(settings)
    listens = [f"--host={EVERYWHERE}", f"--port={API_PORT}", f"--grpc-host={EVERYWHERE}", f"--grpc-port={GRPC_PORT}"]
    service = _service(plan, plan.router, image, ["router", *_model(plan), *listens, *flags_of(settings)])
    service["environment"] += ["MILLRACE_API_KEY", *TO_READERS]
    if certificate is not None:  # not as a flag: the health check has to know it too
        service["environment"] += [f"MILLRACE_SSL_CERTFILE={_literal(certificate)}"]
    if settings.get("ssl_cert_reqs") == "2":  # the health check shows no certificate: it asks beside the API
        service["environment"] += [f"MILLRACE_METRICS_PORT={STATUS_PORT}"]
    service["ports"] = [f"${{MILLRACE_PUBLISH:-{published}:{port}}}:{API_PORT}"]
    if keys:
        service["secrets"] = [PEPPER_SECRET]
    return service | _volumes(_model_volumes(plan) + keys)


def _keys(settings: dict[str, Any]) -> list[str]:
    """The mount of the keys file's folder, where there is one; `settings` then name what is seen in the container.

    A folder, since the file is replaced as a whole when keys change: mounted alone it would stay what it was. The
    pepper never changes, and is a secret as Compose has them.
    """
    keys, pepper = settings.get(KEYS), settings.get(PEPPER)
    if keys is None and pepper is None:
        return []
    if keys is None or pepper is None:
        raise ValueError(f"[router] {KEYS} and {PEPPER} go together: a container has no pepper of its own")
    path = PurePosixPath(keys)
    if path.parent.name in ("", "..") or (
        len(path.parts) == 2 and keys.startswith("~")
    ):  # a whole project, home or disk
        raise ValueError(f"[router] {KEYS} = {keys!r}: its folder is mounted; give it one of its own, keys/{path.name}")
    settings |= {KEYS: f"{KEYS_FOLDER}/{path.name}", PEPPER: f"/run/secrets/{PEPPER_SECRET}"}
    return [f"{_here(str(path.parent), KEYS)}:{KEYS_FOLDER}:ro"]


def _worker(plan: DeploymentPlan, group: ServiceGroup, image: ImageSource) -> dict[str, Any]:
    reports = [f"--routers={ROUTER_ADDRESS}", f"--grpc-host={EVERYWHERE}"]
    inside, ports = dict(group.settings), list[str]()
    if (hosts := hosts_of(group)) is not None:
        address = _published(hosts.data_parallel_address, f"[[workers]] {group.name}: data_parallel_address")
        ports = [f"{address}:{hosts.data_parallel_rpc_port}:{hosts.data_parallel_rpc_port}"]
        inside["data_parallel_address"] = EVERYWHERE
    service = _service(plan, group, image, [group.kind, *_model(plan), *reports, *flags_of(inside)])
    service["environment"] += [f"MILLRACE_METRICS_PORT={STATUS_PORT}", *TO_READERS]
    if ports:
        service["ports"] = ports
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
    if VOLUME.fullmatch(disk):
        return f"{disk}-{node}:{DISK}"
    if "/" not in disk:
        raise ValueError(f"[kvcache] disk = {disk!r}: name a volume, of letters and digits, or a path with a slash")
    return f"{_here(disk, 'disk')}/{node}:{DISK}"


def _service(plan: DeploymentPlan, group: ServiceGroup, image: ImageSource, command: list[str]) -> dict[str, Any]:
    """What all have: as little of the machine as they need, and time to drain."""
    if not IMAGE_NAME.fullmatch(image.name):
        raise ValueError(f"--image {image.name!r} is no name of an image, such as localhost/millrace:cpu")
    service: dict[str, Any] = {"image": f"${{MILLRACE_IMAGE:-{image.name}}}"}
    if image.context is not None:
        target = {"target": "demo"} if plan.model is None else {}
        service["build"] = {"context": _literal(image.context), "dockerfile": CONTAINERFILE, **target}
    seconds = float(group.settings.get("shutdown_timeout", HttpConfig.shutdown_timeout))
    return service | {
        "command": [_literal(word) for word in command],
        "environment": [*TO_ALL, _insecure(group)],
        "read_only": True,
        "tmpfs": [TMP, CACHE_TMP],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{grace_seconds(seconds)}s",
        "healthcheck": {"test": ["CMD", "python", "-m", "deploy.image.health"], **HEALTH},
    }


def _insecure(group: ServiceGroup) -> str:
    """Permitted by default, but for what is published elsewhere, and for those who have set up TLS."""
    hosts = hosts_of(group)
    host = group.settings.get("host", HttpConfig.host) if hosts is None else hosts.data_parallel_address
    closed = not ipaddress.ip_address(host).is_loopback or any(name in group.settings for name in TLS)
    return f"{INSECURE}=${{{INSECURE}:-{int(not closed)}}}"


def _model(plan: DeploymentPlan) -> list[str]:
    return [] if plan.model is None else [plan.model]


def _model_volumes(plan: DeploymentPlan) -> list[str]:
    """A model of this machine is seen in the containers where it is here; one of the hub is fetched once for all."""
    if plan.model is None:
        return []
    if plan.model.startswith("/"):
        path = _mounted(str(PurePosixPath(plan.model)), "model")
        return [f"{path}:{path}:ro"]
    if plan.model.startswith((".", "~")) or plan.model.endswith(".gguf") or not is_hub_name(plan.model):
        raise ValueError(f"model = {plan.model!r}: name it by its whole path, which is its path in the containers too")
    return [f"hub:{HUB}"]


def _published(host: str, key: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(
            f"{key} = {host!r}: a platform publishes at an address, not a name, such as 127.0.0.1"
        ) from None
    return f"[{address}]" if address.version == 6 else str(address)


def _literal(text: str) -> str:
    """A text in which Compose puts no variable."""
    return text.replace("$", "$$")


def _here(path: str, key: str) -> str:
    """A path of this machine as Compose takes it: one from its own folder on begins with a dot."""
    return _mounted(path if path.startswith((".", "/", "~")) else f"./{path}", key)


def _mounted(path: str, key: str) -> str:
    if ":" in path:
        raise ValueError(f"{key} = {path!r}: Compose ends a path at a colon; name one without")
    return _literal(path)


def _volumes(volumes: list[str]) -> dict[str, Any]:
    return {"volumes": volumes} if volumes else {}
