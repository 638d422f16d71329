"""A plan as values of the Helm chart in deploy/helm/millrace. Pure: plan in, text out.

It knows nothing of the cluster: its claims, Secrets, nodes and doors belong in a values file beside this one.
"""

from __future__ import annotations

from math import ceil
from pathlib import PurePosixPath
from typing import Any

from deploy.placement.image import API_PORT, ImageSource, grace_seconds
from deploy.placement.plan import DeploymentPlan, ServiceGroup
from deploy.placement.rank_hosts import OF_HOSTS, pods_of
from deploy.placement.reservation import processes_of
from serving.checkpoint.hub import is_hub_name
from serving.config import HttpConfig, KvCacheConfig, ModelConfig
from serving.options import build, parse_bytes

HEAD = """\
# Rendered by `millrace deploy render helm`, for deploy/helm/millrace: change the placement file, not this one.
# What the cluster has (claims, Secrets, GPUs' nodes, an Ingress) goes into a file of its own, given to helm after this.
"""
CLAIM, CERTIFICATE = "models", "millrace-tls"  # a PersistentVolumeClaim, and a Secret of type kubernetes.io/tls
GRPC_CERTIFICATE, API_KEYS = "millrace-grpc-tls", "millrace-api-keys"  # Secrets: tls.crt … ca.crt; keys.jsonl, pepper
GRPC_FILES = ("grpc_tls_certfile", "grpc_tls_keyfile", "grpc_tls_ca")
GRPC_NAME = "grpc_tls_server_name"
LONGEST_NAME = 20  # of a group, that the names of its pods are not cut off
GIB = 1 << 30


def render(plan: DeploymentPlan, image: ImageSource) -> str:
    """The values file. Raises ValueError for what the chart cannot have."""
    import yaml  # on use: other commands start sooner without it

    if image.context is not None:
        raise ValueError("--build-context: a cluster takes images from registries; build it, push it, name it")
    for group in plan.groups:
        grace_seconds(float(group.settings.get("shutdown_timeout", HttpConfig.shutdown_timeout)))  # a number
    data: dict[str, Any] = {"image": _image(image.name), "model": cluster_model(plan.model)}
    data |= _grpc_tls(plan) | _router(plan.router)
    data["workers"] = [_worker(group) for group in plan.workers]
    if plan.nodes is not None:
        data["kvcache"] = _nodes(plan.nodes)
    text: str = yaml.safe_dump(data, sort_keys=False, width=120)
    return HEAD + text


def _image(name: str) -> dict[str, str]:
    repository, at, digest = name.partition("@")
    if at:
        return {"repository": repository, "digest": digest}
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # of a registry's port
        raise ValueError(f"--image {name!r} has neither a tag nor a digest, such as registry.example.com/millrace:cpu")
    return {"repository": repository, "tag": tag}


def cluster_model(model: str | None) -> dict[str, Any]:
    """A path is in the claim `models`, the root of which is mounted where the path's last part lies.

    Raises ValueError for a path that containers could not have.
    """
    if model is None:
        return {"name": ""}
    if model.startswith("/"):
        path = PurePosixPath(model)
        if len(path.parts) < 3:
            raise ValueError(f"model = {model!r}: a volume is mounted at the folder above it; let it have one")
        return {
            "name": str(path),
            "volume": {"persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}},
            "mountPath": str(path.parent),
        }
    if model.startswith((".", "~")) or model.endswith(".gguf") or not is_hub_name(model):
        raise ValueError(f"model = {model!r}: name it by its whole path, which is its path in the containers too")
    return {"name": model}


def _grpc_tls(plan: DeploymentPlan) -> dict[str, Any]:
    """All services have the certificates of one Secret: they take part in TLS between them all or none."""
    with_files = [any(name in group.settings for name in GRPC_FILES) for group in plan.groups]
    names = {str(group.settings.get(GRPC_NAME, "")) for group in plan.groups}
    if not any(with_files) and names == {""}:
        return {}
    if not all(with_files) or len(names) > 1:
        raise ValueError("grpc_tls_certfile and the like: the same for every service; write them under [common]")
    return {"grpcTls": {"secretName": GRPC_CERTIFICATE, "serverName": names.pop()}}


def _settings(group: ServiceGroup) -> dict[str, Any]:
    """Those that are left to the group: certificates of gRPC are said for all."""
    return {name: value for name, value in group.settings.items() if name not in (*GRPC_FILES, GRPC_NAME)}


def _router(router: ServiceGroup) -> dict[str, Any]:
    """`host` is of a machine: in a cluster a Service has the address. Files are in Secrets."""
    settings = {name: value for name, value in _settings(router).items() if name != "host"}
    port = int(settings.pop("port", API_PORT))
    if port == 0:
        raise ValueError("[router] port = 0: a platform has to know the port; name one")
    secure = settings.pop("ssl_certfile", None) is not None
    settings.pop("ssl_keyfile", None)
    made: dict[str, Any] = {"tls": {"secretName": CERTIFICATE}} if secure else {}
    if secure and "ssl_ca_certs" in settings:
        settings["ssl_ca_certs"] = "/tls/ca.crt"
    if settings.pop("api_keys_file", None) is not None:
        settings.pop("key_pepper_file", None)
        made["keys"] = {"file": {"existingSecret": API_KEYS}}
    return made | {"router": {"service": {"port": port}, "settings": settings}}


def _worker(group: ServiceGroup) -> dict[str, Any]:
    if len(group.name) > LONGEST_NAME:
        raise ValueError(f"name = {group.name!r}: names of pods begin with it; use at most {LONGEST_NAME} letters")
    made: dict[str, Any] = {"name": group.name, "role": group.kind, "replicas": group.count}
    if (pods := pods_of(group)) > 1:
        made["hosts"] = pods
        longest = LONGEST_NAME - len(f"-host-{pods - 1}")
        if len(group.name) > longest:
            raise ValueError(
                f"name = {group.name!r}: pods of its hosts are called {group.name}-host-{pods - 1}, and have room for"
                f" {LONGEST_NAME} letters; use at most {longest}"
            )
    if str(group.settings.get("device", "cpu")).startswith("cuda"):
        model = build(ModelConfig, group.settings, {}, {}).of(group.kind)
        made["resources"] = {"limits": {"nvidia.com/gpu": processes_of(model)}}
    return made | {"settings": {name: value for name, value in _settings(group).items() if name not in OF_HOSTS}}


def _nodes(nodes: ServiceGroup) -> dict[str, Any]:
    """A claim is a tenth larger than the blocks on it, a pod's memory 2 GiB larger than those in it."""
    settings = _settings(nodes)
    made: dict[str, Any] = {"replicas": nodes.count}
    if settings.pop("disk", None) is not None:
        size = ceil(_bytes(settings.get("disk_size", KvCacheConfig.disk_size)) * 1.1 / GIB)
        made["disk"] = {"enabled": True, "size": f"{size}Gi"}
    memory = f"{ceil(_bytes(settings.get('ram', KvCacheConfig.ram)) / GIB) + 2}Gi"
    made["resources"] = {"requests": {"memory": memory}, "limits": {"memory": memory}}
    return made | {"settings": settings}


def _bytes(size: str | int) -> int:
    return size if isinstance(size, int) else parse_bytes(size)
