"""/v1/messages as its bytes are: what Claude Code sends, the events of a stream, and errors at every path below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.api.body_work import MAKES_GRAMMAR
from serving.api.settings import ServedModel
from serving.errors import WorkerLost
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, VOCAB_SIZE, CountingObserver, ScriptedGenerate, app_of, calling, saying
from tests.serving.api.test_thinking import THINKS
from tests.serving.api.test_tools import TEMPLATE, app, with_template

PATH = "/v1/messages"
SENT = json.loads((Path(__file__).parent / "recorded" / "claude_code.json").read_text())
SERVED = ServedModel(names=(MODEL,), max_model_len=65_536, vocab_size=VOCAB_SIZE, created=1)
ASKED = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}


def read(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event, which say the same type."""
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("template", ["generic", "native", "thinking"])
@pytest.mark.parametrize("sent", SENT, ids=lambda sent: sent["name"])
async def test_what_claude_code_sends_is_answered(
    tokenizer: Tokenizer, sent: dict[str, Any], template: str, strict: bool
) -> None:
    templates = {"generic": tokenizer.chat_template, "native": TEMPLATE, "thinking": TEMPLATE + THINKS}
    tokenizer = with_template(tokenizer, templates[template] or "")
    script, observer = ScriptedGenerate(saying(tokenizer, "fine")), CountingObserver()
    served = app_of(script, tokenizer, served=SERVED, observer=observer, strict_fields=strict, api_key=KEY)
    async with calling(served) as client:
        headers = {**sent["headers"], "x-api-key": KEY}
        answer = await client.post(sent["path"], json=sent["body"], headers=headers)
    assert answer.status_code == 200, answer.text
    left = set(answer.headers.get("x-millrace-ignored", "").split(", ")) - {"", "thinking"}
    assert left == set(sent["ignored"])
    if sent["path"].startswith(f"{PATH}/count_tokens"):
        assert answer.json()["input_tokens"] > 10 and script.started == []
        return
    (request,) = script.started
    shown = tokenizer.decode(request.prompt, skip_special_tokens=False)
    assert "x-anthropic-billing-header" not in shown
    assert request.session == sent["body"]["metadata"]["user_id"]
    if sent["name"] == "results":
        order = ("wheel.py", "turn()", "Error: <tool_use_error>", "TodoWrite tool hasn't")
        assert sorted(order, key=shown.index) == list(order)
    counted = {name: sent["body"][name] for name in ("messages", "system", "tools") if name in sent["body"]}
    counted["thinking"] = sent["body"].get("thinking")
    async with calling(served) as client:
        count = await client.post(f"{PATH}/count_tokens", json=counted, headers=headers)
    assert count.json() == {"input_tokens": len(request.prompt)}


async def test_the_events_of_a_stream(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "a b"), chunk=1, cached=2)
    async with calling(app_of(script, tokenizer)) as client:
        answer = await client.post(PATH, json={**ASKED, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    prompt, name = len(script.started[0].prompt), script.started[0].request_id
    usage = {"input_tokens": prompt - 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    stopped = {"stop_reason": None, "stop_sequence": None}
    head = {"id": name, "type": "message", "role": "assistant", "model": MODEL, "content": [], **stopped}
    events = read(answer.text)
    deltas = [data for kind, data in events if kind == "content_block_delta"]
    start = events[0][1]["message"]
    assert start == {**head, "usage": {**usage, "output_tokens": start["usage"]["output_tokens"]}}
    assert [data for kind, data in events[1:] if kind != "content_block_delta"] == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": {**usage, "output_tokens": len(tokenizer.encode("a b"))},
        },
        {"type": "message_stop"},
    ]
    assert [data["delta"]["text"] for data in deltas] == ["a", " b"]
    assert all(data["index"] == 0 and data["delta"]["type"] == "text_delta" for data in deltas)


def test_a_body_with_a_schema_is_read_beside_the_event_loop() -> None:
    form = {"type": "json_schema", "schema": {}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}, {"tools": [{"name": "a"}]}):
        body = json.dumps({**ASKED, **fields}).encode()
        assert any(word in body for word in MAKES_GRAMMAR)
    assert not any(word in json.dumps(ASKED).encode() for word in MAKES_GRAMMAR)


@pytest.mark.parametrize("chunk", [1, 9, 1000])
async def test_blocks_come_in_the_order_of_the_text(tokenizer: Tokenizer, chunk: int) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    _, made = app(with_template(tokenizer, THINKS), f"<think>Hm.</think>One.{call} Two.{call} Three.", chunk=chunk)
    asked = {**ASKED, "tools": [{"name": "add", "input_schema": {"type": "object"}}], "max_tokens": 500}
    async with calling(made) as client:
        whole = (await client.post(PATH, json=asked)).json()["content"]
        events = read((await client.post(PATH, json={**asked, "stream": True})).text)
    begun = [data["content_block"]["type"] for kind, data in events if kind == "content_block_start"]
    assert begun == [block["type"] for block in whole] == ["thinking", "text", "tool_use", "text", "tool_use", "text"]
    assert [whole[i]["text"] for i in (1, 3, 5)] == ["One.", " Two.", " Three."]


async def test_a_long_input_that_is_held_back_is_no_silence(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "write", "arguments": {"text": "' + "wheel " * 200 + '"}}</tool_call>'
    for eager, pings in ((False, 3), (True, 1)):
        _, made = app(with_template(tokenizer, TEMPLATE), call)
        tool = {"name": "write", "input_schema": {"type": "object"}, "eager_input_streaming": eager}
        async with calling(made) as client:
            answer = await client.post(PATH, json={**ASKED, "tools": [tool], "max_tokens": 4000, "stream": True})
        kinds = [kind for kind, _ in read(answer.text)]
        assert kinds.count("ping") >= pings if pings > 1 else kinds.count("ping") == 1
        assert (kinds.count("content_block_delta") == 1) is not eager


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, b"{}", 400, "invalid_request_error"),
        ("POST", f"{PATH}/count_tokens", b'{"messages":[]}', 400, "invalid_request_error"),
        ("POST", f"{PATH}/count_tokens", json.dumps({**ASKED, "model": "no"}).encode(), 404, "not_found_error"),
        ("GET", PATH, b"", 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", b"{}", 404, "not_found_error"),
        ("POST", PATH, b"x" * 5000, 413, "request_too_large"),
    ],
)
async def test_errors_have_anthropics_form(
    tokenizer: Tokenizer, method: str, path: str, body: bytes, status: int, kind: str
) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, max_body_size=4096)) as client:
        answer = await client.request(method, path, content=body, headers={"x-request-id": "mine"})
        other = await client.post(f"{PATH}more", content=body)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    assert other.json()["error"]["code"] == "unknown_route" and "request-id" not in other.headers


async def test_a_bug_is_an_api_error(tokenizer: Tokenizer) -> None:
    async def fail(request: Request, index: int) -> None:
        raise RuntimeError("a bug")

    script = ScriptedGenerate(saying(tokenizer, "a b"), before=fail)
    async with calling(app_of(script, tokenizer)) as client:
        answer = await client.post(PATH, json=ASKED)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")
    assert answer.json()["request_id"] == answer.headers["request-id"]
    assert "a bug" not in answer.text


async def test_a_stream_that_breaks_ends_with_an_error(tokenizer: Tokenizer) -> None:
    async def break_at_one(request: Request, index: int) -> None:
        if index == 1:
            raise WorkerLost("the worker is gone")

    script = ScriptedGenerate(saying(tokenizer, "a b"), before=break_at_one)
    async with calling(app_of(script, tokenizer)) as client:
        answer = await client.post(PATH, json={**ASKED, "stream": True})
    told = {"type": "overloaded_error", "message": "the worker is gone"}
    assert read(answer.text)[-1][1] == {"type": "error", "error": told, "request_id": answer.headers["request-id"]}


async def test_the_document_has_both_endpoints(tokenizer: Tokenizer) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        document = (await client.get("/openapi.json")).json()
    for path, name in ((PATH, "MessagesBody"), (f"{PATH}/count_tokens", "CountTokensBody")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert "messages" in document["components"]["schemas"][name]["properties"]


async def test_the_key_is_asked_for_in_either_header(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    good, bad = {"x-api-key": KEY}, {"x-api-key": KEY[:-1]}
    bearer = {"authorization": f"Bearer {KEY}"}
    async with calling(app_of(script, tokenizer, api_key=KEY)) as client:

        async def status(headers: dict[str, str], method: str = "GET", path: str = "/v1/models") -> int:
            answer: httpx.Response = await client.request(method, path, headers=headers)
            return answer.status_code

        for path in ("/v1/models", "/v1/workers", "/load"):
            assert await status(good, path=path) == await status(bearer, path=path) == 200
            assert await status({**bearer, **bad}, path=path) == 200  # some clients send a stale one beside it
            for headers in ({}, bad, {"x-api-key": ""}, {"authorization": KEY}, {"x-api-key": f"Bearer {KEY}"}):
                assert await status(headers, path=path) == 401
        assert await status(good, "POST", "/v1/chat/completions") == 400
