"""Closed and open loops against a scripted server: what is sent when, what is timed, and how a run ends early."""

from __future__ import annotations

import asyncio

import pytest

from bench.connection import HttpClient
from bench.endpoint import Endpoint, RequestShape, Target
from bench.load import Pace, Prepared, Run, Watch, run_load
from bench.sse import Outcome
from tests.fakes.clock import ManualClock
from tests.fakes.openai_server import ScriptedServer


def endpoint_of(server: ScriptedServer, clock: ManualClock | None = None, *, chat: bool = False) -> Endpoint:
    client = HttpClient(server.url, clock=clock) if clock else HttpClient(server.url)
    return Endpoint(Target(name="it", url=server.url), client, RequestShape(model="scripted", chat=chat))


def prepared(endpoint: Endpoint, count: int, output_tokens: int = 3) -> list[Prepared]:
    prompt = "a b c d" if endpoint.shape.chat else [1, 2, 3, 4]
    body = endpoint.shape.body(prompt, output_tokens)
    return [Prepared(body=body, prompt_tokens=4, output_tokens=output_tokens)] * count


async def load(endpoint: Endpoint, requests: list[Prepared], pace: Pace, watch: Watch | None = None) -> Run:
    try:
        async with asyncio.timeout(60):  # a load that hangs is a failure, not a pause
            return await run_load(endpoint, requests, pace, watch or Watch())
    finally:
        await endpoint.client.close()


@pytest.mark.parametrize("chat", [False, True])
async def test_latencies_are_those_of_the_server(server: ScriptedServer, chat: bool) -> None:
    """0.5 s to the first token, then 0.25 s each, on a clock that moves only when a chunk has been seen."""
    clock = ManualClock()

    async def before(number: int, chunk: int) -> None:
        clock.now += 0.25 if chunk else 0.5
        clock.expect_reading()

    async def after(number: int, chunk: int) -> None:
        await clock.reading()

    server.script.before_chunk, server.script.after_chunk = before, after
    server.script.role_chunk = False
    endpoint = endpoint_of(server, clock, chat=chat)
    run = await load(endpoint, prepared(endpoint, 2, output_tokens=5), Pace(concurrency=1))
    for outcome in run.outcomes:
        assert (outcome.error, outcome.ttft, outcome.latency) == (None, 0.5, 1.5)
        assert outcome.gaps == [0.25] * 4
        assert outcome.tpot == 0.25
        assert (outcome.prompt_tokens, outcome.output_tokens) == (4, 5)
    assert run.duration == 3.0


async def test_a_closed_loop_keeps_exactly_its_concurrency(server: ScriptedServer) -> None:
    """No answer is given before four requests are there; a fifth never is."""
    full = asyncio.Event()

    async def until_full(number: int, chunk: int) -> None:
        if server.in_flight == 4:
            full.set()
        await full.wait()

    server.script.before_chunk = until_full
    endpoint = endpoint_of(server)
    finished: list[Outcome] = []
    run = await load(endpoint, prepared(endpoint, 13), Pace(concurrency=4), Watch(finished=finished.append))
    assert server.most_in_flight == 4
    assert len(run.outcomes) == len(finished) == server.completions == 13
    assert all(outcome.error is None for outcome in run.outcomes)
    assert run.stopped == ""


async def test_an_open_loop_sends_on_time_whatever_is_unanswered(server: ScriptedServer) -> None:
    """No request is answered before all have arrived: only an open loop gets there."""
    everyone = asyncio.Event()

    async def until_everyone(number: int, chunk: int) -> None:
        if server.in_flight == 5:
            everyone.set()
        await everyone.wait()

    server.script.before_chunk = until_everyone
    endpoint = endpoint_of(server)
    arrivals = (0.0, 0.001, 0.002, 0.002, 0.03)
    run = await load(endpoint, prepared(endpoint, 5), Pace(arrivals=arrivals))
    start = run.outcomes[0].scheduled
    assert [outcome.scheduled - start for outcome in run.outcomes] == pytest.approx(arrivals)
    assert all(outcome.sent >= outcome.scheduled for outcome in run.outcomes)
    assert all(outcome.error is None for outcome in run.outcomes)


async def test_failures_keep_their_kinds_and_stop_nobody(server: ScriptedServer) -> None:
    server.script.fail = {1: (429, "slow down"), 4: (500, "oh no")}.get
    server.script.die_after = {2: 2}.get
    server.script.error_after = {3: 1}.get
    endpoint = endpoint_of(server)
    run = await load(endpoint, prepared(endpoint, 6), Pace(concurrency=1))
    assert [outcome.error for outcome in run.outcomes] == [
        None, "HTTP 429", "connection lost", "error event", "HTTP 500", None,
    ]  # fmt: skip
    assert [outcome.detail for outcome in run.outcomes][1:5:2] == ["slow down", "the engine fell over"]
    assert all(outcome.finished is not None for outcome in run.outcomes)


async def test_an_interrupted_run_keeps_what_has_finished(server: ScriptedServer) -> None:
    interrupted = asyncio.Event()
    never = asyncio.Event()

    async def third_hangs(number: int, chunk: int) -> None:
        if number == 2 and chunk == 1:
            interrupted.set()
            await never.wait()

    server.script.before_chunk = third_hangs
    endpoint = endpoint_of(server)
    run = await load(endpoint, prepared(endpoint, 9), Pace(concurrency=1), Watch(interrupted=interrupted))
    assert [outcome.error for outcome in run.outcomes] == [None, None, "interrupted"]
    assert run.stopped == "interrupted"


async def test_a_hopeless_run_is_given_up(server: ScriptedServer) -> None:
    endpoint = endpoint_of(server)
    seen: list[Outcome] = []

    def third(outcome: Outcome) -> bool:
        seen.append(outcome)
        return len(seen) == 3

    run = await load(endpoint, prepared(endpoint, 50), Pace(concurrency=1), Watch(hopeless=third))
    assert run.stopped == "hopeless"
    assert sum(outcome.error is None for outcome in run.outcomes) == 3
    assert server.completions < 50


async def test_a_bug_of_ours_is_not_a_result(server: ScriptedServer) -> None:
    def broken(outcome: Outcome) -> None:
        raise LookupError("a bug")

    endpoint = endpoint_of(server)
    with pytest.raises(ExceptionGroup) as caught:
        await load(endpoint, prepared(endpoint, 3), Pace(concurrency=2), Watch(finished=broken))
    assert caught.group_contains(LookupError)


async def test_the_body_is_what_was_asked(server: ScriptedServer) -> None:
    shape = RequestShape(model="scripted", extra={"ignore_eos": None, "top_k": 3})
    endpoint = Endpoint(Target(name="it", url=server.url), HttpClient(server.url), shape)
    run = await load(endpoint, prepared(endpoint, 1), Pace(concurrency=1))
    assert run.outcomes[0].error is None
    assert server.received[0].body == {
        "model": "scripted",
        "prompt": [1, 2, 3, 4],
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }
