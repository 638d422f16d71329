"""What has become of the spans of a process, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.tracing_config import TraceCounts
from serving.worker_metrics import COUNTER, PREFIX, Families


class TraceCollector(Collector):
    """Of the spans that these counts are of."""

    def __init__(self, counts: TraceCounts, prefix: str = PREFIX):
        self.counts = counts
        self.family = Families(prefix)

    def collect(self) -> Iterator[Metric]:
        now = self.counts
        totals = (("exported", now.exported), ("dropped", now.dropped), ("failed", now.failed))
        text = "Spans, by what became of them: exported, dropped (the queue was full), failed (nobody took them)"
        yield self.family(COUNTER, "trace_spans", text, ("outcome",), (((how,), float(count)) for how, count in totals))


def trace_text(counts: TraceCounts, prefix: str = PREFIX) -> bytes:
    """The part of /metrics."""
    registry = CollectorRegistry()
    registry.register(TraceCollector(counts, prefix))
    return generate_latest(registry)


def with_spans(text: Callable[[], bytes], counts: TraceCounts, prefix: str = PREFIX) -> Callable[[], bytes]:
    """The /metrics of a service, with those of its spans."""
    return lambda: text() + trace_text(counts, prefix)
