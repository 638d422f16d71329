"""A stream that broke off goes on after any of its events, in every dialect, and says so where it cannot."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.objectives import with_read_headers
from serving.api.plan import RequestHead, RequestIds, Rights
from serving.api.resumable_stream import COMMENT, MOST_SILENT_SECONDS
from serving.api.resumption import EventMark, repeatable
from serving.errors import InvalidRequest
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, ScriptedGenerate, app_of, calling
from tests.serving.api.test_thinking import THINKS, THOUGHT
from tests.serving.api.test_tools import ADD, ASKED, CALL, WEATHER, app, saying, with_template

TEXT = "The river turns, é 😀, and again."
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
ANSWERS = {"plain": TEXT, "thoughts": THOUGHT + TEXT, "calls": THOUGHT + "I ask. " + CALL}
NAMED = {"idempotency-key": "0b8f6c2e-5d0e-4c39-9a43-7d1f0c6a2f11"}


def body_of(path: str, answer: str) -> dict[str, Any]:
    tools = answer == "calls"
    if path == "/v1/completions":
        return {"prompt": "Hello", "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}
    if path == "/v1/messages":
        schema = WEATHER["function"]
        named = {"name": schema["name"], "input_schema": schema["parameters"]}
        asked = {"messages": ASKED, "max_tokens": 200, "stream": True}
        return {**asked, "tools": [named]} if tools else asked
    if path == "/v1/responses":
        asked = {"input": "Hello", "stream": True}
        return {**asked, "tools": [{"type": "function", **WEATHER["function"]}]} if tools else asked
    asked = {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}}
    return {**asked, "tools": [WEATHER, ADD]} if tools else asked


def parts(text: str) -> list[tuple[str, str]]:
    """Id and the rest of each event; what differs from one run to the next is left out."""
    found = []
    for event in text.split("\n\n")[:-1]:
        first, _, rest = event.partition("\n")
        assert first.startswith("id: "), event
        found.append((first.removeprefix("id: "), timeless(rest)))
    return found


def timeless(event: str) -> str:
    head, mark, data = event.rpartition("data: ")
    if data == "[DONE]":
        return event
    told = json.loads(data)
    told.get("response", {}).pop("completed_at", None)
    return f"{head}{mark}{json.dumps(told)}"


class Asking:
    """An API that answers with this text, some tokens at a time."""

    def __init__(self, tokenizer: Tokenizer, text: str, chunk: int = 1, **options: Any):
        self.script, self.app = app(with_template(tokenizer, THINKS), text, chunk=chunk, **options)

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        async with calling(self.app) as client:
            return await client.post(path, json={"model": MODEL, **body}, headers=headers)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_goes_on_after_any_of_its_events(tokenizer: Tokenizer, path: str, answer: str) -> None:
    """However the tokens come the second time."""
    body = body_of(path, answer)
    first = await Asking(tokenizer, ANSWERS[answer], chunk=3).post(path, body, NAMED)
    assert first.status_code == 200, first.text
    whole = parts(first.text)
    assert len(whole) > 8 and len({mark for mark, _ in whole}) == len(whole)
    for chunk in (1, 2, 1000):
        again = Asking(tokenizer, ANSWERS[answer], chunk=chunk)
        for had in range(0, len(whole), 2 if chunk == 2 else 9):
            rest = await again.post(path, body, {**NAMED, "last-event-id": whole[had][0]})
            assert rest.status_code == 200, rest.text
            assert parts(rest.text) == whole[had + 1 :]


@pytest.mark.parametrize("path", PATHS)
async def test_a_key_makes_seed_and_response_the_same(tokenizer: Tokenizer, path: str) -> None:
    asking = Asking(tokenizer, TEXT)
    body = body_of(path, "plain")
    texts = [await asking.post(path, body, headers) for headers in (NAMED, NAMED, {"idempotency-key": "other"}, {}, {})]
    seeds = [request.sampling.seed for request in asking.script.started]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 4
    assert len({request.request_id for request in asking.script.started}) == 5, "an attempt has an id of its own"
    assert "\nid:" not in texts[-1].text and not texts[-1].text.startswith("id:")
    own = await asking.post(path, {**body, "seed": 7}, NAMED) if path == "/v1/completions" else None
    assert own is None or asking.script.started[-1].sampling.seed == 7


async def test_answers_that_are_not_streamed_are_the_same_too(tokenizer: Tokenizer) -> None:
    asking = Asking(tokenizer, TEXT)
    body = {**body_of(PATHS[0], "plain"), "stream": False, "n": 2}
    del body["stream_options"]
    answers = [(await asking.post(PATHS[0], body, NAMED)).json() for _ in range(2)]
    assert answers[0]["id"] == answers[1]["id"]
    seeds = [request.sampling.seed for request in asking.script.started]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]


async def test_one_key_of_two_tenants_is_two_keys() -> None:
    heads = [
        RequestHead(ids=RequestIds(shown="a", unique="a"), headers=NAMED, rights=Rights(owner=owner))
        for owner in ("one", "two")
    ]
    names = [repeatable(head.headers, head.rights.owner) for head in heads]
    assert names[0] is not None and names[1] is not None and names[0].seed != names[1].seed
    assert heads[0].response_name != heads[1].response_name


async def test_another_answer_is_told_from_the_one_that_broke_off(tokenizer: Tokenizer) -> None:
    body = body_of(PATHS[0], "plain")
    marks = [mark for mark, _ in parts((await Asking(tokenizer, TEXT).post(PATHS[0], body, NAMED)).text)]
    for text in ("The river stands, é 😀, and again and again.", "The"):
        refused = await Asking(tokenizer, text).post(PATHS[0], body, {**NAMED, "last-event-id": marks[-3]})
        assert refused.status_code == 409 and refused.headers["x-should-retry"] == "false"
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("diverged", "last-event-id")
        assert "without last-event-id" in error["message"]


OTHERS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"idempotency-key": "another"}, {}),
    (NAMED, {"temperature": 0.5}),
    (NAMED, {"service_class": "batch"}),
]


@pytest.mark.parametrize(("headers", "fields"), OTHERS, ids=["key", "field", "field that changes no token"])
@pytest.mark.parametrize("path", PATHS)
async def test_another_request_with_the_same_tokens_is_told_from_it(
    tokenizer: Tokenizer, path: str, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    """Answers begin alike, and what follows is of another response, or cut in another way."""
    asking, body = Asking(tokenizer, TEXT), body_of(path, "plain")
    for mark, _ in parts((await asking.post(path, body, NAMED)).text)[::4]:
        refused = await asking.post(path, {**body, **fields}, {**headers, "last-event-id": mark})
        assert refused.status_code == 409, refused.text
        if path == "/v1/messages":
            assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_what_takes_long_to_generate_again_is_not_silent(tokenizer: Tokenizer) -> None:
    """A client or proxy that gives it up would ask for the same again, in vain each time."""
    seconds, body = [0.0], body_of(PATHS[0], "plain")

    async def wait(request: Request, index: int) -> None:
        seconds[0] += 4.0

    def asking(text: str) -> Asking:
        made = Asking(tokenizer, text, clock=lambda: seconds[0])
        made.script.before = wait
        return made

    first = await asking(TEXT).post(PATHS[0], body, NAMED)
    whole, comment = parts(first.text), COMMENT.decode()
    assert comment not in first.text and comment.startswith(":") and len(whole) > 12
    mark = {**NAMED, "last-event-id": whole[-4][0]}
    rest = await asking(TEXT).post(PATHS[0], body, mark)
    assert rest.text.count(comment) >= (len(whole) - 5) * 4 // (int(MOST_SILENT_SECONDS) + 4)
    assert parts(rest.text.replace(comment, "")) == whole[-3:]
    told = (await asking(TEXT.replace("turns", "stood")).post(PATHS[0], body, mark)).text.replace(comment, "")
    assert told.startswith('data: {"error"') and '"code":"diverged"' in told and told.count("\n\n") == 1


async def test_a_process_that_reads_bodies_is_told_of_both_headers() -> None:
    headers = {**NAMED, "last-event-id": "1-1-0123456789abcdef", "authorization": "Bearer x"}
    head = RequestHead(ids=RequestIds(shown="a", unique="a"), headers=headers)
    bare = with_read_headers(head)
    assert repeatable(bare.headers, "") == repeatable(headers, "") and bare.response_name == head.response_name
    assert "authorization" not in bare.headers


async def test_only_what_generates_texts_says_that_it_takes_a_key(tokenizer: Tokenizer) -> None:
    async with calling(Asking(tokenizer, TEXT).app) as client:
        described = (await client.get("/openapi.json")).json()["paths"]
    for path, takes in (*((path, True) for path in PATHS), ("/v1/embeddings", False)):
        names = {one["name"] for one in described[path]["post"]["parameters"]}
        assert (names >= {"idempotency-key", "last-event-id"}) == takes and "x-priority" in names


REFUSED: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"last-event-id": "1-1-0123456789abcdef"}, {}, "last-event-id"),
    ({"idempotency-key": ""}, {}, "idempotency-key"),
    ({"idempotency-key": "a b"}, {}, "idempotency-key"),
    ({"idempotency-key": "a" * 256}, {}, "idempotency-key"),
    *(
        ({**NAMED, "last-event-id": mark}, {}, "last-event-id")
        for mark in (
            "",
            "7",
            "1-1-0123",
            "-1-1-0123456789abcdef",
            "1-1-0123456789abcdef ",
            "1-0-0123456789abcdef",
            f"1-{9**12}-" + "0" * 16,
        )
    ),
    ({**NAMED, "last-event-id": "1-1-0123456789abcdef"}, {"n": 2}, "last-event-id"),
    ({**NAMED, "last-event-id": "1-1-0123456789abcdef"}, {"stream": False}, "last-event-id"),
]


@pytest.mark.parametrize(("headers", "fields", "param"), REFUSED)
async def test_what_makes_no_sense_is_refused_by_name(
    tokenizer: Tokenizer, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    asking = Asking(tokenizer, TEXT)
    refused = await asking.post(PATHS[0], {"messages": ASKED, "stream": True, **fields}, headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert asking.script.started == []


@given(st.integers(0, 10**12 - 1), st.integers(1, 10**9 - 1), st.binary(min_size=8, max_size=8))
def test_a_mark_is_read_as_it_was_written(created: int, events: int, digest: bytes) -> None:
    mark = EventMark(created, events, digest.hex())
    found = repeatable({**NAMED, "last-event-id": str(mark)}, "")
    assert found is not None and found.after == mark


@given(st.text(max_size=40))
def test_any_header_is_read_or_refused(text: str) -> None:
    for headers in ({"idempotency-key": text}, {**NAMED, "last-event-id": text}):
        try:
            repeatable(headers, "")
        except InvalidRequest as error:
            assert error.param in headers


async def test_leaving_such_a_stream_closes_what_generates_it(tokenizer: Tokenizer) -> None:
    """And a failure in mid-stream has no id, so that its client asks for what follows the event before."""

    async def fail(request: Request, index: int) -> None:
        if index == 5:
            raise RuntimeError("broken")

    script = ScriptedGenerate(saying(tokenizer, TEXT), chunk=2, before=fail)
    script.before = lambda request, index: fail(request, 5 if index >= 4 else 0)
    async with calling(app_of(script, tokenizer, api_key=KEY)) as client:
        headers = {**NAMED, "authorization": f"Bearer {KEY}"}
        answer = await client.post(PATHS[0], json={"model": MODEL, **body_of(PATHS[0], "plain")}, headers=headers)
    assert script.all_closed.is_set()
    told = answer.text.split("\n\n")[:-1]
    assert all(event.startswith("id: ") for event in told[:-1]) and told[-1].startswith('data: {"error"')
