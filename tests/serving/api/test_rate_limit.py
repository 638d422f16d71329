"""Rate limits: buckets never give more than they have, keys do not share, memory is bounded, and answers say so."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api import rate_limit
from serving.api.rate_limit import MINUTE, KeyLimits, LimitReservation, RateLimiter, TokenBucket, shown_seconds
from serving.errors import ConcurrencyLimited, RateLimited, TokenRateLimited, Unavailable
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, ScriptedGenerate, app_of, calling, saying

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10}

AMOUNTS = st.floats(0.0, 200.0)
EVENTS = st.lists(st.tuples(st.floats(0.0, 90.0), st.sampled_from(["take", "put"]), AMOUNTS), max_size=40)


@given(capacity=st.integers(1, 150), events=EVENTS)
def test_a_bucket_gives_what_a_minute_brings_and_holds_what_a_minute_brings(
    capacity: int, events: list[tuple[float, str, float]]
) -> None:
    bucket, now, given_out, put_back = TokenBucket(capacity, capacity, 0.0), 0.0, 0.0, 0.0
    for passed, what, amount in events:
        now += passed
        before = bucket.level(now)
        assert 0.0 <= before <= capacity
        if what == "put":
            bucket.put(amount, now)
            put_back += amount
        else:
            taken = bucket.take(amount, now)
            assert taken is (amount <= before)
            given_out += amount * taken
        assert given_out <= capacity * (1 + now / MINUTE) + put_back + 1e-6


@given(capacity=st.integers(1, 1000), used=st.integers(0, 1000), wanted=st.integers(1, 1200))
def test_whoever_waits_as_long_as_told_gets_it(capacity: int, used: int, wanted: int) -> None:
    bucket = TokenBucket(capacity, capacity, 0.0)
    bucket.take(min(used, capacity), 0.0)
    wait = bucket.seconds_until(wanted, 0.0)
    if wait is None:
        assert wanted > capacity
        return
    if wait > 0.01:
        assert not bucket.take(wanted, wait * 0.99 - 1e-6)
    assert bucket.take(wanted, wait + 1e-6)


def test_a_clock_that_steps_back_fills_nothing() -> None:
    bucket = TokenBucket(10.0, 10.0, 100.0)
    assert bucket.take(10, 100.0) and not bucket.take(1, 50.0) and not bucket.take(1, 100.0)
    assert bucket.take(1, 106.0), "nor does it empty it"


def test_keys_are_apart_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "MOST_ACCOUNTS", 3)
    limiter = RateLimiter(KeyLimits(requests=1))
    held = limiter.open("a", None, 0.0)
    limiter.open("b", None, 0.0).close(0.0)
    for number in range(50):
        limiter.open(str(number), None, 0.0).close(0.0)
        assert len(limiter) <= 3
    with pytest.raises(RateLimited):
        limiter.open("a", None, 0.0)  # never forgotten while it has a request in progress
    held.close(0.0)


def test_what_did_not_come_is_given_back_once() -> None:
    limiter = RateLimiter(KeyLimits(tokens=100))
    first, second, third = (limiter.open("k", None, 0.0) for _ in range(3))
    first.spend(90, 0.0)
    with pytest.raises(
        TokenRateLimited, match=r"Limit 100, Used 90, Requested 20\. Please try again in 6s\."
    ) as caught:
        second.spend(20, 0.0)
    assert caught.value.retry_after == pytest.approx(6.0)
    first.used = 10
    first.close(0.0)
    with pytest.raises(AssertionError):
        first.close(0.0)
    second.spend(20, 0.0)
    assert second.headers(0.0)["x-ratelimit-remaining-tokens"] == "70"
    with pytest.raises(TokenRateLimited, match="too large") as caught:
        third.spend(101, 0.0)
    assert caught.value.retry_after is None


def test_without_limits_nothing_is_counted() -> None:
    limiter = RateLimiter()
    for _ in range(1000):
        held = limiter.open("k", None, 0.0)
        held.spend(10**9, 0.0)
        assert held.headers(0.0) == {}


def test_a_key_has_its_own_limits_and_the_servers_where_it_has_none() -> None:
    limiter, own = RateLimiter(KeyLimits(requests=5, tokens=50)), KeyLimits(requests=1)
    assert limiter.open("k", own, 0.0).headers(0.0)["x-ratelimit-limit-tokens"] == "50"
    with pytest.raises(RateLimited):
        limiter.open("k", own, 0.0)
    limiter.open("k", KeyLimits(requests=2), 0.0)  # the file has changed: one was used, one is left
    with pytest.raises(RateLimited):
        limiter.open("k", KeyLimits(requests=2), 0.0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(0, 90)),
        st.tuples(st.just("open"), st.integers(0, 60)),
        st.tuples(st.just("close"), st.integers(0, 9), st.integers(0, 60), st.booleans()),
    ),
    max_size=60,
)


@given(requests=st.integers(1, 6), tokens=st.integers(1, 120), concurrent=st.integers(1, 4), steps=STEPS)
def test_no_order_of_events_gives_more_than_the_limits(
    requests: int, tokens: int, concurrent: int, steps: list[tuple[object, ...]]
) -> None:
    """Counted apart: what came and stayed never passes what was there at first and what the time has brought."""
    limiter = RateLimiter(KeyLimits(requests=requests, tokens=tokens, concurrent=concurrent))
    now, running, came, used = 0.0, list[tuple[LimitReservation, int]](), 0, 0
    for step in steps:
        if step[0] == "pass":
            now += float(step[1])  # type: ignore[arg-type]
        elif step[0] == "open":
            try:
                held = limiter.open("k", None, now)
            except ConcurrencyLimited:
                assert len(running) == concurrent
                continue
            except RateLimited:
                continue
            wanted = int(step[1])  # type: ignore[call-overload]
            try:
                held.spend(wanted, now)
            except TokenRateLimited:
                held.void = True
                held.close(now)
                continue
            running.append((held, wanted))
            came, used = came + 1, used + wanted
        elif running:
            held, wanted = running.pop(int(step[1]) % len(running))  # type: ignore[call-overload]
            held.used, held.void = min(wanted, int(step[2])), bool(step[3])  # type: ignore[call-overload]
            held.close(now)
            came -= held.void
            used -= wanted if held.void else wanted - held.used
        account = limiter.account("k", None, now)
        assert account.running == len(running) <= concurrent
        assert came <= requests * (1 + now / MINUTE) + 1e-6 and used <= tokens * (1 + now / MINUTE) + 1e-6
        assert account.requests is not None and 0 <= account.requests.level(now) <= requests
    for held, _ in running:
        held.void = True
        held.close(now)
    assert limiter.account("k", None, now).running == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0ms"),
        (0.0201, "21ms"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (360.0, "6m0s"),
        (61.25, "1m1.25s"),
        (59.9999, "1m0s"),
    ],
)
def test_times_are_written_as_openai_does(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown


class Api:
    def __init__(self, tokenizer: Tokenizer, **config: Any):
        self.now = 0.0
        self.script = ScriptedGenerate(saying(tokenizer, "x"))
        self.app = app_of(self.script, tokenizer, clock=lambda: self.now, **config)

    async def post(self, key: str = "", **fields: Any) -> Any:
        async with calling(self.app) as client:
            return await client.post(CHAT, json={**HELLO, **fields}, headers={"authorization": f"Bearer {key}"})


async def test_requests_beyond_the_limit_of_their_key_get_a_429(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, rate_limit_requests=2, api_key="one,two")
    first = await api.post("one")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert (await api.post("one", stream=True)).headers["x-ratelimit-remaining-requests"] == "0"
    refused = await api.post("one")
    assert refused.status_code == 429 and refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert error["message"].startswith("Rate limit reached on requests per min (RPM): Limit 2, Used 2, Requested 1.")
    assert (await api.post("two")).status_code == 200, "another key's"
    assert (await api.post("wrong")).status_code == 401
    api.now = 30.0
    assert (await api.post("one")).status_code == 200
    assert len(api.script.started) == 4


async def test_tokens_count_as_asked_for_and_in_the_end_as_they_came(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, rate_limit_tokens=1000)
    plain = await api.post(max_tokens=10)
    usage = plain.json()["usage"]["total_tokens"]
    prompt = plain.json()["usage"]["prompt_tokens"]
    assert plain.headers["x-ratelimit-remaining-tokens"] == str(1000 - prompt - 10)
    again = await api.post(max_tokens=10)
    assert again.headers["x-ratelimit-remaining-tokens"] == str(1000 - usage - prompt - 10)


async def test_a_request_larger_than_a_minutes_worth_is_told_so(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, rate_limit_tokens=20)
    refused = await api.post(max_tokens=100)
    assert refused.status_code == 429 and "retry-after" not in refused.headers
    assert refused.json()["error"]["type"] == "tokens"
    assert not api.script.started


async def test_without_limits_there_are_no_headers_of_them(tokenizer: Tokenizer) -> None:
    answer = await Api(tokenizer).post()
    assert [name for name in answer.headers if "ratelimit" in name] == []
    with pytest.raises(RateLimited):
        raise TokenRateLimited("a kind of it")


async def test_of_many_at_once_exactly_the_limit_gets_through(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, rate_limit_requests=20, api_key="one,two")
    async with calling(api.app) as client:
        headers = {"authorization": "Bearer one"}
        answers = await asyncio.gather(*(client.post(CHAT, json=HELLO, headers=headers) for _ in range(200)))
    assert Counter(answer.status_code for answer in answers) == {200: 20, 429: 180}
    assert len(api.script.started) == 20


async def test_what_the_server_failed_to_serve_costs_nothing(tokenizer: Tokenizer) -> None:
    async def fail(request: Request, index: int) -> None:
        raise Unavailable("no worker")

    api = Api(tokenizer, rate_limit_requests=10, rate_limit_tokens=1000)
    api.script.before = fail
    failed = await api.post(max_tokens=10)
    assert failed.status_code == 503
    assert failed.headers["x-ratelimit-remaining-tokens"] == "1000"
    assert failed.headers["x-ratelimit-remaining-requests"] == "10"
    assert (await api.post(temperature=-1)).headers["x-ratelimit-remaining-requests"] == "9", "the client's mistake"
    refused = await api.post(max_tokens=200, n=5)
    assert refused.status_code == 429 and refused.headers["x-ratelimit-remaining-requests"] == "9"


async def test_who_leaves_has_used_the_prompt_and_what_came(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, rate_limit_requests=10, rate_limit_tokens=1000)
    waits = asyncio.Event()

    async def wait(request: Request, index: int) -> None:
        waits.set()
        await asyncio.Event().wait()

    body = (await api.post(max_tokens=1)).json()["usage"]
    api.script.before = wait
    asking = asyncio.create_task(api.post(max_tokens=100))
    await waits.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(api.script.all_closed.wait(), 60)
    api.script.before = None
    last = await api.post(max_tokens=1)
    left = 1000 - body["total_tokens"] - body["prompt_tokens"] - (body["prompt_tokens"] + 1)
    assert last.headers["x-ratelimit-remaining-tokens"] == str(left)
    assert last.headers["x-ratelimit-remaining-requests"] == "7"
