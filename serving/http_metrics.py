"""What the HTTP server answered and what its process takes, for Prometheus, under the names that boards ask for.

These have no prefix and no model, as those of other servers: `http_requests_total`, `process_cpu_seconds_total`, …
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"})


class HttpMetrics:
    """An HttpObserver."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by = ("method", "handler", "status")
        self.requests = Counter("http_requests", "Answers, by class of their status", by, registry=self.registry)
        self.seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to the end of its answer",
            by[:2],
            registry=self.registry,
            buckets=_SECONDS,
        )
        ProcessCollector(registry=self.registry)

    def answered(self, *, method: str, handler: str, status: int, seconds: float) -> None:
        known = method if method in METHODS else "other"
        self.requests.labels(known, handler, f"{status // 100}xx").inc()
        self.seconds.labels(known, handler).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
