"""Starts and ends the tracing of a process, as it is configured; without an endpoint nothing is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from serving import __version__
from serving.tracing import NoTracer, use
from serving.tracing_config import TRACE_COUNTS, TracingConfig

MISSING = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'millrace[otel]'"


@contextmanager
def traced(config: TracingConfig, role: str, name: str) -> Iterator[None]:
    """Spans made inside are exported. Raises ValueError where they cannot be, OSError for a file that cannot be."""
    endpoint = config.endpoint(os.environ)
    if endpoint is None:
        yield
        return
    try:
        from serving.otel_tracer import OtelTracer, sampler_of
    except ImportError as error:
        raise ValueError(MISSING) from error
    resource = {
        "service.name": "millrace",
        "service.version": __version__,
        "service.instance.id": name,
        "millrace.role": role,
    }
    tracer = OtelTracer(endpoint, sampler_of(config.ratio(os.environ)), resource, TRACE_COUNTS)
    use(tracer)
    try:
        yield
    finally:
        use(NoTracer())
        tracer.close()
