"""API keys with tenants over the API: who a request is of, what its key may, and what it is told."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from serving.api.body_work import BodyWork
from serving.api.keyring import KeyEntry, Keyring, key_digest
from serving.api.rate_limit import KeyLimits
from serving.errors import InternalError
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, ScriptedGenerate, app_of, calling, saying

PEPPER = b"pepper of the tests"
SECRET = "5ec2e7"
CHAT, MESSAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/messages", "/v1/embeddings"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10}


def entry(key_id: str, tenant: str, **fields: Any) -> KeyEntry:
    return KeyEntry(id=key_id, tenant=tenant, digest=key_digest(PEPPER, key_id, SECRET), **fields)


ENTRIES = (entry("aaaa", "one"), entry("aaab", "one"), entry("bbbb", "two"), entry("oooo", "ops", operator=True))


class Api:
    def __init__(self, tokenizer: Tokenizer, *entries: KeyEntry, **options: Any):
        self.now = 0.0
        self.script = ScriptedGenerate(saying(tokenizer, "x"))
        self.keys = Keyring(PEPPER, {one.id: one for one in entries or ENTRIES})
        clocks: dict[str, Any] = {"clock": lambda: self.now, "wall_clock": lambda: self.now}
        self.app = app_of(self.script, tokenizer, keyring=self.keys, **clocks, **options)

    async def ask(self, key_id: str, path: str = CHAT, method: str = "POST", **fields: Any) -> Any:
        headers = {"authorization": f"Bearer mr-{key_id}-{SECRET}", **fields.pop("headers", {})}
        body = {**HELLO, **fields} if method == "POST" else None
        async with calling(self.app) as client:
            return await client.request(method, path, json=body, headers=headers)

    async def request(self, key_id: str, path: str = CHAT, **fields: Any) -> Request:
        answer = await self.ask(key_id, path, **fields)
        assert answer.status_code == 200, answer.text
        return self.script.started[-1]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/completions", "/v1/responses", EMBEDDINGS])
async def test_every_endpoint_salts_with_the_tenant_of_the_key(tokenizer: Tokenizer, path: str) -> None:
    api = Api(tokenizer)
    given: dict[str, Any] = {
        "/v1/completions": {"prompt": "x", "messages": None},
        "/v1/responses": {"input": "x", "messages": None, "max_tokens": None},
        EMBEDDINGS: {"input": "x", "messages": None, "max_tokens": None},
    }.get(path, {})
    roots = {name: (await api.request(name, path, **given)).tenant for name in ("aaaa", "aaab", "bbbb")}
    assert roots["aaaa"] == roots["aaab"] != roots["bbbb"] and all(roots.values())
    salted = (await api.request("bbbb", path, **given, cache_salt=roots["aaaa"])).tenant
    assert salted not in roots.values(), "naming another's tenant leads nowhere"
    first, second = [(await api.request("aaaa", path, **given, cache_salt=salt)).tenant for salt in "xy"]
    assert len({first, second, roots["aaaa"]}) == 3, "a tenant may still keep its own users apart"


async def test_keys_of_the_flag_are_as_before_beside_a_file(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, api_key=KEY)
    own = {"authorization": f"Bearer {KEY}"}
    plain = await api.request("", headers=own, cache_salt="s")
    assert plain.tenant == "s" and len(plain.client) == 16
    assert (await api.ask("", "/v1/workers", "GET", headers=own)).status_code == 200
    stored = await api.request("aaaa")
    assert stored.client == "tenant one" and SECRET not in repr(stored)


@pytest.mark.parametrize("shown", [f"mr-aaaa-{SECRET}0", f"mr-zzzz-{SECRET}", "mr-aaaa", KEY, ""])
async def test_what_is_no_key_is_a_401_and_leaves_nothing_behind(tokenizer: Tokenizer, shown: str) -> None:
    api = Api(tokenizer)
    refused = await api.ask("", headers={"authorization": f"Bearer {shown}"})
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert SECRET not in refused.text and "x-ratelimit-limit-requests" not in refused.headers
    assert api.app.state.callers.refused == 1 and not api.script.started


async def test_a_key_expires_and_is_revoked_while_it_serves(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, entry("aaaa", "one", expires=10), entry("bbbb", "two"))
    assert (await api.ask("aaaa")).status_code == (await api.ask("bbbb")).status_code == 200
    api.now = 10.0
    assert (await api.ask("aaaa")).status_code == 401
    api.keys.replace({})
    assert (await api.ask("bbbb")).status_code == 401


async def test_each_key_has_its_own_limits_exactly(tokenizer: Tokenizer) -> None:
    limits = [KeyLimits(requests=20), KeyLimits(requests=5), KeyLimits()]
    names = ("aaaa", "aaab", "bbbb")
    entries = [entry(name, "one", limits=limit) for name, limit in zip(names, limits, strict=True)]
    api = Api(tokenizer, *entries)
    for minute in range(2):
        api.now = 60.0 * minute
        asked = [(name, api.ask(name)) for _ in range(70) for name in names]
        statuses = [answer.status_code for answer in await asyncio.gather(*(one for _, one in asked))]
        came = Counter((name, status) for (name, _), status in zip(asked, statuses, strict=True))
        wanted = {("aaaa", 200): 20, ("aaaa", 429): 50, ("aaab", 200): 5, ("aaab", 429): 65, ("bbbb", 200): 70}
        assert came == wanted


async def test_a_key_has_so_many_requests_in_progress_and_each_that_ends_makes_room(tokenizer: Tokenizer) -> None:
    go, running = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(request: Request, index: int) -> None:
        if index == 0:
            running.release()
        await go.wait()

    api = Api(tokenizer, entry("aaaa", "one", limits=KeyLimits(concurrent=3)), entry("bbbb", "two"))
    api.script.before = wait
    asking = [asyncio.create_task(api.ask("aaaa")) for _ in range(200)]
    await asyncio.wait_for(asyncio.gather(*(running.acquire() for _ in range(3))), 60)
    refused = await api.ask("aaaa")
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"] == {
        "message": "Rate limit reached on concurrent requests: Limit 3, Running 3, Requested 1.",
        "type": "requests",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    go.set()
    assert Counter(answer.status_code for answer in await asyncio.gather(*asking)) == {200: 3, 429: 197}
    assert (await api.ask("aaaa")).status_code == 200, "their places are free again"


async def test_what_a_key_may_not_ask_for_is_a_403(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, entry("aaaa", "one", classes=("batch", "standard"), priority=5), entry("bbbb", "two"))
    for fields, code in (
        ({"service_class": "interactive"}, "class_not_allowed"),
        ({"headers": {"x-service-class": "interactive"}}, "class_not_allowed"),
        ({"service_class": "standard", "priority": 4}, "priority_not_allowed"),
    ):
        for path in (CHAT, MESSAGES):
            refused = await api.ask("aaaa", path, **fields)
            assert refused.status_code == 403, refused.text
            assert refused.json()["error"]["type"] == "permission_error"
            assert path == MESSAGES or refused.json()["error"]["code"] == code
    assert (await api.request("aaaa", service_class="standard", priority=5)).priority == 5
    assert (await api.request("bbbb", service_class="interactive", priority=-5)).service_class == "interactive"


async def test_a_request_that_names_no_class_gets_one_that_its_key_may_have(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, entry("aaaa", "one", classes=("batch",)))
    assert (await api.request("aaaa")).service_class == "batch"


@pytest.mark.parametrize("path", ["/audit", "/load", "/v1/workers"])
async def test_what_concerns_all_tenants_is_for_operators(tokenizer: Tokenizer, path: str) -> None:
    api = Api(tokenizer)
    assert (await api.ask("aaaa", path, "GET")).status_code == 403
    assert (await api.ask("oooo", path, "GET")).status_code == 200


async def test_a_session_of_one_tenant_is_not_anothers_of_that_name(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer)
    sessions = [(await api.request(name, user="talk")).session for name in ("aaaa", "aaab", "bbbb")]
    assert sessions[0] == sessions[1] != sessions[2]
    assert (await api.request("aaaa")).session == ""


async def test_requests_are_explained_to_their_tenant_alone(tokenizer: Tokenizer) -> None:
    class Log:
        def placement(self, request_id: str) -> None: ...

        def explain(self, request_id: str) -> dict[str, str]:
            return {"id": request_id}

        def workers(self) -> dict[str, str]:
            return {}

    api = Api(tokenizer, placements=Log())
    name = (await api.ask("aaaa", cache_salt="s")).json()["id"]
    salt = {"headers": {"x-cache-salt": "s"}}
    found = [await api.ask(one, f"/v1/requests/{name}/explain", "GET", **salt) for one in ("aaaa", "aaab", "bbbb")]
    assert [answer.status_code for answer in found] == [200, 200, 404]


async def test_long_bodies_are_read_elsewhere_with_the_same_rights(tokenizer: Tokenizer) -> None:
    """In a process of its own, which gets the owner of the prefixes and no key."""
    api = Api(tokenizer, entry("aaaa", "one", classes=("batch",)))
    bodies: BodyWork = api.app.state.bodies
    short = await api.request("aaaa")
    await bodies.start()
    try:
        long = await api.request("aaaa", metadata={"padding": "x" * 4000})
        assert (long.tenant, long.service_class) == (short.tenant, "batch")
    finally:
        await bodies.close()


async def test_no_secret_reaches_the_log(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def break_down(request: Request, index: int) -> None:
        raise InternalError("a bug")

    api = Api(tokenizer)
    with caplog.at_level(logging.DEBUG):
        await api.ask("aaaa")
        await api.ask("zzzz")
        api.script.before = break_down
        await api.ask("aaaa")
    told = caplog.text + repr(api.keys.rights(ENTRIES[0])) + repr(replace(ENTRIES[0]))
    assert "a bug" in told and SECRET not in told and PEPPER.decode() not in told


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": MODEL, "prompt": "x"}),
        ("/detokenize", {"model": MODEL, "tokens": [1]}),
        (f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": HELLO["messages"]}),
    ],
)
async def test_counting_tokens_counts_as_a_request_and_uses_none(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    api = Api(tokenizer, entry("aaaa", "one", limits=KeyLimits(requests=2, tokens=100)))
    given = {**dict.fromkeys(HELLO), **body}
    first, second, third = [await api.ask("aaaa", path, **given) for _ in range(3)]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429), first.text
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert second.headers["x-ratelimit-remaining-tokens"] == "100" and "retry-after" in third.headers
