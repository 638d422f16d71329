"""Rendered manifests as pods that `podman kube play` 4.3 takes, with what a kubelet would do for them beside.

Pure: manifests in, pods out. It fills in what podman does not: addresses, names, Secrets, variables in arguments. What
podman knows nothing of (probes, preStop, spread, service accounts) is left out of the pod and told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]
PROBES = ("startup", "readiness", "liveness")
VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
POD_KEYS = ("containers", "volumes")  # of a pod's spec, those that are passed on
CONTAINER_KEYS = ("name", "image", "args", "volumeMounts")  # podman would publish ports on this machine


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPod:
    """A pod to play, and what its kubelet does: `probes` by name, seconds before SIGTERM, and until SIGKILL."""

    name: str
    component: str
    address: str
    manifest: Manifest
    claims: tuple[Manifest, ...]
    probes: Mapping[str, Manifest]
    ports: Mapping[str, int]
    pre_stop: Manifest | None  # a host of ranks is told at once
    grace: int


def plan_pods(
    manifests: Sequence[Manifest],
    namespace: str,
    addresses: Iterator[str],
    secrets: Mapping[str, Mapping[str, str]],
) -> list[PlannedPod]:
    """A pod for each replica. Secrets that are not among the manifests come from `secrets`, by name and key."""
    known = dict(secrets) | {one["metadata"]["name"]: one["stringData"] for one in manifests if one["kind"] == "Secret"}
    replicas = [
        (workload, f"{workload['metadata']['name']}-{number}", next(addresses))
        for workload in manifests
        if workload["kind"] in ("Deployment", "StatefulSet")
        for number in range(workload["spec"].get("replicas", 1))
    ]
    hosts = list(_hosts(manifests, namespace, replicas))
    return [_planned(workload, name, address, hosts, known) for workload, name, address in replicas]


def _hosts(
    manifests: Sequence[Manifest], namespace: str, replicas: Sequence[tuple[Manifest, str, str]]
) -> Iterator[Manifest]:
    """The addresses behind each headless Service, as lines of a hosts file."""
    for service in manifests:
        if service["kind"] == "Service" and service["spec"].get("clusterIP") == "None":
            named, wanted = f"{service['metadata']['name']}.{namespace}.svc", service["spec"]["selector"].items()
            for workload, _, address in replicas:
                if wanted <= workload["spec"]["template"]["metadata"]["labels"].items():
                    yield {"ip": address, "hostnames": [named]}


def _planned(
    workload: Manifest, name: str, address: str, hosts: list[Manifest], secrets: Mapping[str, Mapping[str, str]]
) -> PlannedPod:
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    claims = tuple(_claim(one, name) for one in workload["spec"].get("volumeClaimTemplates", ()))
    env = {one["name"]: _value(one, name, address, secrets) for one in container.get("env", ())}
    spec: Manifest = {key: deepcopy(template["spec"][key]) for key in POD_KEYS if key in template["spec"]}
    # /dev/shm is podman's own: one volume of memory for the pod would be root's alone.
    shared = {one["name"] for one in spec["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory"}
    spec["volumes"] = [one for one in spec["volumes"] if one["name"] not in shared]
    for template_claim, claim in zip(workload["spec"].get("volumeClaimTemplates", ()), claims, strict=True):
        named = {"claimName": claim["metadata"]["name"]}
        spec["volumes"].append({"name": template_claim["metadata"]["name"], "persistentVolumeClaim": named})
    own = {key: deepcopy(container[key]) for key in CONTAINER_KEYS if key in container}
    own["args"] = [expanded(word, env) for word in container["args"]]
    own["volumeMounts"] = [one for one in own["volumeMounts"] if one["name"] not in shared]
    own["env"] = [{"name": key, "value": value} for key, value in env.items()]
    rights = template["spec"]["securityContext"]
    user = {"runAsUser": rights["runAsUser"], "runAsGroup": rights["runAsGroup"]}
    own["securityContext"] = container["securityContext"] | user
    spec |= {"containers": [own], "hostAliases": hosts, "restartPolicy": "Always"}
    return PlannedPod(
        name=name,
        component=template["metadata"]["labels"]["app.kubernetes.io/component"],
        address=address,
        manifest={"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec},
        claims=claims,
        probes={kind: container[f"{kind}Probe"]["httpGet"] for kind in PROBES if f"{kind}Probe" in container},
        ports={port["name"]: port["containerPort"] for port in container.get("ports", ())},
        pre_stop=container["lifecycle"]["preStop"] if "lifecycle" in container else None,
        grace=template["spec"]["terminationGracePeriodSeconds"],
    )


def _claim(template: Manifest, pod: str) -> Manifest:
    metadata = {"name": f"{template['metadata']['name']}-{pod}"}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": template["spec"]}


def _value(variable: Manifest, pod: str, address: str, secrets: Mapping[str, Mapping[str, str]]) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return {"status.podIP": address, "metadata.name": pod}[source["fieldRef"]["fieldPath"]]
    reference = source["secretKeyRef"]
    return secrets[reference["name"]][reference["key"]]


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` as the kubelet puts it in: unknown names stay, and `$$` is a dollar."""

    def put(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return VARIABLE.sub(put, text)
