"""Every malformed request gets its exact status and field name, and never reaches `generate`."""

from __future__ import annotations

import httpx
import pytest
from starlette.types import Message

from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import (
    KEY,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    ScriptedGenerate,
    app_of,
    calling,
    listening,
    saying,
)
from tests.serving.api.malformed import Case, cases, endless_upload, key_cases, slow_drip, strict_cases

CASES = cases(model=MODEL, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_malformed(case: Case, tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, tokenizer)) as client:
        case.check(await case.send(client))
    assert script.started == []


@pytest.mark.parametrize("case", strict_cases(model=MODEL), ids=lambda case: case.name)
async def test_strict_fields(case: Case, tokenizer: Tokenizer) -> None:
    """What is refused with --strict-fields, and ignored without."""
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, tokenizer, strict_fields=True)) as client:
        case.check(await case.send(client))
    assert script.started == []
    async with calling(app_of(script, tokenizer)) as client:
        assert (await case.send(client)).status_code == 200


def test_the_table_is_a_table() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", key_cases(model=MODEL, key=KEY), ids=lambda case: case.name)
async def test_without_the_key(case: Case, tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, tokenizer, api_key=KEY)) as client:
        case.check(await case.send(client))
    assert script.started == []


async def test_all_of_them_over_one_real_socket(tokenizer: Tokenizer) -> None:
    """A refused request leaves the server fit for the next one."""
    script = ScriptedGenerate(saying(tokenizer, "fine"))
    async with (
        listening(app_of(script, tokenizer)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        for case in CASES:
            case.check(await case.send(client))
        good = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
    assert good.json()["choices"][0]["text"] == "fine"


async def test_endless_upload_is_refused_before_it_is_read(tokenizer: Tokenizer) -> None:
    app = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, max_body_size=100_000)
    taken = 0
    taken_at_answer: list[int] = []

    async def receive() -> Message:
        nonlocal taken
        taken += 10_000
        return {"type": "http.request", "body": b"x" * 10_000, "more_body": taken < 1_000_000}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 413
            assert (b"connection", b"close") in message["headers"]
            taken_at_answer.append(taken)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await app({**scope, "raw_path": b"/v1/completions", "scheme": "http", "server": ("door", 80)}, receive, send)
    assert taken_at_answer == [110_000]


async def test_an_announced_length_is_refused_unread(tokenizer: Tokenizer) -> None:
    app = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, max_body_size=100_000)
    order: list[object] = []

    async def receive() -> Message:
        order.append("read")
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        order.append(message.get("status", "sent"))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "server": ("door", 80)}
    headers = [(b"content-length", b"100001")]
    await app({**scope, "raw_path": b"", "headers": headers}, receive, send)
    assert order[0] == 413


async def test_endless_upload_over_a_socket(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with (
        listening(app_of(script, tokenizer, max_body_size=100_000)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        response, _ = await endless_upload(client)
    assert response.status_code == 413


async def test_slow_drip(tokenizer: Tokenizer) -> None:
    app = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, body_timeout=0.2)
    async with listening(app) as port:
        answer = await slow_drip(port)
        assert app.state.in_flight.count == 0
    assert answer.startswith("HTTP/1.1 408 ")
    assert "connection: close" in answer
    assert '"code":"body_timeout"' in answer


async def test_too_long_a_prompt_says_by_how_many_tokens(tokenizer: Tokenizer) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        body = {"model": MODEL, "prompt": [1] * (MAX_MODEL_LEN + 4)}
        too_long = (await client.post("/v1/completions", json=body)).json()["error"]["message"]
        body = {"model": MODEL, "prompt": [1] * 6, "max_tokens": MAX_MODEL_LEN}
        too_much = (await client.post("/v1/completions", json=body)).json()["error"]["message"]
    assert too_long.startswith(
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested {MAX_MODEL_LEN + 5}"
        f" tokens ({MAX_MODEL_LEN + 4} in the messages, 1 in the completion). Please reduce the length of the messages"
        " or completion."
    )
    assert "5 tokens too many" in too_long
    assert f"requested {MAX_MODEL_LEN + 6} tokens (6 in the messages, {MAX_MODEL_LEN} in the completion)" in too_much
    assert "6 tokens too many" in too_much
