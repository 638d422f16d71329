"""What becomes of the fields of a body: served, ignored and named, or refused."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from serving.api import fields
from serving.api.body import parse_body
from serving.api.conversation import Message
from serving.api.fields import CONTRACTS, HINTS, MOST_NAMED, MOST_PARTS, OTHER, sort_fields
from serving.api.schema import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody
from serving.api.service import IGNORED
from serving.api.settings import SamplingDefaults, ServedModel
from serving.errors import InvalidRequest
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import (
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    CountingObserver,
    ScriptedGenerate,
    app_of,
    calling,
    saying,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
KINDS = (ChatCompletionBody, CompletionBody, TokenizeBody, DetokenizeBody)
HEADER = re.compile(r"[A-Za-z0-9_.-]+(, [A-Za-z0-9_.-]+)*")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=8,
)
inside = set(Message.model_fields) | {"audio", "images", "type", "text"}
known = frozenset(CONTRACTS).union(*(kind.model_fields for kind in KINDS), inside)
unknown_fields = st.dictionaries(
    st.text(max_size=80).filter(lambda name: name not in known) | st.sampled_from(sorted(HINTS)),
    json_values,
    max_size=40,
)


class Asked:
    """The API, what it was asked, and what it asked of the router in turn."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        self.script = ScriptedGenerate(saying(tokenizer, "ok"))
        self.observer = CountingObserver()
        self.app = app_of(self.script, tokenizer, observer=self.observer, **options)

    async def post(self, path: str = CHAT, /, **body: Any) -> httpx.Response:
        start: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
        async with calling(self.app) as http:
            return await http.post(path, json={"seed": 1, **start, **body})

    async def request(self, path: str = CHAT, **body: Any) -> Request:
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return self.script.started[-1]


@pytest.mark.parametrize("strict", [False, True])
async def test_hints_are_named_and_counted(tokenizer: Tokenizer, strict: bool) -> None:
    asked = Asked(tokenizer, strict_fields=strict)
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": parts, "cache_control": {}}] * 3
    answer = await asked.post(messages=messages, service_tier="flex", store=True, verbosity=None, metadata=[])
    assert answer.headers["x-millrace-ignored"] == (
        "messages.content.cache_control, messages.cache_control, service_tier, store"
    )
    assert asked.observer.ignored == ["cache_control", "cache_control", "service_tier", "store"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * (MOST_PARTS + 1)},
        {"messages": [{"role": "user", "content": "a"}] * (MOST_PARTS + 1)},
        {"messages": [{"role": "user", "content": [{}] * (MOST_PARTS // 8)}] * 9},
        {"messages": [{f"a{i}": 1 for i in range(MOST_PARTS + 1)}]},
        {"messages": [{"a": 1}] * (MOST_PARTS // 2 + 1)},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * (MOST_PARTS + 1)}]},
        {"messages": [], "tools": [{}] * (MOST_PARTS + 1)},
    ],
)
def test_many_parts_are_counted_and_not_looked_at(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    is_plain = fields._Shape.is_plain

    def counting(shape: fields._Shape, value: Any) -> bool:
        nonlocal looked
        looked += 1
        return is_plain(shape, value)

    monkeypatch.setattr(fields._Shape, "is_plain", counting)
    with pytest.raises(InvalidRequest, match=f"at most {MOST_PARTS} messages, parts and unknown fields") as refused:
        sort_fields(ChatCompletionBody, body)
    assert looked <= MOST_PARTS and refused.value.param


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"max_tokens": 10**6}, {"guided_regex": "("}])
async def test_a_refusal_names_them_too(tokenizer: Tokenizer, wrong: dict[str, Any]) -> None:
    """Wherever it was refused: by its types, by what it asks for, or by its grammar."""
    observer = CountingObserver()
    app = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, observer=observer)
    async with calling(app) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "metadata": {"a": 1}, **wrong})
    assert answer.status_code == 400
    assert answer.headers[IGNORED] == "metadata"
    assert observer.ignored == ["metadata"]


async def test_unknown_fields_are_counted_as_others_and_no_null_is_named(tokenizer: Tokenizer) -> None:
    asked = Asked(tokenizer)
    answer = await asked.post(mood="good", color=None, stream_options={"all": True}, stream=True)
    assert answer.headers["x-millrace-ignored"] == "mood, stream_options.all"
    assert asked.observer.ignored == [OTHER, OTHER]
    assert "x-millrace-ignored" not in (await asked.post()).headers


def test_so_many_are_named_each_once_and_dots_stand_for_the_rest() -> None:
    message = {"role": "user", "content": "hi", **{f"mood{number}": 1 for number in range(MOST_NAMED)}}
    _, ignored = sort_fields(ChatCompletionBody, {"messages": [message, message]})
    assert ignored.header().split(", ") == [f"messages.mood{number}" for number in range(MOST_NAMED)]
    _, ignored = sort_fields(ChatCompletionBody, {"messages": [message, {**message, "another": 1}]})
    assert ignored.header().endswith(f"messages.mood{MOST_NAMED - 1}, ...")


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [67]})])
async def test_the_token_endpoints_name_them_too(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    asked = Asked(tokenizer)
    async with calling(asked.app) as http:
        answer = await http.post(path, json={**body, "color": "red"})
    assert answer.headers["x-millrace-ignored"] == "color"
    assert asked.observer.ignored == [OTHER]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_null_is_the_same_as_nothing_in_every_optional_field(tokenizer: Tokenizer, path: str) -> None:
    kind = ChatCompletionBody if path == CHAT else CompletionBody
    names = {of.alias or name for name, of in kind.model_fields.items() if not of.is_required()} - {"seed"}
    asked = Asked(tokenizer)
    plain, nulls = await asked.request(path), await asked.request(path, **dict.fromkeys([*names, *CONTRACTS, *HINTS]))
    assert {"min_tokens", "ignore_eos", "skip_special_tokens", "prompt_cache_options"} <= {*names, *HINTS}
    assert plain.prompt == nulls.prompt and plain.sampling == nulls.sampling


async def test_what_asks_for_nothing_passes(tokenizer: Tokenizer) -> None:
    asked = Asked(tokenizer)
    history = {"role": "assistant", "content": "x", "tool_calls": [], "annotations": [], "function_call": None}
    body = {"tools": [], "functions": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]}
    body |= {"priority": 0, "num_beams": 1, "use_beam_search": False, "suffix": "", "stop": [], "stop_token_ids": []}
    body |= {"logit_bias": {}, "prompt_logprobs": None, "typical_p": 1.0, "mirostat": 0, "best_of": None, "echo": False}
    answer = await asked.post(messages=[*MESSAGES, history, *MESSAGES], **body)
    assert answer.status_code == 200, answer.text
    assert "x-millrace-ignored" not in answer.headers


async def test_what_asks_for_nothing_passes_in_a_form_too(tokenizer: Tokenizer) -> None:
    """As clients of vLLM write its parameters out."""
    form = {"regex": "[a-z]+", "json": None, "whitespace_pattern": None, "disable_any_whitespace": False}
    answer = await Asked(tokenizer).post(structured_outputs=form)
    assert answer.status_code == 200, answer.text
    assert "x-millrace-ignored" not in answer.headers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_smallest_bound_of_the_output_holds(tokenizer: Tokenizer, path: str) -> None:
    asked = Asked(tokenizer)
    assert (await asked.request(path, max_tokens=9, max_new_tokens=4)).sampling.max_tokens == 4
    assert (await asked.request(path, max_tokens=3, max_new_tokens=4)).sampling.max_tokens == 3
    assert (await asked.request(path, max_tokens=-1, max_new_tokens=4)).sampling.max_tokens == 4
    unbounded = await asked.request(path, max_tokens=-1)
    assert unbounded.sampling.max_tokens == MAX_MODEL_LEN - len(unbounded.prompt)


async def test_repeat_penalty_is_the_repetition_penalty(tokenizer: Tokenizer) -> None:
    asked = Asked(tokenizer)
    assert (await asked.request(repeat_penalty=1.2)).sampling.repetition_penalty == 1.2
    assert (await asked.request(repeat_penalty=1.2, repetition_penalty=1.2)).sampling.repetition_penalty == 1.2
    assert (await asked.request(repeat_penalty=None)).sampling.repetition_penalty == 1.0


async def test_the_models_defaults_hold_where_a_request_says_nothing(tokenizer: Tokenizer) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=12)
    served = ServedModel(
        names=(MODEL,), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, created=1, defaults=defaults
    )
    asked = Asked(tokenizer, served=served)
    got = (await asked.request()).sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.6, 0.9, 20, 0.1, 1.1)
    assert got.max_tokens == 12
    assert (await asked.request(COMPLETIONS)).sampling.max_tokens == 12
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 20}
    got = (await asked.request(**own)).sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0, 1, 0, 0, 1)
    assert got.max_tokens == 20
    unbounded = await asked.request(max_tokens=-1)
    assert unbounded.sampling.max_tokens == MAX_MODEL_LEN - len(unbounded.prompt)


@given(fields=unknown_fields, in_message=unknown_fields, in_part=unknown_fields)
def test_unknown_fields_change_nothing(
    fields: dict[str, Any], in_message: dict[str, Any], in_part: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "temperature": 0.5}
    message = {**in_message, "role": "user", "content": [{**in_part, "type": "text", "text": "hi"}]}
    kept, ignored = sort_fields(ChatCompletionBody, {**fields, **body, "messages": [message]})
    assert kept == body
    header = ignored.header()
    assert header == "" or HEADER.fullmatch(header)
    assert len(header) < 4000 and len(ignored.counted) <= MOST_NAMED
    assert set(ignored.counted.values()) <= HINTS | {OTHER}
    assert bool(header) == any(
        value is not None and not (value == [] and name in HINTS)
        for given in (fields, in_message, in_part)
        for name, value in given.items()
    )


@given(body=st.dictionaries(st.sampled_from(sorted(known | HINTS)) | st.text(max_size=8), json_values, max_size=12))
def test_any_object_is_read_or_refused_by_name(body: dict[str, Any]) -> None:
    for kind in KINDS:
        for start in ({}, {"messages": MESSAGES, "prompt": "hi", "tokens": [1]}):
            sent = json.dumps({**body, **{name: value for name, value in start.items() if name in kind.model_fields}})
            try:
                parse_body(kind, sent.encode())
            except InvalidRequest as refused:
                assert refused.param


@given(
    chat=st.booleans(),
    body=st.dictionaries(st.sampled_from(sorted(known | HINTS)) | st.text(max_size=8), json_values, max_size=6),
)
def test_no_object_breaks_the_server(tokenizer: Tokenizer, chat: bool, body: dict[str, Any]) -> None:
    async def status() -> int:
        own = {name: value for name, value in body.items() if name not in ("messages", "prompt", "model")}
        return (await Asked(tokenizer).post(CHAT if chat else COMPLETIONS, **own)).status_code

    assert asyncio.run(status()) in (200, 400)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_no_contract_is_ignored(kind: type[BaseModel], name: str) -> None:
    if name in kind.model_fields:
        return
    for strict in (False, True):
        with pytest.raises(InvalidRequest) as refused:
            sort_fields(kind, {name: "something else"}, strict=strict)
        assert refused.value.param == name


def test_no_field_is_both() -> None:
    served = {of.alias or name for kind in KINDS for name, of in kind.model_fields.items()}
    assert not HINTS & (CONTRACTS.keys() | served)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (ChatCompletionBody, {"messages": [{"role": 1}] * 60_000}),
        (ChatCompletionBody, {"messages": [{"role": "user", "content": [{"type": "x"}] * 60_000}]}),
        (ChatCompletionBody, {"messages": MESSAGES, "stop_token_ids": ["a"] * 100_000}),
        (ChatCompletionBody, {"messages": MESSAGES, "stop": [1] * 100_000}),
        (ChatCompletionBody, {"messages": MESSAGES, "guided_choice": [1] * 100_000}),
        (ChatCompletionBody, {"messages": MESSAGES, "logit_bias": {str(i): "a" for i in range(100_000)}}),
        (DetokenizeBody, {"tokens": ["a"] * 100_000}),
    ],
    ids=["messages", "parts", "stop tokens", "stops", "choices", "biases", "tokens"],
)
def test_few_errors_are_looked_at(kind: type[BaseModel], broken: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(sort_fields(kind, broken)[0])
    assert refused.value.error_count() <= 10


def _seconds(count: int, body: bytes) -> float:
    """Of this thread for each field: the quickest of some tries, so that others on the machine do not count."""
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        _, ignored = parse_body(ChatCompletionBody, body)
        best = min(best, time.thread_time() - started)
        assert ignored.more and len(ignored.counted) == MOST_NAMED
    return best / count


@pytest.mark.parametrize("where", ["body", "message", "messages"])
def test_sorting_takes_time_linear_in_the_body(where: str) -> None:
    """Sixteen times the unknown fields would take sixteen times as long for each, were it quadratic."""

    def body(count: int) -> bytes:
        fields = {f"field {number}": number for number in range(count)}
        if where == "body":
            return json.dumps({"messages": MESSAGES, **fields}).encode()
        if where == "message":
            return json.dumps({"messages": [MESSAGES[0] | fields]}).encode()
        return json.dumps({"messages": [MESSAGES[0] | {name: 1} for name in fields]}).encode()

    few, many = 2_000, 32_000
    assert _seconds(many, body(many)) < 6 * _seconds(few, body(few))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hi", "dimensions": 3}),
        ("/v1/embeddings", {"input": "hi", "model": "x"}),
        ("/tokenize", {"prompt": "hi", "model": "x"}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}], "model": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "model": "x"}),
        ("/v1/responses", {"input": "hi", "model": "x"}),
    ],
)
async def test_every_endpoint_names_what_it_ignored_where_it_refuses(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    observer = CountingObserver()
    made = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, observer=observer)
    async with calling(made) as client:
        answer = await client.post(path, json={**body, "mood": 1})
    assert answer.status_code in (400, 404)
    assert answer.headers["x-millrace-ignored"] == "mood"
    assert (len(observer.ignored), observer.refused) == (1, [answer.status_code])
