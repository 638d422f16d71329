"""The dashboard of deploy/compose is what its script writes, and asks only for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.dashboard import FILE, PANELS, dashboard
from serving.metrics import RouterMetrics

COMPOSE = Path(__file__).resolve().parents[2] / "deploy/compose"
NAMES = re.compile(r"millrace:\w+")


def exported() -> set[str]:
    """The names of samples that the router's page can have."""
    text = RouterMetrics("model", lambda: [], lambda: 0).text().decode()
    found = set[str]()
    for name, kind in re.findall(r"^# TYPE ([\w:]+) (\w+)$", text, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert FILE.read_text() == dashboard(), "run `python -m scripts.dashboard`"


@pytest.mark.parametrize(("title", "queries"), [(title, queries) for title, _, queries in PANELS])
def test_a_panel_asks_for_metrics_that_there_are(title: str, queries: dict[str, str]) -> None:
    asked = {name for query in queries.values() for name in NAMES.findall(query)}
    assert asked and asked <= exported(), title


def test_panels_do_not_cover_each_other() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in json.loads(dashboard())["panels"]]
    assert len(set(places)) == len(places) == len(PANELS)
    assert all(x + 8 <= 24 for x, _ in places)


def test_what_is_mounted_is_there_and_the_datasource_is_the_one_asked() -> None:
    services: dict[str, Any] = yaml.safe_load((COMPOSE / "monitoring.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for one in services.values() for volume in one["volumes"]]
    assert all((COMPOSE / path).is_file() for path in mounted if path.startswith("./"))
    (source,) = yaml.safe_load((COMPOSE / "grafana/datasource.yml").read_text())["datasources"]
    assert source["uid"] == json.loads(FILE.read_text())["panels"][0]["datasource"]["uid"]
    (job,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    router = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["router"]
    assert f"--port={job['dns_sd_configs'][0]['port']}" in router["command"]
