"""Alert rules: promtool's tests of them pass, and fail when a rule is changed; each leads to its runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house.source import ROOT

FOLDER = ROOT / "deploy/monitoring"
PAGE = ROOT / "docs/operate.md"
GROUPS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
ALERTS: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
RULES: dict[str, dict[str, Any]] = {
    rule.get("alert", rule.get("record")): rule for group in GROUPS for rule in group["rules"]
}
THRESHOLD = re.compile(r"([<>=] )(?!0\b(?!\.))([\d.]+)")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (prometheus) is not installed")


def promtool(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", "test", "rules", str(folder / "alerts_test.yaml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def changed(folder: Path, name: str, **fields: object) -> Path:
    """The folder, with the rules as they are but for fields of one."""
    groups = [
        {**group, "rules": [{**rule, **fields} if rule is RULES[name] else rule for rule in group["rules"]]}
        for group in GROUPS
    ]
    (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": groups}))
    shutil.copy(FOLDER / "alerts_test.yaml", folder)
    return folder


@needs_promtool
def test_promtools_tests_of_the_rules_pass() -> None:
    done = promtool(FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr


def times(expression: str, factor: float) -> str:
    """The expression with other thresholds; itself where it has none but 0."""
    return THRESHOLD.sub(lambda found: f"{found[1]}{float(found[2]) * factor:g}", expression)


THRESHOLDS = [rule["alert"] for rule in ALERTS if times(rule["expr"], 2.0) != rule["expr"]]
AT_EACH_CHANGE = {"MillraceRefusing"}


@needs_promtool
@pytest.mark.parametrize("factor", [0.7, 1.5])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_EACH_CHANGE else pytest.mark.slow) for name in THRESHOLDS]
)
def test_they_fail_with_another_threshold(tmp_path: Path, name: str, factor: float) -> None:
    done = promtool(changed(tmp_path, name, expr=times(RULES[name]["expr"], factor)))
    assert done.returncode != 0 and name in done.stdout + done.stderr


def test_each_alert_fires_in_one_of_them() -> None:
    text = (FOLDER / "alerts_test.yaml").read_text()
    assert set(re.findall(r'alertname="(\w+)"', text)) == {rule["alert"] for rule in ALERTS}


def anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_it_is_and_leads_to_what_to_do(rule: dict[str, Any]) -> None:
    annotations = rule["annotations"]
    page, anchor = annotations["runbook_url"].split("#")
    assert page.endswith("/docs/operate.md") and anchor == rule["alert"].lower()
    assert anchor in anchors(PAGE.read_text())
    assert annotations["summary"] and rule["labels"]["severity"] in ("page", "ticket")


def test_a_ratio_has_a_denominator_above_zero() -> None:
    for name, rule in RULES.items():
        for divided in re.findall(r"\n?/ (.+)", rule["expr"]):
            assert re.match(r"\(.* > 0\)", divided), name


def test_the_page_has_no_alert_that_there_is_not() -> None:
    told = {anchor for anchor in anchors(PAGE.read_text()) if anchor.startswith("millrace")}
    assert told == {rule["alert"].lower() for rule in ALERTS}


def test_links_to_headings_lead_to_one() -> None:
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", PAGE.read_text())
    assert links
    for page, anchor in links:
        assert anchor in anchors((PAGE.parent / page).read_text() if page else PAGE.read_text()), (page, anchor)
