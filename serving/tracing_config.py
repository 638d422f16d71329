"""Whether and where spans are exported, and what has become of them. It imports no tracing library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serving.options import option

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
RATIO = "OTEL_TRACES_SAMPLER_ARG"
DISABLED = "OTEL_SDK_DISABLED"


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Traces by OpenTelemetry."""

    otlp_traces_endpoint: str | None = option(
        None,
        "export spans of requests to this OpenTelemetry collector, or to a file (file:///path.jsonl); needs"
        " millrace[otel]. Default: as OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere",
    )
    trace_sample_ratio: float | None = option(
        None,
        "share of the traces that begin here that are recorded; those that a client begins are, if it says so."
        " Default: OTEL_TRACES_SAMPLER_ARG, else 1",
        least=0.0,
        most=1.0,
    )

    def endpoint(self, environ: Mapping[str, str]) -> str | None:
        """Where to; None: nowhere; empty: the exporter reads the environment itself."""
        if environ.get(DISABLED, "").lower() == "true":
            return None
        if self.otlp_traces_endpoint is not None:
            return self.otlp_traces_endpoint or None
        return "" if any(environ.get(name) for name in ENDPOINTS) else None

    def ratio(self, environ: Mapping[str, str]) -> float:
        """Raises ValueError."""
        if self.trace_sample_ratio is not None:
            return self.trace_sample_ratio
        given = environ.get(RATIO) or "1"
        try:
            share = float(given)
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{RATIO}: {given!r} is not a share from 0 to 1")
        return share


@dataclass(slots=True)
class TraceCounts:
    """Running totals of spans."""

    exported: int = 0
    dropped: int = 0  # the queue was full
    failed: int = 0  # not taken by the collector


TRACE_COUNTS = TraceCounts()  # of this process
