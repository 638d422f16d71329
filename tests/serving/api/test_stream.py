"""The bytes of a stream, its one ending, and that whoever leaves closes what was opened."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Message

from serving.errors import DeadlineExceeded, Unavailable
from serving.messages import FinishReason, Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, CountingObserver, ScriptedGenerate, app_of, calling, events, listening, saying

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
TEXT = "The river turns, é 😀."


async def stream_of(
    script: ScriptedGenerate, tokenizer: Tokenizer, body: dict[str, Any], path: str = CHAT
) -> list[Any]:
    async with calling(app_of(script, tokenizer)) as client:
        response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    data = events(response.text.splitlines())
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(item) for item in data[:-1]]


async def test_usage_so_far_in_every_chunk(tokenizer: Tokenizer) -> None:
    body = {**HELLO, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    script = ScriptedGenerate(saying(tokenizer, TEXT), cached=3)
    chunks = await stream_of(script, tokenizer, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(tokenizer.encode(TEXT))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_no_usage_unless_asked_for(tokenizer: Tokenizer) -> None:
    chunks = await stream_of(ScriptedGenerate(saying(tokenizer, TEXT)), tokenizer, HELLO)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("chunk", [1, 4])
async def test_token_ids_come_along(tokenizer: Tokenizer, chunk: int) -> None:
    script = ScriptedGenerate(saying(tokenizer, TEXT), chunk=chunk)
    chunks = await stream_of(script, tokenizer, {**HELLO, "return_token_ids": True})
    ids = [token for item in chunks for token in item["choices"][0].get("token_ids", [])]
    assert ids == tokenizer.encode(TEXT)
    assert chunks[0]["prompt_token_ids"] == list(script.started[0].prompt)


async def test_completion_stream_with_echo(tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 100}
    chunks = await stream_of(ScriptedGenerate(saying(tokenizer, TEXT)), tokenizer, body, "/v1/completions")
    whole_app = app_of(ScriptedGenerate(saying(tokenizer, TEXT)), tokenizer)
    async with calling(whole_app) as client:
        whole = (await client.post("/v1/completions", json=body)).json()
    for index, prompt in enumerate("ab"):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == prompt + TEXT
        offsets = [at for choice in mine if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
        assert offsets == whole["choices"][index]["logprobs"]["text_offset"]


async def test_an_empty_piece_is_not_sent(tokenizer: Tokenizer) -> None:
    chunks = await stream_of(ScriptedGenerate(saying(tokenizer, "😀")), tokenizer, HELLO)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "😀"]


async def test_the_error_of_one_choice_ends_all(tokenizer: Tokenizer) -> None:
    never = asyncio.Event()

    async def second_fails(request: Request, index: int) -> None:
        if request.request_id.endswith("-1"):
            raise Unavailable("no worker is left", retry_after=3)
        await never.wait()

    observer = CountingObserver()
    script = ScriptedGenerate(saying(tokenizer, TEXT), before=second_fails)
    for stream in (False, True):
        async with calling(app_of(script, tokenizer, observer=observer)) as client:
            response = await client.post(CHAT, json={**HELLO, "n": 3, "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["message"] == "no worker is left"
    assert len(script.closed) == len(script.started) == 6
    assert sorted(finish for finish, _ in observer.finished) == ["abort"] * 4 + ["error"] * 2
    assert observer.refused == [503, 503]


async def test_every_ending_is_told_once(tokenizer: Tokenizer) -> None:
    async def fail_late(request: Request, index: int) -> None:
        if request.sampling.max_tokens == 9 and index == 4:
            raise DeadlineExceeded("too late")

    observer = CountingObserver()
    script = ScriptedGenerate(saying(tokenizer, TEXT), before=fail_late)
    async with calling(app_of(script, tokenizer, observer=observer)) as client:
        for extra in ({"max_tokens": 3}, {"stop": "river"}, {"max_tokens": 9}):
            for stream in (False, True):
                await client.post(CHAT, json={**HELLO, **extra, "stream": stream})
    stopped_at = len(tokenizer.encode("The river"))
    assert observer.finished == [
        *[(FinishReason.LENGTH, 3)] * 2,
        *[(FinishReason.STOP, stopped_at)] * 2,
        *[(FinishReason.ERROR, 4)] * 2,
    ]
    assert len(observer.started) == 6


async def test_a_bug_in_mid_stream_is_an_error_event_without_details(tokenizer: Tokenizer) -> None:
    async def bug(request: Request, index: int) -> None:
        if index == 2:
            raise KeyError("secret")

    app = app_of(ScriptedGenerate(saying(tokenizer, TEXT), before=bug), tokenizer)
    async with calling(app) as client:
        streamed = await client.post(CHAT, json={**HELLO, "stream": True})
        whole = await client.post(CHAT, json=HELLO)
    last = json.loads(events(streamed.text.splitlines())[-1])
    assert last["error"]["type"] == whole.json()["error"]["type"] == "server_error"
    assert whole.status_code == 500
    assert whole.headers["x-request-id"]
    assert "secret" not in streamed.text + whole.text


async def test_a_generation_without_an_end_is_an_error(tokenizer: Tokenizer) -> None:
    async with calling(app_of(ScriptedGenerate(lambda request: []), tokenizer)) as client:
        response = await client.post(CHAT, json=HELLO)
    assert response.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_hang_up_on_a_socket_closes_the_iterators(tokenizer: Tokenizer, stream: bool, n: int) -> None:
    """Also while nothing is being sent: before the first token, and without streaming at all."""
    waiting, never = asyncio.Event(), asyncio.Event()
    started = 0

    async def wait(request: Request, index: int) -> None:
        nonlocal started
        started += 1
        if started == n:
            waiting.set()
        await never.wait()

    observer = CountingObserver()
    script = ScriptedGenerate(saying(tokenizer, TEXT), before=wait)
    app = app_of(script, tokenizer, observer=observer)
    async with listening(app) as port:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"http://127.0.0.1:{port}{CHAT}"
            calling = asyncio.create_task(client.post(url, json={**HELLO, "n": n, "stream": stream}))
            await asyncio.wait_for(waiting.wait(), timeout=60)
            calling.cancel()
            await asyncio.wait([calling])
        await asyncio.wait_for(script.all_closed.wait(), timeout=60)
        await asyncio.wait_for(app.state.in_flight.wait_idle(), timeout=60)
    assert observer.finished == [(FinishReason.ABORT, 0)] * n


async def test_stop_string_closes_the_iterator_before_the_answer_is_complete(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, TEXT))
    sent: list[bytes] = []
    closed_at_end: list[int] = []
    body = json.dumps({**HELLO, "stream": True, "stop": "river"}).encode()
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if message.get("more_body") is False:
            closed_at_end.append(len(script.closed))

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
    await app_of(script, tokenizer)({**scope, "headers": [], "server": ("door", 80)}, inbox.get, send)
    assert closed_at_end == [1]
    chunks = [json.loads(item) for item in events(b"".join(sent).decode().splitlines())[:-1]]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "The "
