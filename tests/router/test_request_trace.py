"""The router's spans: each try is seen, each ending is told, and a client that leaves takes no span along."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from serving.errors import CorruptChunk, Unavailable
from serving.tracing import NONE, ClientCall, NoTracer, TraceContext, called, use
from serving.tracing_config import TraceCounts
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import LOSE

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from serving.otel_tracer import OtelTracer, sampler_of

pytestmark = pytest.mark.usefixtures("ties_by_name")


class Traced:
    """A tracer to a file, and what it has written."""

    def __init__(self, file: Path, ratio: float = 1.0):
        self.file = file
        self.tracer = OtelTracer(f"file://{file}", sampler_of(ratio), {}, TraceCounts())

    def spans(self) -> list[dict[str, Any]]:
        self.tracer.close()
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def root(self) -> dict[str, Any]:
        (found,) = [span for span in self.spans() if span["kind"] == "SpanKind.SERVER"]
        return found


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    made = Traced(tmp_path / "spans.jsonl")
    use(made.tracer)
    yield made
    use(NoTracer())
    made.tracer.close()


async def test_a_request_that_goes_well_has_waited_once(split: World, traced: Traced) -> None:
    request = wanted()
    with called(ClientCall(NONE, "chat", ("host", 80), "tiny", True)):
        assert await split.tokens(request) == expected(request)
    names = [span["name"] for span in traced.spans()]
    assert names == ["millrace.queue", "chat tiny"]
    told = traced.root()["attributes"]
    assert told["gen_ai.usage.output_tokens"] == 8 and told["gen_ai.usage.input_tokens"] == len(request.prompt)
    assert told["gen_ai.response.finish_reasons"] == ["length"] and "error.type" not in told
    assert (told["server.address"], told["server.port"], told["gen_ai.request.stream"]) == ("host", 80, True)


async def test_a_try_that_failed_is_an_event_and_is_waited_for_again(split: World, traced: Traced) -> None:
    split.workers["d0"].script.decode = [(1, LOSE)]
    request = wanted()
    assert await split.tokens(request) == expected(request)
    root = traced.root()
    (event,) = root["events"]
    assert event["name"] == "millrace.placed_again" and event["attributes"]["millrace.tokens"] > 0
    queues = [span for span in traced.spans() if span["name"] == "millrace.queue"]
    assert [span["attributes"]["millrace.attempt"] for span in queues] == [1, 2]
    assert "error.type" not in root["attributes"] and root["attributes"]["millrace.attempts"] == 2


async def test_a_client_that_leaves_leaves_its_span(split: World, traced: Traced) -> None:
    async with aclosing(split.router.generate(wanted())) as deltas:
        await anext(deltas)
    root = traced.root()
    assert root["attributes"]["gen_ai.usage.output_tokens"] == 1 and "error.type" not in root["attributes"]


async def test_a_request_that_fails_says_by_which_error(split: World, traced: Traced) -> None:
    for name in ("p0", "p1"):
        split.workers[name].script.before_first = [CorruptChunk("secret words")] * 100
    with pytest.raises(Unavailable):
        await split.tokens(wanted())
    root = traced.root()
    assert root["attributes"]["error.type"] and root["status"]["status_code"] == "ERROR"
    assert "secret words" not in traced.file.read_text()


async def test_where_nothing_traces_the_request_carries_nothing(split: World) -> None:
    carried: list[TraceContext | None] = []
    split.seen.finished = lambda request, *_: carried.append(request.trace)  # type: ignore[method-assign]
    await split.tokens(wanted())
    assert carried == [None]
