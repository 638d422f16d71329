"""Manifests as tests look at them: those kept in golden/, found by kind, with their pods and what a selector selects.

It says nothing of what they should be.
"""

from __future__ import annotations

import pytest
import yaml

from deploy.cli import make_parser
from deploy.runtime.settings import Settings, read_settings
from tests.deploy.helm.chart import HERE, Manifest, renderer

SETS = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
RENDERS = pytest.mark.skipif(renderer() is None, reason="neither helm nor Go with sprig is here to render the chart")
PARSER = make_parser()


def given(name: str) -> Manifest:
    found: Manifest = yaml.safe_load((HERE / f"values/{name}.yaml").read_text()) or {}
    return found


def golden(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((HERE / f"golden/{name}.yaml").read_text()))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet")


def holds_experts(workload: Manifest) -> bool:
    """Whether it is a host of a worker's ranks, which answers nobody."""
    return "--headless" in container_of(workload)["args"]


def services(manifests: list[Manifest]) -> list[Manifest]:
    """Workloads that answer somebody."""
    return [one for one in workloads(manifests) if not holds_experts(one)]


def pod_of(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest["spec"]["template"]["spec"]
    return spec


def container_of(manifest: Manifest) -> Manifest:
    (container,) = pod_of(manifest)["containers"]
    found: Manifest = container
    return found


def component(manifest: Manifest) -> str:
    return str(manifest["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"])


def selects(selector: Manifest, labels: Manifest) -> bool:
    """A label selector of Kubernetes; matchExpressions with In and NotIn alone."""
    same = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] in ("In", "NotIn")
        same = same and (labels.get(rule["key"]) in rule["values"]) == (rule["operator"] == "In")
    return same


def selected(manifests: list[Manifest], selector: Manifest) -> list[Manifest]:
    return [one for one in workloads(manifests) if selects(selector, one["spec"]["template"]["metadata"]["labels"])]


def named(manifests: list[Manifest], kind: str, name: str) -> bool:
    return any(one["kind"] == kind and one["metadata"]["name"] == name for one in manifests)


def settings_of(workload: Manifest) -> Settings:
    """What its command makes of its arguments."""
    return read_settings(vars(PARSER.parse_args(container_of(workload)["args"])))
