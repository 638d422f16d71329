"""What an autoscaler says of itself, for Prometheus: loads, what it wants, what it did, and whether it is the one.

It knows neither routers nor places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.worker_metrics import PREFIX


@dataclass(slots=True)
class AutoscalerFigures:
    """`actions` by what was done and the role; loads, workers and what is wanted by role."""

    turns: int = 0
    failures: int = 0  # answers that did not come, of a router or a place, and actions that failed
    leading: bool = False
    predicted: float = 0.0  # attainment that the last action was predicted to gain
    actions: Counter[tuple[str, str]] = field(default_factory=Counter)
    loads: Mapping[str, float] = field(default_factory=dict)
    wanted: Mapping[str, int] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)

    def acted(self, kind: str, role: str) -> None:
        self.actions[kind, role] += 1


class AutoscalerMetrics(Collector):
    """Metrics of one controller."""

    def __init__(self, figures: AutoscalerFigures, prefix: str = PREFIX):
        self._figures = figures
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        figures, name = self._figures, f"{self._prefix}:autoscaler"
        yield CounterMetricFamily(f"{name}_turns", "Turns of the loop", value=figures.turns)
        yield CounterMetricFamily(f"{name}_failures", "Questions unanswered and actions failed", value=figures.failures)
        yield GaugeMetricFamily(f"{name}_leading", "1 where this controller acts", value=float(figures.leading))
        gained = "Attainment that the last action was predicted to gain"
        yield GaugeMetricFamily(f"{name}_predicted_gain", gained, value=figures.predicted)
        actions = CounterMetricFamily(
            f"{name}_actions", "Workers added, drained and flipped", labels=("action", "role")
        )
        for labels, count in figures.actions.items():
            actions.add_metric(labels, count)
        yield actions
        yield self._by_role("load", "Share of what the role's workers can do", figures.loads)
        yield self._by_role("wanted_workers", "Workers that the cost model asks for", figures.wanted)
        yield self._by_role("workers", "Workers there are", figures.workers)

    def _by_role(self, name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self._prefix}:autoscaler_{name}", text, labels=("role",))
        for role, value in values.items():
            family.add_metric((role,), value)
        return family

    def text(self) -> bytes:
        return generate_latest(self._registry)
