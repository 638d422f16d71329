"""Goodput, sheds and predictions by class, with labels that no client can make more of."""

from __future__ import annotations

from serving.class_metrics import OTHER
from serving.metrics import RouterMetrics
from tests.serving.test_metrics import samples


def made() -> RouterMetrics:
    return RouterMetrics(
        "tiny", lambda: (), lambda: 0, classes=("gold", "batch"), waiting_by_class=lambda: {"gold": 2, "odd": 3}
    )


def value(metrics: RouterMetrics, name: str, *labels: str) -> float:
    return samples(metrics.text())[name, labels]


def test_what_was_offered_and_what_was_within_its_objectives() -> None:
    metrics = made()
    for outcome, within in (("completed", True), ("completed", False), ("refused", False), ("aborted", False)):
        metrics.placements.ended(service_class="gold", outcome=outcome, within_slo=within, code="")
    assert value(metrics, "requests_within_slo_total", "gold") == 1
    assert value(metrics, "requests_offered_total", "gold", "completed") == 2
    assert value(metrics, "requests_offered_total", "gold", "refused") == 1


def test_labels_are_bounded() -> None:
    metrics = made()
    for number in range(50):
        metrics.placements.ended(service_class=f"c{number}", outcome="refused", within_slo=False, code=f"x{number}")
        metrics.placements.placed(reason=f"r{number}", downgraded=number == 0)
    assert value(metrics, "requests_offered_total", OTHER, "refused") == 50
    assert value(metrics, "requests_shed_total", OTHER, OTHER) == 50
    assert value(metrics, "placement_decisions_total", OTHER) == 50
    assert value(metrics, "mixed_placements_total") == 1


def test_sheds_say_why() -> None:
    metrics = made()
    metrics.placements.ended(service_class="batch", outcome="refused", within_slo=False, code="slo")
    metrics.placements.ended(service_class="batch", outcome="failed", within_slo=False, code="slo")
    assert value(metrics, "requests_shed_total", "batch", "slo") == 1


def test_predictions_are_compared_where_there_is_something_to_compare() -> None:
    metrics = made()
    metrics.placements.predicted(ttft=1.1, tpot=None)
    metrics.placements.predicted(ttft=0.9, tpot=2.0)
    assert value(metrics, "ttft_prediction_ratio_count") == 2 and value(metrics, "ttft_prediction_ratio_sum") == 2.0
    assert value(metrics, "tpot_prediction_ratio_count") == 1


def test_what_waits_is_counted_by_class() -> None:
    metrics = made()
    assert value(metrics, "router_queue_class_requests", "gold") == 2
    assert value(metrics, "router_queue_class_requests", "batch") == 0
    assert value(metrics, "router_queue_class_requests", OTHER) == 3


def test_those_that_went_on_without_their_objectives_are_counted() -> None:
    metrics = made()
    for name in ("gold", "gold", "unheard of"):
        metrics.placements.degraded(service_class=name)
    assert value(metrics, "requests_degraded_total", "gold") == 2
    assert value(metrics, "requests_degraded_total", OTHER) == 1
