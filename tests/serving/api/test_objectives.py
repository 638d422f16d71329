"""What a request is promised: body before header before class, within bounds, and told to the router as it was said."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.objectives import PromiseReader
from serving.api.plan import RequestHead, RequestIds
from serving.api.schema import DAY_MS, MOST_PRIORITY, SamplingBody
from serving.errors import InvalidRequest, Overloaded
from serving.messages import FinishReason, Request, Slo
from serving.service_class import SERVICE_CLASSES, ServiceClass
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, CountingObserver, ScriptedGenerate, app_of, calling, saying

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
CLASSES = {
    **SERVICE_CLASSES,
    "gold": ServiceClass(name="gold", ttft_slo_ms=300.0, tpot_slo_ms=30.0, priority=-200),
}


class Asked:
    """An API whose clock stands still, and the request that came of each call."""

    def __init__(self, tokenizer: Tokenizer, **options: Any):
        self.now = 1000.0
        self.script = ScriptedGenerate(saying(tokenizer, "x"))
        options = {"classes": CLASSES, "clock": lambda: self.now, **options}
        self.app = app_of(self.script, tokenizer, **options)

    async def post(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        async with calling(self.app) as client:
            return await client.post(CHAT, json={**HELLO, **fields}, headers=headers)

    async def request(self, headers: dict[str, str] | None = None, **fields: Any) -> Request:
        answer = await self.post(headers, **fields)
        assert answer.status_code == 200, answer.text
        return self.script.started[-1]


@pytest.fixture
def asked(tokenizer: Tokenizer) -> Asked:
    return Asked(tokenizer)


async def test_a_request_that_says_nothing_is_of_the_standard_class_without_objectives(asked: Asked) -> None:
    request = await asked.request()
    assert (request.slo, request.service_class, request.priority) == (Slo(), "standard", 0)
    assert (request.session, request.deadline) == ("", None)


async def test_a_request_knows_whether_it_is_alone_in_its_response(asked: Asked) -> None:
    """One of several is not refused alone (router.worth)."""
    assert (await asked.request()).alone
    await asked.post(n=2)
    assert [request.alone for request in asked.script.started[1:]] == [False, False]


async def test_body_goes_before_header_and_that_before_the_class(asked: Asked) -> None:
    headers = {"x-ttft-slo-ms": "700", "x-tpot-slo-ms": "70", "x-service-class": "gold", "x-priority": "-3"}
    of_class = await asked.request(service_class="gold")
    assert of_class.slo == Slo(ttft_ms=300.0, tpot_ms=30.0) and of_class.priority == -200
    of_header = await asked.request(headers)
    assert of_header.slo == Slo(ttft_ms=700.0, tpot_ms=70.0)
    assert (of_header.service_class, of_header.priority) == ("gold", -203)
    of_body = await asked.request(headers, ttft_slo_ms=900.0, priority=5, service_class="batch")
    assert of_body.slo == Slo(ttft_ms=900.0, tpot_ms=70.0)
    assert (of_body.service_class, of_body.priority) == ("batch", 105)


async def test_the_default_class_is_the_configured_one(tokenizer: Tokenizer) -> None:
    request = await Asked(tokenizer, default_service_class="gold").request()
    assert (request.service_class, request.slo.ttft_ms) == ("gold", 300.0)


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({}, {"service_class": "golden"}, "service_class"),
        ({"x-service-class": "golden"}, {}, "x-service-class"),
        ({}, {"ttft_slo_ms": 0}, "ttft_slo_ms"),
        ({}, {"tpot_slo_ms": 86_400_001}, "tpot_slo_ms"),
        ({"x-ttft-slo-ms": "0"}, {}, "x-ttft-slo-ms"),
        ({"x-ttft-slo-ms": "inf"}, {}, "x-ttft-slo-ms"),
        ({"x-tpot-slo-ms": "nan"}, {}, "x-tpot-slo-ms"),
        ({"x-tpot-slo-ms": "86400001"}, {}, "x-tpot-slo-ms"),
        ({"x-tpot-slo-ms": "fast"}, {}, "x-tpot-slo-ms"),
        ({}, {"priority": MOST_PRIORITY + 1}, "priority"),
        ({}, {"priority": 1.5}, "priority"),
        ({"x-priority": str(-MOST_PRIORITY - 1)}, {}, "x-priority"),
        ({"x-priority": "--1"}, {}, "x-priority"),
        ({"x-request-timeout": "0"}, {}, "x-request-timeout"),
        ({"x-request-timeout": "86401"}, {}, "x-request-timeout"),
        ({"x-request-timeout": "soon"}, {}, "x-request-timeout"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(
    asked: Asked, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    answer = await asked.post(headers, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert not asked.script.started


async def test_an_unknown_class_is_told_which_there_are(asked: Asked) -> None:
    message = (await asked.post(service_class="golden")).json()["error"]["message"]
    assert "golden" in message and all(name in message for name in CLASSES)


async def test_sessions_come_from_the_header_the_cache_key_or_the_user(asked: Asked) -> None:
    assert (await asked.request(user="u")).session == "u"
    assert (await asked.request(user="u", prompt_cache_key="k")).session == "k"
    assert (await asked.request({"x-session-id": "s"}, user="u", prompt_cache_key="k")).session == "s"
    long = (await asked.request(user="u" * 10_000)).session
    assert 0 < len(long) <= 128 and long != (await asked.request(user="u" * 9_999)).session


async def test_a_timeout_becomes_a_deadline_on_the_routers_clock(asked: Asked) -> None:
    assert (await asked.request({"x-request-timeout": "2.5"})).deadline == 1002.5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_hangs_ends_at_its_deadline(tokenizer: Tokenizer, stream: bool) -> None:
    """A 504, or the error of a stream that had begun."""

    async def hang(request: Request, index: int) -> None:
        if index or not stream:
            await asyncio.Event().wait()

    script, observer = ScriptedGenerate(saying(tokenizer, "hello there"), before=hang), CountingObserver()
    async with calling(app_of(script, tokenizer, observer=observer)) as client:
        headers = {"x-request-timeout": "0.05"}
        answer = await client.post(CHAT, json={**HELLO, "stream": stream, "max_tokens": 9}, headers=headers)
    assert answer.status_code == (200 if stream else 504)
    assert '"code":"deadline"' in answer.text and "[DONE]" not in answer.text
    assert len(script.closed) == 1
    assert [finish for finish, _ in observer.finished] == [FinishReason.ERROR], "the client has not left"


async def test_a_refusal_for_good_names_no_time(tokenizer: Tokenizer) -> None:
    """And one with a time says it, rounded up."""
    for retry_after, shown in ((None, None), (2.2, "3")):

        async def refuse(request: Request, index: int, after: float | None = retry_after) -> None:
            raise Overloaded("late", code="slo", retry_after=after)

        script = ScriptedGenerate(saying(tokenizer, "x"), before=refuse)
        async with calling(app_of(script, tokenizer)) as client:
            answer = await client.post(CHAT, json=HELLO)
        assert (answer.status_code, answer.headers.get("retry-after")) == (429, shown)


@given(
    headers=st.fixed_dictionaries(
        {},
        optional={
            "x-ttft-slo-ms": st.text(max_size=12) | st.floats().map(str) | st.integers().map(str),
            "x-tpot-slo-ms": st.floats(0, 1e9).map(str),
            "x-priority": st.text(max_size=6) | st.integers(-99, 99).map(str),
            "x-request-timeout": st.text("0123456789.e-", max_size=8),
            "x-service-class": st.sampled_from([*CLASSES, "golden", " gold "]),
            "x-session-id": st.text(max_size=300),
        },
    )
)
def test_any_headers_make_a_promise_within_bounds_or_are_refused_by_name(headers: dict[str, str]) -> None:
    head = RequestHead(ids=RequestIds(shown="r", unique="r"), headers=headers, arrived=50.0)
    try:
        promise = PromiseReader(CLASSES, "standard").promise(SamplingBody(), head)
    except InvalidRequest as error:
        assert error.param in headers
        return
    for objective in (promise.slo.ttft_ms, promise.slo.tpot_ms):
        assert objective is None or 0 < objective <= DAY_MS
    assert promise.deadline is None or 50.0 < promise.deadline <= 50.0 + 86_400
    assert abs(promise.priority - CLASSES[promise.service_class].priority) <= MOST_PRIORITY
    assert len(promise.session) <= 128


async def test_the_router_is_told_which_key_a_request_came_with_and_not_the_key(tokenizer: Tokenizer) -> None:
    asked = Asked(tokenizer, api_key="sk-one,sk-two")
    of_one = await asked.request({"authorization": "Bearer sk-one"}, cache_salt="shared")
    of_two = await asked.request({"authorization": "Bearer sk-two"}, cache_salt="shared")
    again = await asked.request({"authorization": "Bearer sk-one"})
    assert of_one.client == again.client != of_two.client and "sk-" not in of_one.client
    assert (await Asked(tokenizer).request()).client == ""
