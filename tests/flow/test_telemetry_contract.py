"""Alert rules and the dashboard ask for what a router and workers really export: each metric, by labels it has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from router.explain import OUTCOMES
from scripts.dashboard import PANELS
from serving.errors import WorkerLost
from serving.fleet_metrics import worker_metrics
from serving.messages import PoolReport, PoolStat, Tier, TierStat
from serving.metrics import FaultFigures, RouterMetrics
from serving.timeline import Timeline
from tests.fakes.sequences import make_request
from tests.flow.conftest import ClusterMaker
from tests.flow.queries import Asked, asked
from tests.flow.test_boards import front_over
from tests.house.source import ROOT
from tests.router.scripted import make_status

ALERTS = ROOT / "deploy/monitoring/alerts.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
# What a request that goes well leaves no sample of, or a service without TLS.
WHERE_THINGS_FAIL = {
    "millrace:request_refused_total",
    "millrace:request_failure_total",
    "millrace:requests_shed_total",
    "millrace:replacements_total",
    "millrace:kv_chunks_refused_total",
    "millrace:leases_refused_total",
    "millrace:background_restarts_total",
    "millrace:worker_background_restarts_total",
    "millrace:certificate_expiry_seconds",
    "millrace:certificate_reload_failures_total",
}
Labels = dict[str, frozenset[str]]
CERTIFICATES: Labels = dict.fromkeys(
    ("millrace:certificate_expiry_seconds", "millrace:certificate_reload_failures_total"), frozenset({"certificate"})
)


def labels_of(page: str) -> Labels:
    """By the name of a sample."""
    found: Labels = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | sample.labels.keys()
    return found


def page_of_failures() -> str:
    """A router's page after what the requests below do not bring about: refusals, failures, a pool, a certificate."""
    reasons = {f"{name}/why": 1.0 for name in ("kv_chunks_refused", "leases_refused", "worker_background_restarts")}
    stat = PoolStat(
        name="node",
        instance="life",
        tiers={tier: TierStat(capacity=1, bytes=0, blocks=0) for tier in Tier},
        namespaces={},
        **dict.fromkeys(("lookups", "found", "stored", "refused", "pinned", "backlog"), 0),
    )
    metrics = RouterMetrics(
        "tiny",
        lambda: [make_status("one", counters=reasons)],
        lambda: 0,
        lambda: [PoolReport(stat=stat, address="node:1")],
        lambda: FaultFigures(restarts={"expire": 1}),
    )
    metrics.request_refused(status=503)
    metrics.replaced(WorkerLost("gone"))
    metrics.finished(make_request([1]), Timeline(), None, WorkerLost("gone"))
    metrics.placements.ended(service_class="batch", outcome="refused", within_slo=False, code="slo")
    return metrics.text().decode()


async def real_page(make_cluster: ClusterMaker, folder: Path) -> Labels:
    """What is on the /metrics of a router with two prefill and two decode workers, after a request; and the workers'
    own pages.
    """
    async with make_cluster("split-local") as cluster, front_over(cluster, folder, "millrace") as client:
        body = {"model": "tiny", "prompt": [5, 6, 7, 8] * 10, "max_tokens": 4, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        cluster.cluster.beat()
        page = (await client.get("/metrics")).text
        alone = worker_metrics("tiny", cluster.cluster.workers[0].status)().decode()
    return labels_of(page) | labels_of(alone)


def complaints(selector: Asked, labels: Labels) -> Iterable[str]:
    if selector.name not in labels:
        yield f"{selector.name} is not exported"
    elif not selector.labels <= labels[selector.name]:
        yield f"{selector.name} has no {sorted(selector.labels - labels[selector.name])}"
    elif not selector.values.get("outcome", frozenset()) <= set(OUTCOMES):
        yield f"{selector.name} has none of {selector.values}"


async def test_every_query_asks_for_what_is_exported(make_cluster: ClusterMaker, tmp_path: Path) -> None:
    queries = [query for _, _, panel in PANELS for query in panel.values()]
    expressions = [rule["expr"] for rule in RULES]
    selectors = [selector for expression in (*queries, *expressions) for selector in asked(expression)]
    assert len(selectors) > len(queries) + len(expressions) > 50
    real, failures = await real_page(make_cluster, tmp_path), labels_of(page_of_failures())
    elsewhere = {
        name: labels
        for name, labels in failures.items()
        if name in WHERE_THINGS_FAIL or name.startswith("millrace:pool_")
    }
    known = real | elsewhere | CERTIFICATES | dict.fromkeys(RECORDED, frozenset({"class"}))
    assert [complaint for selector in selectors for complaint in complaints(selector, known)] == []
    assert known.keys() >= WHERE_THINGS_FAIL


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(millrace:gone_total[1m])", "millrace:gone_total is not exported"),
        ("sum by (pool) (millrace:known)", "millrace:known has no ['pool']"),
        ('sum(millrace:known{outcome="refuse"})', "millrace:known has none of"),
        ('sum by (instance, outcome) (millrace:known{outcome=~"refused|failed"})', ""),
    ],
)
def test_a_query_for_what_is_not_there_is_found(expression: str, wrong: str) -> None:
    labels = {"millrace:known": frozenset({"outcome"})}
    [said] = [*complaints(asked(expression)[0], labels)] or [""]
    assert said.startswith(wrong) and bool(said) == bool(wrong)
