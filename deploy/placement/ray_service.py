"""A plan as a RayService for KubeRay: a Ray cluster with room for all services, and the Ray Serve application on it.

Pure: plan in, text out. It knows nothing of the cluster: claims, GPUs' nodes and the like are patched in.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from math import ceil
from typing import Any

from deploy.placement.helm import cluster_model
from deploy.placement.image import API_PORT, ImageSource, grace_seconds
from deploy.placement.plan import KVCACHE, DeploymentPlan, ServiceGroup
from deploy.placement.rank_hosts import refuse_hosts
from deploy.placement.ray_table import RayReservation
from deploy.placement.reservation import node_bundle, worker_bundle
from serving.config import EngineConfig, HttpConfig, ModelConfig
from serving.options import build

HEAD = """\
# Rendered by `millrace deploy render ray`, for KubeRay 1.5.1 or newer: change the placement file, not this one.
# The Secret `millrace` has the clients' key (api-key) and, for private models of the hub, hf-token. What is the
# cluster's own (another claim than `models`, GPUs' nodes, an Ingress before the Service NAME-serve-svc) is patched in.
"""
ROUTER_RESOURCE = "millrace-router"  # has the router on the head's pod, beside which no worker computes
HEAD_RESOURCES = {"cpu": "2", "memory": "8Gi"}
OBJECT_STORE = "200000000"  # bytes: nothing of ours is in Ray's object store
PORTS = {"serve": API_PORT, "gcs-server": 6379, "dashboard": 8265, "client": 10001}
WORKER_NICENESS = {"name": "RAY_worker_niceness", "value": "0"}  # that Ray adds to an actor's, in place of 15
SECRET = "millrace"  # noqa: S105 - a Secret's name
API_KEY, HUB_TOKEN = ("MILLRACE_API_KEY", "api-key"), ("HF_TOKEN", "hf-token")
SERVICE_NAME = re.compile(r"[a-z][a-z0-9-]{0,46}")  # that of a Service, with room for what KubeRay adds
LONGEST = 2**31 - 1  # seconds that KubeRay waits
IMAGE_NAME = re.compile(r"[\w./:@-]+", re.ASCII)
Bundle = Mapping[str, float]


def render(plan: DeploymentPlan, image: ImageSource) -> str:
    """The manifest. Raises ValueError for what KubeRay cannot have."""
    import yaml  # on use: other commands start sooner without it

    if image.context is not None:
        raise ValueError("--build-context: a cluster takes images from registries; build it, push it, name it")
    if not IMAGE_NAME.fullmatch(image.name):
        raise ValueError(f"--image {image.name!r} is no name of an image, such as registry.example.com/millrace:ray")
    if "ssl_certfile" in plan.router.settings:
        raise ValueError("[router] ssl_certfile: Ray Serve has the port; end TLS at the Ingress")
    refuse_hosts(plan, "Ray")
    if not SERVICE_NAME.fullmatch(plan.ray.name):
        raise ValueError(f"[ray] name = {plan.ray.name!r}: KubeRay wants a letter first, and at most 47 characters")
    if plan.ray.sets > max(group.count for group in plan.groups):
        raise ValueError(f"[ray] sets = {plan.ray.sets}: no group has so many services, so some would be empty")
    drain = float(plan.router.settings.get("shutdown_timeout", HttpConfig.shutdown_timeout))
    if grace_seconds(drain) > LONGEST:
        raise ValueError(f"shutdown_timeout = {drain:g}: KubeRay counts at most {LONGEST} seconds")
    cluster = {
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": _start_params({"CPU": 0, ROUTER_RESOURCE: 1}),
            "template": _template(plan, image, "ray-head", HEAD_RESOURCES),
        },
        "workerGroupSpecs": [_pods(plan, image, name, count, held) for name, count, held in _nodes(plan)],
    }
    data = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": plan.ray.name},
        "spec": {
            "rayClusterDeletionDelaySeconds": grace_seconds(drain),  # of a cluster that another has taken over from
            "serveConfigV2": _dumped(yaml, _application(plan)),
            "rayClusterConfig": cluster,
        },
    }
    return HEAD + _dumped(yaml, data)


def _application(plan: DeploymentPlan) -> dict[str, Any]:
    """For Ray Serve, in its own form; a changed placement is a changed application."""
    router = {"name": "router", "ray_actor_options": {"num_cpus": 0, "resources": {ROUTER_RESOURCE: 1}}}
    application = {
        "name": "millrace",
        "route_prefix": "/",
        "import_path": "deploy.on_ray.serve_app:build",
        "args": {"placement_toml": plan.source},
        "deployments": [router],
    }
    return {"applications": [application]}


def _nodes(plan: DeploymentPlan) -> list[tuple[str, int, Bundle]]:
    """Groups of pods: a name, how many, and what each holds. What is packed has a pod for each set, the largest one's
    size; what is spread has a pod for each service.
    """
    bundles = [(group, _bundle(plan, group)) for group in plan.groups[1:]]
    if plan.ray.strategy.endswith("SPREAD"):
        return [(group.name, group.count, bundle) for group, bundle in bundles]
    total: Counter[str] = Counter()
    for group, bundle in bundles:
        share = ceil(group.count / plan.ray.sets)
        total.update({name: share * amount for name, amount in bundle.items()})
    if any("memory" not in bundle for _, bundle in bundles):
        del total["memory"]  # of some it is not known
    return [("set", plan.ray.sets, total)]


def _bundle(plan: DeploymentPlan, group: ServiceGroup) -> Bundle:
    reserved = plan.ray.groups.get(group.name, RayReservation())
    if group.kind == KVCACHE:
        return node_bundle(reserved)
    engine, model = build(EngineConfig, group.settings, {}, {}), build(ModelConfig, group.settings, {}, {})
    return worker_bundle(engine, model.of(group.kind), reserved)


def _pods(plan: DeploymentPlan, image: ImageSource, name: str, count: int, held: Bundle) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(int(held["CPU"]))}
    resources |= {"nvidia.com/gpu": ceil(held["GPU"])} if held.get("GPU") else {}
    resources |= {"memory": str(int(held["memory"]))} if held.get("memory") else {}
    return {
        "groupName": name,
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), count),
        "rayStartParams": _start_params(held),
        "template": _template(plan, image, "ray-worker", resources),
    }


def _start_params(held: Bundle) -> dict[str, str]:
    """Flags of `ray start`. GPUs and memory it finds by the pod's limits."""
    own = {name: amount for name, amount in held.items() if name not in ("CPU", "GPU", "memory")}
    params = {"num-cpus": str(int(held["CPU"])), "object-store-memory": OBJECT_STORE}
    quoted = json.dumps(own).replace("'", r"\u0027")  # a shell reads it
    return params | ({"resources": f"'{quoted}'"} if own else {})


def _template(plan: DeploymentPlan, image: ImageSource, name: str, resources: Mapping[str, Any]) -> dict[str, Any]:
    """The pod's. A model with a path is in a claim, as for the Helm chart."""
    container: dict[str, Any] = {
        "name": name,
        "image": image.name,
        "env": [WORKER_NICENESS, _from_secret(*HUB_TOKEN)],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if name == "ray-head":
        container["env"] += [_from_secret(*API_KEY)]  # the router's alone
        container["ports"] = [{"name": port, "containerPort": number} for port, number in PORTS.items()]
    spec: dict[str, Any] = {"automountServiceAccountToken": False, "enableServiceLinks": False}
    found = cluster_model(plan.model)
    if "volume" in found:
        container["volumeMounts"] = [{"name": "models", "mountPath": found["mountPath"], "readOnly": True}]
        spec["volumes"] = [{"name": "models", **found["volume"]}]
    return {"spec": spec | {"containers": [container]}}


def _from_secret(variable: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key, "optional": True}}}


def _dumped(yaml: Any, data: Mapping[str, Any]) -> str:
    """As YAML in which texts of several lines are read as they are written."""

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Lines stay lines."""

    def lines(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, lines)
    text: str = yaml.dump(data, Dumper=Dumper, sort_keys=False, width=120)
    return text
