"""The pages that describe what users see: metrics, flags and the README's links keep up with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.cli import make_parser
from scripts.flags import PAGE, render
from serving.autoscaler_metrics import AutoscalerFigures, AutoscalerMetrics
from serving.certificate_metrics import certificate_text
from serving.http_metrics import HttpMetrics
from serving.key_metrics import KeyMetrics
from serving.metrics import RouterMetrics
from serving.trace_metrics import trace_text
from serving.tracing_config import TraceCounts
from tests.house.source import ROOT

EXPORTED = re.compile(r"^# TYPE ([\w:]+) (\w+)$", re.MULTILINE)
DOCUMENTED = re.compile(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \|", re.MULTILINE)
PAGES = ("*.md", "docs/**/*.md", "tests/*.md")
FROM_AN_INDEX = re.compile(r"pip install\b[^\n`]*\s['\"]?millrace\b")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#]+)(?:#[^)]*)?\)")


def exported() -> dict[str, str]:
    """Name and type of every metric on the router's /metrics, which holds the workers' too, and on the autoscaler's."""
    router = RouterMetrics("model", lambda: [], lambda: 0).text() + HttpMetrics().text()
    autoscaler = AutoscalerMetrics(AutoscalerFigures()).text()
    text = (router + KeyMetrics().text() + certificate_text({}) + trace_text(TraceCounts()) + autoscaler).decode()
    return {name: kind for name, kind in EXPORTED.findall(text) if not name.endswith("_created")}


def test_every_metric_is_documented_and_no_other() -> None:
    assert len(exported()) > 10
    assert dict(DOCUMENTED.findall((ROOT / "docs/metrics.md").read_text())) == exported()


def test_the_flags_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == render(page, make_parser()), "run `make docs`"


@pytest.mark.parametrize(
    "page",
    sorted(path.relative_to(ROOT).as_posix() for glob in PAGES for path in ROOT.glob(glob)),
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    broken = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]
    assert broken == []


def test_the_readme_opens_with_the_two_commands_and_a_request() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:45]
    text = "\n".join(first_screen)
    assert all(words in text for words in ("make serve", "make test", "curl ", '"content"'))


def test_every_decision_is_numbered_once() -> None:
    names = sorted(path.name for path in Path(ROOT / "docs/decisions").glob("*.md"))
    assert names
    assert [name[:4] for name in names] == [f"{number:04d}" for number in range(1, len(names) + 1)]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("deploy-*.md")))
def test_a_deployment_begins_with_a_checkout(page: str) -> None:
    """The name on PyPI is a reserved one without code: pip would install that, warn of the extra, and succeed."""
    assert FROM_AN_INDEX.findall((ROOT / "docs" / page).read_text()) == []
