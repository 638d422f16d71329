"""The dashboard of deploy/compose is what its script writes, and what its monitoring mounts is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from scripts.dashboard import FILE, PANELS, SECTIONS, dashboard

COMPOSE = Path(__file__).resolve().parents[2] / "deploy/compose"


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert FILE.read_text() == dashboard(), "run `python -m scripts.dashboard`"


def test_panels_do_not_cover_each_other() -> None:
    panels = json.loads(dashboard())["panels"]
    covered = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(covered)) == len(covered) and all(x < 24 for x, _ in covered)
    assert len({panel["id"] for panel in panels}) == len(panels) == len(PANELS) + len(SECTIONS)


def test_what_is_mounted_is_there_and_the_datasource_is_the_one_asked() -> None:
    services: dict[str, Any] = yaml.safe_load((COMPOSE / "monitoring.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for one in services.values() for volume in one["volumes"]]
    assert all((COMPOSE / path).is_file() for path in mounted if path.startswith("."))
    (source,) = yaml.safe_load((COMPOSE / "grafana/datasource.yml").read_text())["datasources"]
    assert source["uid"] == json.loads(FILE.read_text())["panels"][1]["datasource"]["uid"]
    prometheus = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    inside = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert prometheus["rule_files"] and set(prometheus["rule_files"]) <= set(inside)
    (job,) = prometheus["scrape_configs"]
    router = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["router"]
    assert f"--port={job['dns_sd_configs'][0]['port']}" in router["command"]
