"""Renders the chart with `helm` where there is one, else with Go's templates and sprig (render/main.go).

It knows how values are put together and what a release is called; what the manifests should say is the tests'.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
CHART = HERE.parents[2] / "deploy/helm/millrace"
GOPATH = "/usr/share/gocode"  # where Debian keeps sprig
RELEASE, NAMESPACE, KUBERNETES = "millrace", "serving", "1.34.0"
SPRIG = Path(GOPATH) / "src/github.com/Masterminds/sprig"

Manifest = dict[str, Any]


def renderer() -> str | None:
    """What renders here: "helm", "go", or None."""
    if shutil.which("helm"):
        return "helm"
    return "go" if shutil.which("go") and SPRIG.is_dir() else None


def render(given: Mapping[str, Any], chart: Path = CHART, kubernetes: str = KUBERNETES) -> tuple[list[Manifest], str]:
    """All manifests, by kind and name, and the notes (helm shows none here). Raises ValueError with what it said."""
    if renderer() == "helm":
        flags = ["--namespace", NAMESPACE, "--kube-version", kubernetes, "-f", "-"]
        text, notes = _run(["helm", "template", RELEASE, str(chart), *flags], yaml.safe_dump(dict(given))), ""
    else:
        text = _run([str(_program()), str(chart)], json.dumps(_context(given, chart, kubernetes)))
        text, _, notes = _without_notes(text)
    found = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    return sorted(found, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"])), notes


def coalesce(below: Any, given: Any) -> Any:
    """Values over others as Helm puts them: tables are merged, and null takes a key away."""
    if not isinstance(below, dict) or not isinstance(given, dict):
        return given
    merged = {key: coalesce(below.get(key), value) for key, value in given.items() if value is not None}
    return {key: value for key, value in below.items() if key not in given} | merged


def values(given: Mapping[str, Any], chart: Path = CHART) -> Manifest:
    found: Manifest = coalesce(yaml.safe_load((chart / "values.yaml").read_text()), dict(given))
    return found


def _context(given: Mapping[str, Any], chart: Path, kubernetes: str) -> Manifest:
    meta = yaml.safe_load((chart / "Chart.yaml").read_text())
    return {
        "Values": values(given, chart),
        "Chart": {key[0].upper() + key[1:]: value for key, value in meta.items()},
        "Release": {"Name": RELEASE, "Namespace": NAMESPACE, "Service": "Helm"},
        "Capabilities": {"KubeVersion": {"Version": f"v{kubernetes}"}},
    }


def _without_notes(text: str) -> tuple[str, str, str]:
    """The manifests, and what the notes say, which are the first file."""
    head, mark, rest = text.partition("NOTES.txt\n")
    assert mark and head.count("\n") == 1
    notes, _, manifests = rest.partition("\n---\n")
    return manifests, mark, notes


@cache
def _program() -> Path:
    """The compiled renderer, gone when this process ends."""
    folder = tempfile.mkdtemp(prefix="millrace-render-")
    atexit.register(shutil.rmtree, folder)
    made = Path(folder) / "render"
    built = subprocess.run(
        ["go", "build", "-o", str(made), str(HERE / "render/main.go")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GO111MODULE": "off", "GOPATH": GOPATH, "GOFLAGS": ""},
    )
    assert built.returncode == 0, built.stderr
    return made


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return done.stdout
