"""CORS: pages of allowed origins may call the API and read every answer; preflights need no key and reach nothing."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from serving.api.cors import EXPOSED
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, CountingObserver, ScriptedGenerate, app_of, calling, listening, saying
from tests.house.source import ROOT

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
ALLOWED, EXPOSES = "access-control-allow-origin", "access-control-expose-headers"


class Called:
    """An API with a key that pages of one origin may call."""

    def __init__(self, tokenizer: Tokenizer, **config: Any):
        self.observer = CountingObserver()
        self.script = ScriptedGenerate(saying(tokenizer, "some words"))
        given = {"api_key": KEY, "allowed_origins": (PAGE,), **config}
        self.app = app_of(self.script, tokenizer, observer=self.observer, **given)

    async def ask(self, method: str, path: str = CHAT, **options: Any) -> httpx.Response:
        async with calling(self.app) as client:
            return await client.request(method, path, **options)

    async def preflight(self, origin: str = PAGE, headers: str = "authorization, content-type") -> httpx.Response:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": headers}
        return await self.ask("OPTIONS", headers={"origin": origin, **asked})


async def test_without_the_flag_there_is_no_cors(tokenizer: Tokenizer) -> None:
    api = Called(tokenizer, allowed_origins=())
    assert (await api.preflight()).status_code == 401
    answer = await api.ask("POST", json=HELLO, headers={"origin": PAGE, **WITH_KEY})
    assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_preflight_needs_no_key_and_reaches_nothing(tokenizer: Tokenizer) -> None:
    api = Called(tokenizer)
    answer = await api.preflight()
    assert answer.status_code == 200 and answer.headers[ALLOWED] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    refused = await api.preflight(OTHER)
    assert refused.status_code == 400 and ALLOWED not in refused.headers
    assert (api.observer.started, api.observer.refused, api.script.started) == ([], [], [])


async def test_methods_headers_and_credentials_are_as_the_flags_say(tokenizer: Tokenizer) -> None:
    api = Called(
        tokenizer, allowed_origins=("*",), allowed_methods=("GET",), allowed_headers=("x-mine",), allow_credentials=True
    )
    assert (await api.preflight()).status_code == 400, "POST is not among the methods"
    get = {"origin": PAGE, "access-control-request-method": "GET"}
    fine = await api.ask("OPTIONS", headers={**get, "access-control-request-headers": "x-mine"})
    assert fine.status_code == 200 and fine.headers["access-control-allow-credentials"] == "true"
    assert fine.headers[ALLOWED] == PAGE, "credentials go to a named origin alone"
    assert (await api.ask("OPTIONS", headers={**get, "access-control-request-headers": "x-its"})).status_code == 400


async def test_every_error_can_be_read(tokenizer: Tokenizer) -> None:
    async def break_down(request: Request, index: int) -> None:
        raise RuntimeError("a bug")

    api = Called(tokenizer, rate_limit_requests=1)
    own = {"origin": PAGE, **WITH_KEY}
    statuses = []
    for headers in ({"origin": PAGE}, own, own, own):
        answer = await api.ask("POST", json=HELLO, headers=headers)
        api.script.before = break_down if answer.status_code == 401 else None
        statuses.append(answer.status_code)
        assert answer.headers[ALLOWED] == PAGE and "x-request-id" in answer.headers[EXPOSES], answer.status_code
        assert ("error" in answer.json()) is (answer.status_code != 200)
    assert statuses == [401, 500, 200, 429]
    assert (await api.ask("GET", "/nowhere", headers=own)).headers[ALLOWED] == PAGE
    assert ALLOWED not in (await api.ask("POST", json=HELLO, headers={"origin": OTHER, **WITH_KEY})).headers


async def test_a_stream_comes_piece_by_piece(tokenizer: Tokenizer) -> None:
    api = Called(tokenizer)
    async with (
        listening(api.app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        client.stream("POST", CHAT, json={**HELLO, "stream": True}, headers={"origin": PAGE, **WITH_KEY}) as answer,
    ):
        pieces = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert answer.headers[ALLOWED] == PAGE and answer.headers["content-type"].startswith("text/event-stream")
    assert len(pieces) > 3 and pieces[-1] == "data: [DONE]"


@pytest.mark.parametrize("folder", ["serving/api", "router", "deploy"])
def test_every_header_of_ours_is_exposed(folder: str) -> None:
    text = "\n".join(path.read_text() for path in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r'"(x-(?:millrace|should)-[a-z-]+[a-z])"', text))
    assert named <= set(EXPOSED), "a page could not read it"


async def test_limits_are_exposed_as_they_are_called(tokenizer: Tokenizer) -> None:
    api = Called(tokenizer, rate_limit_requests=60, rate_limit_tokens=6000)
    answer = await api.ask("POST", json={**HELLO, "frequency": 1}, headers={"origin": PAGE, **WITH_KEY})
    assert answer.status_code == 200
    told = {name for name in answer.headers if name.startswith("x-")}
    assert "x-millrace-ignored" in told and "x-ratelimit-reset-tokens" in told
    assert told <= set(answer.headers[EXPOSES].split(", "))
