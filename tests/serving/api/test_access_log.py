"""Access lines: who asked what with what outcome, and never a key, whatever a client puts where."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from serving.api.callers import ApiCaller
from serving.api.keyring import KeyEntry, Keyring, key_digest, prefix_owner
from serving.log_lines import LogSetup
from serving.logs import setup_logging
from serving.messages import Request, shown_tenant
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, ScriptedGenerate, app_of, calling, listening, saying

PEPPER, SECRET = b"pepper of the tests", "5ec2e75ec2e7"
ENTRY = KeyEntry(id="aaaa", tenant="acme", digest=key_digest(PEPPER, "aaaa", SECRET))
HEADERS = {"authorization": f"Bearer mr-aaaa-{SECRET}", "x-request-id": "mine"}
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def app(tokenizer: Tokenizer, script: ScriptedGenerate | None = None) -> Any:
    made = script or ScriptedGenerate(saying(tokenizer, "x"))
    return app_of(made, tokenizer, keyring=Keyring(PEPPER, {"aaaa": ENTRY}))


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def test_an_answer_has_a_line_with_who_asked_and_no_key(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(LogSetup(role="router", form="json", access=True))
    async with calling(app(tokenizer)) as client:
        await client.post(CHAT, json=HELLO, headers=HEADERS)
        await client.get(f"/v1/models/mr-aaaa-{SECRET}?api_key={SECRET}", headers=HEADERS)
        await client.get(f"/{SECRET}%0A?key={SECRET}", headers={"authorization": SECRET})
        await client.get("/metrics")
    answered, named, unknown = found = lines(capsys)
    assert SECRET not in json.dumps(found)
    assert (answered["method"], answered["route"], answered["status"]) == ("POST", CHAT, 200)
    assert answered["key_id"] == "aaaa" and answered["tenant"] == shown_tenant(prefix_owner(PEPPER, ENTRY))
    assert answered["request_id"].startswith("mine-") and answered["milliseconds"] > 0
    assert (named["route"], named["status"]) == ("/v1/models/{name:path}", 404)
    assert (unknown["route"], unknown["status"]) == ("none", 401) and "key_id" not in unknown


async def test_without_the_flag_there_is_none(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogSetup(form="json"))
    async with calling(app(tokenizer)) as client:
        await client.post(CHAT, json=HELLO, headers=HEADERS)
    assert lines(capsys) == []


async def test_the_trace_of_a_bug_has_the_request_and_not_the_key_it_shows(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """By way of the real server, whose line it is."""

    async def broken(request: Request, index: int) -> None:
        raise RuntimeError(f"headers were {HEADERS}, caller {ApiCaller(key_id='aaaa')}, url ?api_key={SECRET}")

    setup_logging(LogSetup(role="router", form="json", access=True))
    script = ScriptedGenerate(saying(tokenizer, "x"), before=broken)
    async with listening(app(tokenizer, script)) as port, httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"http://127.0.0.1:{port}{CHAT}", json=HELLO, headers=HEADERS)
    assert answer.status_code == 500
    found = lines(capsys)
    (bug,) = (line for line in found if "exception" in line)
    assert "RuntimeError" in bug["exception"] and "headers were" in bug["exception"]
    assert SECRET not in json.dumps(found) and bug["request_id"].startswith("mine-")
    assert [line["status"] for line in found if "status" in line] == [500]
