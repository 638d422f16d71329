"""One trace shows a request across router, prefill, decode and KV pool, as four processes write it to one file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flow.server import MillraceServer, wait_until

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, PARENT = "0x0af7651916cd43dd8448eb211c80319c", "0xb7ad6b7169203331"
PHASES = {"millrace.queue", "millrace.prefill", "millrace.handoff", "millrace.decode"}
OF_TWO = ("millrace.fetch", "millrace.pool.lookup", "millrace.pool.get")  # prefill and decode worker ask the pool
SECRET = "the-key-of-a-client"
PROMPT = "unmistakable words of a prompt"
ROLES = ("prefill", "decode")
OTHER = {"messages": [{"role": "user", "content": "others"}], "max_tokens": 2}
OFTEN = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
Spans = list[dict[str, Any]]


def spans_of(file: Path, trace: str = TRACE) -> Spans:
    lines = file.read_text().splitlines() if file.exists() else []
    return [span for span in map(json.loads, lines) if span["context"]["trace_id"] == trace]


def instance(span: dict[str, Any]) -> str:
    """The process that made it."""
    name: str = span["resource"]["attributes"]["service.instance.id"]
    return name


def between(span: dict[str, Any]) -> tuple[float, float]:
    """Seconds."""
    first, last = (datetime.fromisoformat(span[name]).timestamp() for name in ("start_time", "end_time"))
    return first, last


def covered(whole: tuple[float, float], parts: Iterable[tuple[float, float]]) -> float:
    """The share of `whole` during which some part runs."""
    at, total = whole[0], 0.0
    for first, last in sorted(parts):
        first, last = max(first, at), min(last, whole[1])
        if last > first:
            total, at = total + last - first, last
    return total / (whole[1] - whole[0])


@pytest.mark.thorough
def test_one_trace_shows_the_request_across_four_processes(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    flags = (str(tiny_path), "--served-model-name", "tiny", "--dtype", "float32", "--kernels", "torch")
    flags += ("--prefill", "1", "--decode", "1", "--kvcache", "1", "--api-key", SECRET)
    flags += ("--otlp-traces-endpoint", f"file://{file}", "--log-format", "json", "--access-log")
    headers = {"authorization": f"Bearer {SECRET}", "traceparent": CLIENT, "tracestate": "vendor=1"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT * 8}], "max_tokens": 300}
    body |= {"ignore_eos": True, "temperature": 0, "stream": False}
    with MillraceServer(*flags, workers=("prefill-0", "decode-0"), environ=OFTEN) as server:
        wait_until(lambda: server.log().count("the KV pool is kvcache-0@") == 2, 90, "every worker knows the pool")
        unsampled = {**headers, "traceparent": CLIENT[:-2] + "00"}
        assert httpx.post(f"{server.url}/v1/chat/completions", json={**body, **OTHER}, headers=unsampled, timeout=120)
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        wait_until(lambda: {*PHASES} <= {span["name"] for span in spans_of(file)}, 30, "the spans are exported")
        wait_until(lambda: server.metric("trace_spans_total", outcome="exported") > 0, 30, "they are counted")
        assert server.metric("trace_spans_total", outcome="dropped") == 0
        others = explained(server, file, body, headers)
    spans = spans_of(file)
    by_name = {span["name"]: span for span in spans}
    root = by_name["chat tiny"]
    assert root["kind"] == "SpanKind.SERVER" and root["parent_id"] == PARENT
    once = [span["name"] for span in spans if span["name"] not in OF_TWO]
    assert len(once) == len(set(once))
    told = root["attributes"]
    assert told["gen_ai.usage.output_tokens"] == 300 and told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.provider.name"] == "millrace" and told["gen_ai.request.temperature"] == 0
    children = {name: span for name, span in by_name.items() if span["parent_id"] == root["context"]["span_id"]}
    assert children.keys() >= PHASES
    fetches = {span["context"]["span_id"]: instance(span) for span in spans if span["name"] == "millrace.fetch"}
    assert sorted(fetches.values()) == ["decode-0", "prefill-0"], "the decode worker asks for what it may fetch itself"
    assert {span["parent_id"] for span in spans if span["name"] == "millrace.pool.lookup"} <= fetches.keys()
    roles = {name: instance(span) for name, span in by_name.items()}
    assert roles["millrace.prefill"] == roles["millrace.handoff"] == "prefill-0"
    assert (roles["millrace.decode"], roles["millrace.pool.lookup"]) == ("decode-0", "kvcache-0")
    assert len(set(roles.values())) == 4
    assert SECRET not in file.read_text() and PROMPT not in file.read_text()
    check_log(server.log(), [200] * (2 + others))


def explained(server: MillraceServer, file: Path, body: dict[str, Any], headers: dict[str, str]) -> int:
    """Phases cover at least 98 % of a request. How many were sent to see it: others may take the machine's cores
    between two phases, but not of every request.
    """
    shares: list[float] = []
    while not shares or shares[-1] <= 0.98:
        assert len(shares) < 8, f"phases cover too little of every request: {shares}"
        shares.append(explained_share(server, file, body, headers, f"{len(shares) + 1:032x}"))
    return len(shares)


def explained_share(
    server: MillraceServer, file: Path, body: dict[str, Any], headers: dict[str, str], trace: str
) -> float:
    """The share of one request that its phases cover."""
    mine = {**headers, "traceparent": CLIENT.replace(TRACE[2:], trace)}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=mine, timeout=120).status_code == 200
    names = {*PHASES, "chat tiny"}
    wait_until(lambda: names <= {span["name"] for span in spans_of(file, f"0x{trace}")}, 30, "the spans are exported")
    spans = spans_of(file, f"0x{trace}")
    (root,) = (span for span in spans if span["name"] == "chat tiny")
    inside = [span for span in spans if span["parent_id"] == root["context"]["span_id"]]
    return covered(between(root), map(between, inside))


def check_log(text: str, statuses: list[int]) -> None:
    """Every line of every process is an object, and none has a key or a prompt."""
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["role"] for line in lines} == {"serve", "prefill", "decode", "kvcache"}
    made = {
        role: {line["generation"] for line in lines if line["role"] == role and "generation" in line} for role in ROLES
    }
    assert len(made["prefill"]) == 1 and made["prefill"] == made["decode"], "they hand KV to each other"
    assert {line["name"] for line in lines} >= {"serve", "prefill-0", "decode-0", "kvcache-0"}
    (ended,) = (line for line in lines if line.get("trace_id") == TRACE[2:] and "300 output tokens" in line["message"])
    assert ended["class"] == "standard" and ended["request_id"].startswith("chatcmpl-")
    assert [line["status"] for line in lines if line.get("route") == "/v1/chat/completions"] == statuses
    assert SECRET not in text and PROMPT not in text


def test_what_nothing_covers_is_seen() -> None:
    assert covered((0.0, 10.0), [(0.0, 4.0), (3.0, 5.0), (6.0, 12.0)]) == pytest.approx(0.9)
