"""What became of requests by service class, and of predictions: goodput, attainment, sheds, decisions.

`docs/metrics.md` documents every name here. Beside serving.metrics it is the only user of prometheus_client.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from serving.service_class import SERVICE_CLASSES

OTHER = "other"  # what a label says where the word is none of those it is bounded to
_RATIO = (0.25, 0.4, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.25, 1.5, 2.0, 2.5, 4.0)
SHED_CODES = frozenset(
    {"queue_full", "no_room", "slo", "draining", "no_split_placement", "retry_budget", "Unavailable", "Overloaded"}
)
REASONS = frozenset(
    {"slo", "tie", "quickest", "least_loaded", "round_robin", "session_sticky", "prefix_aware", "canary"}
)


class ClassMetrics:
    """The router's PlacementObserver. `classes` bounds the label `class`; `waiting` counts requests in the queue."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        classes: Collection[str] = tuple(SERVICE_CLASSES),
        waiting: Callable[[], Mapping[str, int]] = dict,
        prefix: str = "millrace",
    ):
        self.registry = registry
        self.prefix = prefix
        self.model = model_name
        self.classes = frozenset(classes)
        self.offered = self._counter("requests_offered", "Requests that ended, by how", "class", "outcome")
        self.within = self._counter("requests_within_slo", "Requests that completed within their objectives", "class")
        self.shed = self._counter("requests_shed", "Requests refused for want of a placement, by why", "class", "code")
        self.without = self._counter(
            "requests_degraded", "Requests that went on without their objectives, which none could meet", "class"
        )
        self.decisions = self._counter("placement_decisions", "Prefills sent, by why they went there", "reason")
        self.mixed = self._counter(
            "mixed_placements", "Prompts computed by their decode worker although prefill elsewhere was decided"
        )
        self.ttft = self._histogram("ttft_prediction_ratio", "Observed by predicted time to the first token")
        self.tpot = self._histogram(
            "tpot_prediction_ratio", "Observed by predicted (usual) time for each token after it"
        )
        registry.register(_QueueByClass(model_name, self.classes, waiting, prefix))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}:{name}", text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        made = Histogram(f"{self.prefix}:{name}", text, ("model_name",), registry=self.registry, buckets=_RATIO)
        return made.labels(self.model)

    def placed(self, *, reason: str, downgraded: bool) -> None:
        self.decisions.labels(self.model, _bounded(reason, REASONS)).inc()
        if downgraded:
            self.mixed.labels(self.model).inc()

    def ended(self, *, service_class: str, outcome: str, within_slo: bool, code: str) -> None:
        named = _bounded(service_class, self.classes)
        self.offered.labels(self.model, named, outcome).inc()
        if within_slo:
            self.within.labels(self.model, named).inc()
        if outcome == "refused":
            self.shed.labels(self.model, named, _bounded(code, SHED_CODES)).inc()

    def degraded(self, *, service_class: str) -> None:
        self.without.labels(self.model, _bounded(service_class, self.classes)).inc()

    def predicted(self, *, ttft: float | None, tpot: float | None) -> None:
        for histogram, ratio in ((self.ttft, ttft), (self.tpot, tpot)):
            if ratio is not None:
                histogram.observe(ratio)


def _bounded(word: str, known: Collection[str]) -> str:
    return word if word in known else OTHER


class _QueueByClass:
    """How many requests of each class wait for room."""

    def __init__(
        self, model_name: str, classes: Collection[str], waiting: Callable[[], Mapping[str, int]], prefix: str
    ):
        self.prefix = prefix
        self.model = model_name
        self.classes = classes
        self.waiting = waiting

    def collect(self) -> Iterator[Metric]:
        text = "Requests waiting for room, by service class"
        family = GaugeMetricFamily(f"{self.prefix}:router_queue_class_requests", text, labels=("model_name", "class"))
        counts = dict.fromkeys(sorted(self.classes), 0)
        for name, count in self.waiting().items():
            named = _bounded(name, self.classes)
            counts[named] = counts.get(named, 0) + count
        for name, count in counts.items():
            family.add_metric((self.model, name), float(count))
        yield family
