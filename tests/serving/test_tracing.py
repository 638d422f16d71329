"""Spans: whose children they are, what becomes of those nobody takes, and that nothing is done without a tracer."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event

import pytest

from deploy.runtime.traced import traced
from serving.errors import NoRoom
from serving.tracing import NONE, NoTracer, PhaseSpan, TraceContext, call_headers, carried, context_of, use
from serving.tracing_config import TraceCounts, TracingConfig

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from serving.otel_tracer import BoundedProcessor, CountedExporter, FileExporter, OtelTracer, sampler_of

PARENT = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spans.jsonl"


@pytest.fixture
def tracer(file: Path) -> Iterator[OtelTracer]:
    made = OtelTracer(f"file://{file}", sampler_of(1.0), {"service.name": "test"}, TraceCounts())
    use(made)
    yield made
    use(NoTracer())
    made.close()


def written(tracer: OtelTracer, file: Path) -> dict[str, dict[str, object]]:
    tracer.close()
    return {span["name"]: span for span in map(json.loads, file.read_text().splitlines())}


def test_a_phase_is_a_child_of_whoever_asked_and_calls_from_it_carry_its_own(tracer: OtelTracer, file: Path) -> None:
    with PhaseSpan("outer", PARENT) as outer, carried(outer.context):
        assert dict(call_headers())["tracestate"] == "vendor=1"
        with PhaseSpan("inner", context_of(call_headers())):
            pass
    assert call_headers() == ()
    spans = written(tracer, file)
    assert spans["outer"]["parent_id"] == "0xb7ad6b7169203331"
    assert spans["inner"]["parent_id"] == spans["outer"]["context"]["span_id"]  # type: ignore[index]


def test_an_error_is_told_by_its_name_alone(tracer: OtelTracer, file: Path) -> None:
    with pytest.raises(NoRoom), PhaseSpan("phase", PARENT):
        raise NoRoom("words of the prompt")
    assert written(tracer, file)["phase"]["attributes"] == {"error.type": "NoRoom"}
    assert "words of the prompt" not in file.read_text()


def exporter_and_spans(file: Path, count: int) -> tuple[FileExporter, list[ReadableSpan]]:
    made = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    spans = [made.start_span(f"span {number}") for number in range(count)]
    for span in spans:
        span.end()
    return FileExporter(file), spans  # type: ignore[return-value]


@pytest.mark.parametrize("full", [False, True])
def test_a_write_that_breaks_off_leaves_nothing_behind(file: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """Before: the next span stood on the line of the torn one."""
    exporter, (first, second, third) = exporter_and_spans(file, 3)
    assert exporter.export([first]) is SpanExportResult.SUCCESS
    write = os.write

    def breaks_off(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data[:20])
        if full:
            raise OSError(errno.ENOSPC, "no space")
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", breaks_off)
        assert exporter.export([second]) is SpanExportResult.FAILURE
    assert exporter.export([third]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == ["span 0", "span 2"]


def test_after_a_process_that_died_writing_the_next_line_is_its_own(file: Path) -> None:
    file.write_text('{"name": "torn')
    exporter, spans = exporter_and_spans(file, 2)
    for span in spans:
        exporter.export([span])
    exporter.shutdown()
    torn, *lines = file.read_text().splitlines()
    assert torn == '{"name": "torn' and [json.loads(line)["name"] for line in lines] == ["span 0", "span 1"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "-1"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "3000"),
        ("OTEL_TRACES_SAMPLER_ARG", "half"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_named(
    variable: str, value: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with (
        pytest.raises(ValueError, match=variable),
        traced(TracingConfig(otlp_traces_endpoint=f"file://{file}"), "router", "router"),
    ):
        pass


def test_a_short_queue_needs_no_other_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "3")
    OtelTracer(f"file://{file}", sampler_of(1.0), {}, TraceCounts()).close()


P, Q = PARENT.traceparent, PARENT.traceparent.replace("b7", "b8")


@pytest.mark.parametrize(
    ("headers", "parent", "state"),
    [
        ([("traceparent", P), ("tracestate", "a=1"), ("tracestate", "b=2, c=3")], P, "a=1,b=2,c=3"),
        ([("tracestate", "a=1"), ("traceparent", P)], P, "a=1"),
        ([("traceparent", P), ("traceparent", Q), ("tracestate", "a=1")], "", ""),
        ([("tracestate", "a=1")], "", ""),
        ([("traceparent", P), ("tracestate", "a=" + "1" * 300), ("tracestate", "b=" + "2" * 300)], P, "a=" + "1" * 300),
        ([("traceparent", P), ("tracestate", "a=" + "1" * 600)], P, ""),
        ([("traceparent", "0" * 600), ("tracestate", "a=1")], "", ""),
    ],
)
def test_repeated_headers_are_read_as_w3c_has_them(headers: list[tuple[str, str]], parent: str, state: str) -> None:
    assert context_of(headers) == TraceContext(parent, state)


@pytest.mark.parametrize("parent", [None, NONE, TraceContext("nonsense"), TraceContext(PARENT.traceparent[:-1] + "0")])
def test_without_a_sampled_trace_nothing_is_recorded(
    tracer: OtelTracer, file: Path, parent: TraceContext | None
) -> None:
    with PhaseSpan("phase", parent) as phase:
        assert phase.context == NONE
    assert written(tracer, file) == {}


def test_the_share_of_traces_that_begin_here_is_the_ratio(file: Path) -> None:
    none = OtelTracer(f"file://{file}", sampler_of(0.0), {}, TraceCounts())
    assert none.begin("chat", NONE, none.now(), serves=True) is None
    assert none.begin("chat", PARENT, none.now(), serves=True) is not None, "whoever began it has decided"
    none.close()


class Stuck(SpanExporter):
    """Takes nothing until it is let go, and then fails."""

    def __init__(self) -> None:
        self.go, self.asked = Event(), Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go.wait(30)
        raise ConnectionError("no collector")


def test_spans_beyond_the_queue_are_dropped_and_counted_and_failures_go_no_further(
    monkeypatch: pytest.MonkeyPatch, tracer: OtelTracer
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    stuck, counts = Stuck(), TraceCounts()
    tracer._provider.add_span_processor(BoundedProcessor(stuck, counts))
    for _ in range(4):
        PhaseSpan("taken", PARENT).end()
    assert stuck.asked.wait(30)
    for _ in range(20):
        PhaseSpan("more", PARENT).end()
    assert counts.dropped == 12
    stuck.go.set()
    tracer.close()
    assert (counts.exported, counts.failed) == (0, 12)


def test_what_an_exporter_takes_is_counted() -> None:
    counts = TraceCounts()

    class Takes(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    CountedExporter(Takes(), counts).export([])
    assert counts == TraceCounts()


@pytest.mark.parametrize(
    ("config", "environ", "endpoint", "ratio"),
    [
        ({}, {}, None, 1.0),
        ({"otlp_traces_endpoint": "http://c:4317"}, {}, "http://c:4317", 1.0),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, "", 1.0),
        ({"otlp_traces_endpoint": "file:///x"}, {"OTEL_SDK_DISABLED": "true"}, None, 1.0),
        ({}, {"OTEL_TRACES_SAMPLER_ARG": "0.25"}, None, 0.25),
        ({"trace_sample_ratio": 0.5}, {"OTEL_TRACES_SAMPLER_ARG": "0.25"}, None, 0.5),
    ],
)
def test_flags_go_before_the_environment(
    config: dict[str, object], environ: dict[str, str], endpoint: str | None, ratio: float
) -> None:
    made = TracingConfig(**config)  # type: ignore[arg-type]
    assert (made.endpoint(environ), made.ratio(environ)) == (endpoint, ratio)


def test_nothing_is_imported_where_nothing_is_traced() -> None:
    program = "import sys, deploy.cli, router.router, prefill.service; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_what_a_client_puts_into_its_state_is_not_logged(tracer: OtelTracer, caplog: pytest.LogCaptureFixture) -> None:
    span = tracer.begin("chat", TraceContext(f"00-{1:032x}-{2:016x}-01", "Bearer sk-secret"), tracer.now(), serves=True)
    assert span is not None
    span.end({})
    assert "sk-secret" not in caplog.text


@pytest.mark.parametrize(("length", "kept"), [(511, True), (512, True), (513, False), (100_000, False)])
def test_a_clients_state_is_passed_on_or_left_out_and_never_fills_the_headers_of_a_call(
    length: int, kept: bool
) -> None:
    parent, state = f"00-{1:032x}-{2:016x}-01", "a=" + "b" * (length - 2)
    found = context_of([("traceparent", parent), ("tracestate", state)])
    assert found == TraceContext(parent, state if kept else "")
