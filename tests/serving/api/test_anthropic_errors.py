"""Errors and keys as the `anthropic` package knows them, from a real server on a real socket."""

from __future__ import annotations

import logging
from typing import Any

import anthropic
import pytest

from serving.errors import (
    Diverged,
    InternalError,
    MillraceError,
    Overloaded,
    Quarantined,
    RateLimited,
    Unavailable,
    WorkerLost,
)
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, ScriptedGenerate, app_of, listening, saying
from tests.serving.api.test_anthropic_client import HELLO, TEXT, client_at

ERRORS: list[tuple[MillraceError, type[anthropic.APIStatusError], int, str]] = [
    (Diverged("other", retry_after=2.2), anthropic.ConflictError, 409, "invalid_request_error"),
    (Overloaded("full", retry_after=2.2), anthropic.OverloadedError, 529, "overloaded_error"),
    (RateLimited("too many", retry_after=2.2), anthropic.RateLimitError, 429, "rate_limit_error"),
    (Unavailable("draining", retry_after=2.2), anthropic.ServiceUnavailableError, 503, "overloaded_error"),
    (WorkerLost("gone", retry_after=2.2), anthropic.ServiceUnavailableError, 503, "overloaded_error"),
    (InternalError("broken", retry_after=2.2), anthropic.InternalServerError, 500, "api_error"),
]


@pytest.mark.parametrize(("error", "kind", "status", "name"), ERRORS)
async def test_errors_become_the_clients_exceptions(
    tokenizer: Tokenizer, error: MillraceError, kind: type[anthropic.APIStatusError], status: int, name: str
) -> None:
    async def refuse(request: Request, index: int) -> None:
        raise error

    async with (
        listening(app_of(ScriptedGenerate(saying(tokenizer, "x"), before=refuse), tokenizer)) as port,
        client_at(port) as client,
    ):
        for stream in (False, True):  # a stream that never began is refused with a status of its own
            with pytest.raises(kind) as refused:
                await client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, stream=stream)
            assert (refused.value.status_code, refused.value.type) == (status, name)
            assert refused.value.response.headers["retry-after"] == "3"
            assert isinstance(refused.value.body, dict)
            assert refused.value.body["type"] == "error"
            assert refused.value.body["request_id"] == refused.value.request_id


async def test_what_is_not_to_be_sent_again_says_so(tokenizer: Tokenizer) -> None:
    async def refuse(request: Request, index: int) -> None:
        raise Quarantined("workers died of it")

    script = ScriptedGenerate(saying(tokenizer, "x"), before=refuse)
    async with listening(app_of(script, tokenizer)) as port:
        eager = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key=KEY, max_retries=2)
        async with eager as client:
            with pytest.raises(anthropic.InternalServerError):
                await client.messages.create(model=MODEL, max_tokens=9, messages=HELLO)
    assert len(script.started) == 1


async def test_an_error_in_mid_stream_is_an_event(tokenizer: Tokenizer) -> None:
    async def break_at_five(request: Request, index: int) -> None:
        if index == 5:
            raise WorkerLost("the worker is gone")

    script = ScriptedGenerate(saying(tokenizer, TEXT), before=break_at_five)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=99, messages=HELLO, stream=True)
        seen: list[str] = []
        with pytest.raises(anthropic.APIStatusError, match="the worker is gone") as broken:
            async for event in stream:
                seen += [event.type]
    assert broken.value.type == "overloaded_error"
    assert "message_delta" not in seen and "message_stop" not in seen and "content_block_delta" in seen


async def test_requests_that_cannot_be_served(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with listening(app_of(script, tokenizer, max_body_size=4096)) as port, client_at(port) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="another-model", max_tokens=9, messages=HELLO)
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]: 'image' is not supported"):
            image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
            await client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": [image]}])
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 255 maximum"):
            await client.messages.create(
                model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "mill wheel " * 200}]
            )
        with pytest.raises(anthropic.ContentTooLargeError) as large:
            await client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "x" * 5000}])
        long = await client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "mill wheel " * 200}]
        )
    assert unknown.value.type == "not_found_error" and large.value.body["error"]["type"] == "request_too_large"
    assert long.input_tokens > 256
    assert script.started == []


async def test_either_header_shows_the_key(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    other = "sk-another-key"
    script = ScriptedGenerate(saying(tokenizer, "x"))
    served = app_of(script, tokenizer, api_key=f"{KEY},{other}")
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    async with listening(served) as port:
        url = f"http://127.0.0.1:{port}"
        for key in (KEY, other):
            async with client_at(port, key) as client:
                await client.messages.create(**asked)
            headers = {"x-api-key": key, "authorization": anthropic.omit}
            async with anthropic.AsyncAnthropic(base_url=url, api_key="", default_headers=headers) as client:
                assert (await client.messages.create(**asked)).content[0].text == "x"
                assert (await client.messages.count_tokens(model=MODEL, messages=HELLO)).input_tokens > 0
        for headers in ({"x-api-key": KEY + "0", "authorization": anthropic.omit}, {"authorization": f"Basic {KEY}"}):
            wrong = anthropic.AsyncAnthropic(base_url=url, api_key="", default_headers=headers, max_retries=0)
            async with wrong as client:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await client.messages.create(**asked)
            assert refused.value.type == "authentication_error"
            assert refused.value.body["request_id"] == refused.value.request_id
            assert "x-api-key" in str(refused.value)
    assert len(script.started) == 4
    assert [request.client for request in script.started[::2]] == [request.client for request in script.started[1::2]]
    told = [record for record in caplog.records if not record.name.startswith(("anthropic", "http"))]
    assert all(KEY not in record.getMessage() and other not in record.getMessage() for record in told)
