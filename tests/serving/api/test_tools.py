"""Tool calls through the API: the `openai` package holds two-turn conversations, streamed and whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from serving.api.settings import ServedModel
from serving.messages import Request
from serving.text.parts import TokenizerParts
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, VOCAB_SIZE, ScriptedGenerate, app_of, calling, events, listening

ASKED = [{"role": "user", "content": "How warm is it in Ulm?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm é 😀"}}\n</tool_call>'
TWO_CALLS = f'I ask twice.\n{CALL}\n<tool_call>\n{{"name": "add", "arguments": {{"a": [1, 2]}}}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endif %}{{ m.content }}{% if m.role == 'tool' %} ({{ m.name }}){% endif %}{% endfor %}[assistant]"
)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def saying(tokenizer: Tokenizer, *texts: str) -> Callable[[Request], Sequence[int]]:
    """The next of these texts for each request, the last again and again, with the end of text."""
    left = list(texts)

    def say(request: Request) -> list[int]:
        text = left.pop(0) if len(left) > 1 else left[0]
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id or 0]

    return say


def app(tokenizer: Tokenizer, *texts: str, chunk: int = 1, **options: Any) -> tuple[ScriptedGenerate, Any]:
    script = ScriptedGenerate(saying(tokenizer, *texts), chunk=chunk, eos=tokenizer.eos_id)
    served = ServedModel(names=(MODEL,), max_model_len=8192, vocab_size=VOCAB_SIZE, created=1)
    return script, app_of(script, tokenizer, served=served, **options)


def client_at(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["generic", "native"])
async def test_a_conversation_of_two_turns(tokenizer: Tokenizer, template: str | None) -> None:
    tokenizer = tokenizer if template is None else with_template(tokenizer, template)
    script, made = app(tokenizer, TWO_CALLS, "It is 7 degrees.")
    async with listening(made) as port, client_at(port) as client:
        messages: list[Any] = [*ASKED]
        first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, ADD])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "I ask twice."
        called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        assert called == [("weather", {"city": "Ulm é 😀"}), ("add", {"a": [1, 2]})]
        messages.append(message)  # as it came
        for call, result in zip(message.tool_calls, ("7 degrees", "3"), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, ADD])
    assert second.choices[0].message.content == "It is 7 degrees."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"
    shown = tokenizer.decode(script.started[1].prompt, skip_special_tokens=False)
    for part in ("The weather of a city", "I ask twice.", '"name": "weather"', "Ulm é 😀", "7 degrees"):
        assert part in shown
    assert first.usage.completion_tokens == len(tokenizer.encode(TWO_CALLS)) + 1


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", [CALL, TWO_CALLS, "No <tool_call> at all.", '<tool_call>{"name": "weather"', "Hi"])
async def test_a_stream_says_what_the_whole_answer_says(tokenizer: Tokenizer, chunk: int, text: str) -> None:
    _, made = app(tokenizer, text, chunk=chunk)
    async with listening(made) as port, client_at(port) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": [WEATHER, ADD], "n": 2, "logprobs": True}
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        message = choice.message
        assert own[0].delta.role == "assistant"
        assert ("".join(c.delta.content or "" for c in own) or None) == (message.content or None)
        joined: list[dict[str, str]] = []
        for delta in (call for c in own for call in c.delta.tool_calls or ()):
            if delta.id is not None:
                assert (delta.index, delta.type, delta.function.arguments) == (len(joined), "function", "")
                joined.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            joined[delta.index]["arguments"] += delta.function.arguments
        calls = [{"id": c.id, **c.function.model_dump()} for c in message.tool_calls or ()]
        assert [{**call, "id": ""} for call in joined] == [{**call, "id": ""} for call in calls]
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        logprobs = [item for c in own if c.logprobs for item in c.logprobs.content]
        assert logprobs == choice.logprobs.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    ids = {call.id for choice in whole.choices for call in choice.message.tool_calls or ()}
    assert len(ids) == sum(len(choice.message.tool_calls or ()) for choice in whole.choices)
    assert all(len(name) == len("call_") + 24 for name in ids)


async def test_content_is_null_only_beside_calls(tokenizer: Tokenizer) -> None:
    for text, content, finish in ((CALL, None, "tool_calls"), ("", "", "stop"), (CALL[:55], None, "stop")):
        _, made = app(tokenizer, text)
        async with calling(made) as client:
            body = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "auto"}
            choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
            lines = (await client.post("/v1/chat/completions", json={**body, "stream": True})).text.split("\n")
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, finish)
        first, *_ = events(lines)
        assert json.loads(first)["choices"][0]["delta"]["content"] == content


async def test_a_stop_string_cuts_calls_too(tokenizer: Tokenizer) -> None:
    _, made = app(tokenizer, TWO_CALLS)
    async with calling(made) as client:
        body = {"messages": ASKED, "tools": [WEATHER, ADD], "stop": ["Ulm"]}
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "'}


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, 2),
        ({"parallel_tool_calls": None, "tool_choice": None}, 2),
        ({"parallel_tool_calls": False}, 1),
        ({"tool_choice": "none"}, 0),
        ({"tools": []}, 0),
        ({"tools": None, "tool_choice": "auto"}, 0),
    ],
)
async def test_what_is_read_is_what_was_asked_for(tokenizer: Tokenizer, fields: dict[str, Any], calls: int) -> None:
    script, made = app(tokenizer, TWO_CALLS)
    async with calling(made) as client:
        body = {"messages": ASKED, "tools": [WEATHER, ADD], **fields}
        response = await client.post("/v1/chat/completions", json=body)
    message = response.json()["choices"][0]["message"]
    assert len(message.get("tool_calls", ())) == calls
    shown = tokenizer.decode(script.started[0].prompt)
    assert ("The weather of a city" in shown) == bool(calls)
    if not calls:
        assert message["content"] == TWO_CALLS
        assert script.started[0].sampling.grammar == ""


NATIVE_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"tool_choice": "required"}, "call_1"),
    ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "call_0"),
    ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, "TEXT"),
    ({"response_format": {"type": "json_object"}}, "answer"),
    ({"response_format": {"type": "text"}}, ""),
]


@pytest.mark.parametrize(("fields", "part"), NATIVE_FIELDS)
async def test_a_grammar_holds_what_is_forced(tokenizer: Tokenizer, fields: dict[str, Any], part: str) -> None:
    script, made = app(with_template(tokenizer, TEMPLATE), CALL)
    async with calling(made) as client:
        body = {"messages": ASKED, "tools": [WEATHER, ADD], **fields}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    grammar = script.started[0].sampling.grammar
    assert part in grammar
    assert bool(part) == bool(grammar)


async def test_forms_that_exclude_each_other_are_refused(tokenizer: Tokenizer) -> None:
    unkept = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
    strict = {**unkept, "function": {**unkept["function"], "strict": True}}
    kept = {"type": "function", "function": {"name": "f", "strict": True}}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "exclude"),
        ({"guided_regex": "a"}, "tools", "exclude"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "ends"),
        ({"tools": [unkept], "tool_choice": "required"}, "tool_choice", "uniqueItems"),
        ({"tools": [strict]}, "tools", "uniqueItems"),
        ({"tools": [kept], "ignore_eos": True}, "ignore_eos", "ends"),
    ]
    _, made = app(with_template(tokenizer, TEMPLATE), CALL)
    async with calling(made) as client:
        for fields, param, told in cases:
            body = {"messages": ASKED, "tools": [WEATHER], **fields}
            error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
            assert (error["param"], told in error["message"]) == (param, True), error
        fine = {"messages": ASKED, "tools": [unkept], "ignore_eos": True}  # nothing has to be kept
        assert (await client.post("/v1/chat/completions", json=fine)).status_code == 200


async def test_without_a_parser_tools_are_refused_by_name(tokenizer: Tokenizer) -> None:
    _, made = app(tokenizer, "Hi", tool_call_parser="none")
    async with calling(made) as client:
        for path in ("/v1/chat/completions", "/tokenize"):
            error = (await client.post(path, json={"messages": ASKED, "tools": [WEATHER]})).json()["error"]
            assert (error["param"], error["code"]) == ("tools", "no_tools")
            assert "--tool-call-parser none" in error["message"]
        plain = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "none"}
        assert (await client.post("/v1/chat/completions", json=plain)).status_code == 200


async def test_tokenize_shows_tools_as_a_chat_does(tokenizer: Tokenizer) -> None:
    script, made = app(tokenizer, "Hi")
    async with calling(made) as client:
        body = {"messages": ASKED, "tools": [WEATHER]}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        await client.post("/v1/chat/completions", json=body)
    assert tuple(tokens) == script.started[0].prompt


HISTORY: list[tuple[str, dict[str, Any]]] = [
    ("null", {"content": None}),
    ("left out", {}),
    ("empty list", {"content": []}),
    ("empty text", {"content": ""}),
    ("arguments as an object", {"arguments": {"city": "Ulm"}}),
    ("with an index", {"index": 0}),
]


@pytest.mark.parametrize(("name", "changed"), HISTORY)
async def test_histories_as_clients_send_them(tokenizer: Tokenizer, name: str, changed: dict[str, Any]) -> None:
    script, made = app(with_template(tokenizer, TEMPLATE), "Hi")
    function = {"name": "weather", "arguments": changed.get("arguments", '{"city": "Ulm"}')}
    call = {"id": "call_1", "type": "function", "function": function}
    if "index" in changed:
        call["index"] = 0
    said: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if "content" in changed:
        said["content"] = changed["content"]
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]}
    async with calling(made) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [*ASKED, said, result]})
    assert response.status_code == 200, response.text
    shown = tokenizer.decode(script.started[0].prompt)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>[tool]7 (weather)' in shown


async def test_a_mark_that_is_a_special_token_is_read_and_never_shown(tokenizer: Tokenizer) -> None:
    mark = "[TOOL_CALLS]"
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False)])
    template = TEMPLATE.replace("<tool_call>", mark).replace("</tool_call>", "")
    parts = TokenizerParts(
        backend=backend, special_tokens=tokenizer.special_tokens, chat_templates={"default": template}
    )
    marked = Tokenizer(parts)
    (token,) = marked.encode(mark, add_special_tokens=False)
    script, made = app(marked, f'Well. {mark}[{{"name": "add", "arguments": {{"a": 1}}}}]')
    async with calling(made) as client:
        body: dict[str, Any] = {"messages": ASKED, "tools": [ADD]}
        read = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        plain = (await client.post("/v1/chat/completions", json={"messages": ASKED})).json()["choices"][0]["message"]
        await client.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert read["content"] == "Well."
    assert read["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert plain["content"] == 'Well. [{"name": "add", "arguments": {"a": 1}}]'
    assert f"<[{token}]>" in script.started[2].sampling.grammar


async def test_usage_and_token_ids_go_on_in_every_chunk(tokenizer: Tokenizer) -> None:
    _, made = app(tokenizer, TWO_CALLS, chunk=3)
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with calling(made) as client:
        body = {"messages": ASKED, "tools": [WEATHER, ADD], "return_token_ids": True, **options}
        lines = (await client.post("/v1/chat/completions", json=body)).text.split("\n")
    chunks = [json.loads(data) for data in events(lines) if data != "[DONE]"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())]
    assert tokens == [*tokenizer.encode(TWO_CALLS, add_special_tokens=False), tokenizer.eos_id]
    assert counts[-1] == len(tokens)


class Weather(BaseModel):
    """The weather of a city"""

    city: str
    days: int = 1


async def test_the_packages_own_helpers_read_calls(tokenizer: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
    script, made = app(tokenizer, text)
    tools = [openai.pydantic_function_tool(Weather)]
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": tools, "parallel_tool_calls": False}
    async with listening(made) as port, client_at(port) as client:
        parsed = await client.chat.completions.parse(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_completion()
    for completion in (parsed, streamed):
        (call,) = completion.choices[0].message.tool_calls
        assert call.function.parsed_arguments == Weather(city="Ulm", days=2)
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert "TEXT" in script.started[0].sampling.grammar


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["generic", "native"])
@pytest.mark.parametrize("depth", [200, 300, 500, 980])
@pytest.mark.parametrize("as_text", [True, False])
async def test_arguments_nested_deep_are_the_clients_mistake(
    tokenizer: Tokenizer, template: str | None, depth: int, as_text: bool
) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": text if as_text else "ARGUMENTS"}}
    said = {"role": "assistant", "tool_calls": [call]}
    body = json.dumps({"messages": [*ASKED, said]}).replace('"ARGUMENTS"', text)
    _, made = app(tokenizer if template is None else with_template(tokenizer, template), "Hi")
    async with calling(made) as client:
        response = await client.post("/v1/chat/completions", content=body)
    if depth > 254:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
    else:
        assert response.status_code == 200
