"""Spans by way of OpenTelemetry's SDK, exported by a thread of their own to a collector or a file.

The SDK is imported when this module is: by those alone who trace. No request waits for an exporter, and none fails.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock, Thread
from time import time_ns
from urllib.parse import urlsplit
from urllib.request import url2pathname

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.given_files import check_regular
from serving.tracing import Attributes, TraceContext
from serving.tracing_config import TraceCounts

DEFAULT_QUEUE = 2048  # spans, as the SDK's
DEFAULT_BATCH = 512
QUEUE, BATCH = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
LAST_WORDS_SECONDS = 5.0  # for spans not exported when the process leaves
_W3C = TraceContextTextMapPropagator()
# The SDK would write what a client's tracestate says into the log, for each request anew.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)


class RecordedSpan:
    """A span of the SDK's (serving.tracing.Span)."""

    def __init__(self, span: OtelSpan):
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span))
        self.context = TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, dict(attributes))

    def end(self, attributes: Attributes, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class OtelTracer:
    """Spans of this service (serving.tracing.Tracer). `endpoint` is a collector's, a file's URL, or empty: as
    OTEL_EXPORTER_OTLP_ENDPOINT says. `ratio` of the traces that begin here are sampled. Close it at last.
    """

    def __init__(self, endpoint: str, sampler: Sampler, resource: Mapping[str, str], counts: TraceCounts):
        named = dict(resource)
        if "OTEL_SERVICE_NAME" in os.environ:
            named.pop("service.name", None)
        self._provider = TracerProvider(sampler=sampler, resource=Resource.create(named), shutdown_on_exit=False)
        self._processor = BoundedProcessor(exporter_for(endpoint), counts)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("millrace")

    def now(self) -> int:
        return time_ns()

    def begin(self, name: str, parent: TraceContext, began: int, *, serves: bool = False) -> RecordedSpan | None:
        context = _W3C.extract(dict(parent.headers))
        if not serves and not get_current_span(context).get_span_context().is_valid:
            return None
        kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
        span = self._tracer.start_span(name, context, kind, start_time=began)
        return RecordedSpan(span) if span.is_recording() else None

    def close(self) -> None:
        """Export what is left, for a bounded time."""
        ending = Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(LAST_WORDS_SECONDS)


def _spans(variable: str, default: int) -> int:
    """A number of spans from the environment. Raises ValueError."""
    given = os.environ.get(variable, "").strip()
    try:
        number = int(given) if given else default
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{variable}: {given!r} is not a number of spans from 1")
    return number


class BoundedProcessor(BatchSpanProcessor):
    """Counts the spans that find the queue full, which are dropped, and those that no exporter took.

    Raises ValueError that names the variable at fault.
    """

    def __init__(self, exporter: SpanExporter, counts: TraceCounts):
        self.most = _spans(QUEUE, DEFAULT_QUEUE)
        batch = _spans(BATCH, min(DEFAULT_BATCH, self.most))
        if batch > self.most:
            raise ValueError(f"{BATCH}: {batch} spans are more than the {self.most} of {QUEUE}")
        self.counts = counts
        self.counted = CountedExporter(exporter, counts)
        self._guard = Lock()
        self._ended = 0
        super().__init__(self.counted, max_queue_size=self.most, max_export_batch_size=batch)

    def on_end(self, span: ReadableSpan) -> None:
        with self._guard:
            if self._ended - self.counted.taken >= self.most:
                self.counts.dropped += 1
                return
            self._ended += 1
        super().on_end(span)


class CountedExporter(SpanExporter):
    """An exporter whose failures are counted and go no further."""

    def __init__(self, exporter: SpanExporter, counts: TraceCounts):
        self.exporter = exporter
        self.counts = counts
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        done = SpanExportResult.FAILURE
        try:
            done = self.exporter.export(spans)
        finally:
            if done is SpanExportResult.SUCCESS:
                self.counts.exported += len(spans)
            else:
                self.counts.failed += len(spans)
        return done

    def shutdown(self) -> None:
        self.exporter.shutdown()


class FileExporter(SpanExporter):
    """One line of JSON a span, in the SDK's form; several processes may write the same file, one at a time.

    What could not be written whole, as on a full disk, is taken back; after a process that died writing, the next line
    begins anew. Raises OSError for what is no regular file.
    """

    def __init__(self, path: Path):
        if path.exists():
            check_regular(path)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(f"{span.to_json(indent=None)}\n" for span in spans).encode()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                return SpanExportResult.SUCCESS if self._append(lines) else SpanExportResult.FAILURE
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError:
            return SpanExportResult.FAILURE

    def _append(self, lines: bytes) -> bool:
        """All of it or nothing. Raises OSError."""
        end = os.lseek(self._file, 0, os.SEEK_END)
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            lines = b"\n" + lines
        written = 0
        try:
            written = os.write(self._file, lines)
        finally:
            if written < len(lines):
                os.ftruncate(self._file, end)
        return written == len(lines)

    def shutdown(self) -> None:
        os.close(self._file)


def exporter_for(endpoint: str) -> SpanExporter:
    """Raises OSError for a file that cannot be written."""
    if endpoint.startswith("file:"):
        return FileExporter(Path(url2pathname(urlsplit(endpoint).path)))
    told = [os.environ[name] for name in PROTOCOLS if os.environ.get(name)]
    if told and told[0].startswith("http"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint or None)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    insecure = True if endpoint.startswith("http://") else None
    return GrpcExporter(endpoint=endpoint or None, insecure=insecure)


def sampler_of(ratio: float) -> Sampler:
    """As the client's trace is sampled; of those that begin here, this share."""
    return ParentBasedTraceIdRatio(ratio)
