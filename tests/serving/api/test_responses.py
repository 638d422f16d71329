"""The `openai` package drives /v1/responses on a real socket: text, tools in two turns, forms, thoughts, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from serving.errors import Overloaded, WorkerLost
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, ScriptedGenerate, app_of, calling, listening
from tests.fakes.generate import saying as always_saying
from tests.serving.api.test_thinking import OPENED, THINKS, THOUGHT
from tests.serving.api.test_tools import CALL, TEMPLATE, TWO_CALLS, app, client_at, with_template

PATH = "/v1/responses"
TEXT = "The mill stands where the river narrows, déjà vu 😀 and on."
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def complete(response: Response) -> Response:
    """Every field that the SDK's types require is there, and of its type."""
    return Response.model_validate(response.to_dict())


async def test_text_whole_and_streamed(tokenizer: Tokenizer) -> None:
    script, made = app(tokenizer, TEXT)
    script.cached = 2
    async with listening(made) as port, client_at(port) as client:
        answer = complete(
            await client.responses.create(model=MODEL, input="Hello", instructions="Be brief.", metadata={"a": "b"})
        )
        stream = await client.responses.create(model=MODEL, input="Hello", stream=True)
        events = [event async for event in stream]
    assert answer.output_text == TEXT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be brief."
    assert answer.id == script.started[0].request_id and answer.id.startswith("resp_")
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert script.started[0].prompt == tuple(tokenizer.encode(prompt))
    assert answer.usage.input_tokens == len(script.started[0].prompt)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens == len(tokenizer.encode(TEXT)) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * (len(kinds) - 8)
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert complete(events[-1].response).output_text == TEXT


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["generic", "native"])
async def test_tools_in_two_turns(tokenizer: Tokenizer, template: str | None, streams: bool) -> None:
    tokenizer = tokenizer if template is None else with_template(tokenizer, template)
    script, made = app(tokenizer, TWO_CALLS, "It is 7 degrees.")
    asked: list[Any] = [{"role": "user", "content": "How warm is it in Ulm?"}]
    async with listening(made) as port, client_at(port) as client:
        if streams:
            async with client.responses.stream(model=MODEL, input=asked, tools=[WEATHER, ADD]) as stream:
                first: Any = await stream.get_final_response()
        else:
            first = complete(await client.responses.create(model=MODEL, input=asked, tools=[WEATHER, ADD]))
        message, *calls = first.output
        assert first.output_text == "I ask twice." and message.type == "message"
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("weather", {"city": "Ulm é 😀"}),
            ("add", {"a": [1, 2]}),
        ]
        asked += first.output  # as it came
        for call, result in zip(calls, ("7 degrees", "3"), strict=True):
            asked.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        second = await client.responses.with_raw_response.create(model=MODEL, input=asked, tools=[WEATHER, ADD])
    assert "x-millrace-ignored" not in second.headers
    assert second.parse().output_text == "It is 7 degrees."
    shown = tokenizer.decode(script.started[1].prompt, skip_special_tokens=False)
    for part in ("The weather of a city", "I ask twice.", '"name": "weather"', "Ulm é 😀", "7 degrees"):
        assert part in shown
    assert shown.index("I ask twice.") < shown.index("7 degrees")


CHOICES: list[tuple[dict[str, Any], str, int]] = [
    ({}, "", 2),
    ({"parallel_tool_calls": False}, "", 1),
    ({"tool_choice": "required"}, "call_1", 2),
    ({"tool_choice": {"type": "function", "name": "weather"}}, "call_0", 1),
    ({"tool_choice": "none"}, "", 0),
    ({"tools": [{**WEATHER, "strict": True}]}, "TEXT", 2),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}},
        "call_0",
        2,
    ),
    ({"text": {"format": {"type": "json_object"}}}, "answer", 2),
]


@pytest.mark.parametrize(("fields", "part", "calls"), CHOICES)
async def test_choices_of_tools(tokenizer: Tokenizer, fields: dict[str, Any], part: str, calls: int) -> None:
    script, made = app(with_template(tokenizer, TEMPLATE), TWO_CALLS)
    async with calling(made) as client:
        response = await client.post(PATH, json={"input": "hi", "tools": [WEATHER, ADD], **fields})
    assert response.status_code == 200, response.text
    grammar = script.started[0].sampling.grammar
    assert (part in grammar) and bool(part) == bool(grammar)
    assert sum(item["type"] == "function_call" for item in response.json()["output"]) == calls
    complete(Response.model_validate(response.json()))
    if isinstance(choice := fields.get("tool_choice"), dict) and choice["type"] == "allowed_tools":
        assert "weather" not in grammar + tokenizer.decode(script.started[0].prompt)


class City(BaseModel):
    name: str
    degrees: int


async def test_structured_output_is_parsed(tokenizer: Tokenizer) -> None:
    script, made = app(tokenizer, '{"name": "Ulm", "degrees": 7}')
    async with listening(made) as port, client_at(port) as client:
        answer = await client.responses.parse(model=MODEL, input="Where?", text_format=City)
        async with client.responses.stream(model=MODEL, input="Where?", text_format=City) as stream:
            streamed = await stream.get_final_response()
    assert answer.output_parsed == streamed.output_parsed == City(name="Ulm", degrees=7)
    assert "degrees" in script.started[0].sampling.grammar
    assert script.started[0].sampling.grammar == script.started[1].sampling.grammar
    assert answer.text.format.type == "json_schema" and answer.text.format.strict


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_thoughts(tokenizer: Tokenizer, summary: str | None) -> None:
    script, made = app(with_template(tokenizer, THINKS), THOUGHT + CALL, "Yes.")
    asked: list[Any] = [{"role": "user", "content": "Warm?"}]
    fields: dict[str, Any] = {} if summary is None else {"reasoning": {"effort": "low", "summary": summary}}
    kind = "response.reasoning_text" if summary is None else "response.reasoning_summary_text"
    async with listening(made) as port, client_at(port) as client:
        stream = await client.responses.create(model=MODEL, input=asked, stream=True, tools=[WEATHER], **fields)
        events = [event async for event in stream]
        first = complete(events[-1].response)
        thoughts, call = first.output
        assert "".join(event.delta for event in events if event.type == f"{kind}.delta") == "Warm? é 😀"
        assert [part.text for part in (thoughts.content if summary is None else thoughts.summary)] == ["Warm? é 😀"]
        assert len(thoughts.summary or ()) + len(thoughts.content or ()) == 1
        assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
        asked += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
        second = await client.responses.create(model=MODEL, input=asked, tools=[WEATHER])
    assert second.output_text == "Yes."
    assert "[assistant]Warm? é 😀|" in tokenizer.decode(script.started[1].prompt)


async def test_what_ends_too_early_is_incomplete(tokenizer: Tokenizer) -> None:
    _, made = app(with_template(tokenizer, OPENED), "Warm? " + TEXT)
    async with listening(made) as port, client_at(port) as client:
        answer = complete(await client.responses.create(model=MODEL, input="Hi", max_output_tokens=5))
        stream = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=5, stream=True)
        last = [event async for event in stream][-1]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == answer.usage.output_tokens_details.reasoning_tokens == 5
    assert [item.type for item in answer.output] == ["reasoning"] and answer.output_text == ""
    assert last.type == "response.incomplete" and last.response.incomplete_details.reason == "max_output_tokens"


async def test_logprobs_and_headers(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(always_saying(tokenizer, "é 😀!"))
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        raw = await client.responses.with_raw_response.create(
            model=MODEL,
            input="Hi",
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
            top_logprobs=2,
            store=True,
            extra_body={"seed": 7, "service_class": "interactive", "top_k": 3},
            extra_headers={"x-request-id": "mine"},
        )
    part = raw.parse().output[0].content[0]
    assert b"".join(bytes(item.bytes) for item in part.logprobs).decode() == "é 😀!"
    assert all(len(item.top_logprobs) == 2 for item in part.logprobs)
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-millrace-ignored"] == "include.reasoning.encrypted_content, store"
    request = script.started[0]
    assert (request.sampling.seed, request.sampling.top_k, request.service_class) == (7, 3, "interactive")


async def test_errors_become_the_clients_exceptions(tokenizer: Tokenizer) -> None:
    async def refuse(request: Request, index: int) -> None:
        raise Overloaded("the queue is full", retry_after=2.2)

    made = app_of(ScriptedGenerate(always_saying(tokenizer, "x"), before=refuse), tokenizer, api_key=KEY)
    async with listening(made) as port, client_at(port) as client:
        for stream in (False, True):  # a stream that never began is refused with a status of its own
            with pytest.raises(openai.RateLimitError) as limited:
                await client.responses.create(model=MODEL, input="Hi", stream=stream)
            assert limited.value.response.headers["retry-after"] == "3"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="other", input="Hi")
        assert unknown.value.param == "model"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.BadRequestError, match="keeps no state") as state:
            await client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")
        assert state.value.param == "previous_response_id"


async def test_an_error_in_mid_stream_ends_it_as_failed(tokenizer: Tokenizer) -> None:
    async def break_at_five(request: Request, index: int) -> None:
        if index == 5:
            raise WorkerLost("the worker is gone")

    script = ScriptedGenerate(always_saying(tokenizer, TEXT), before=break_at_five)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = [event async for event in stream]
        async with httpx.AsyncClient(timeout=60) as raw:
            text = (await raw.post(f"http://127.0.0.1:{port}{PATH}", json={"input": "Hi", "stream": True})).text
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error" and last.response.error.message == "the worker is gone"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert not any(word in text for word in ("response.completed", "response.output_item.done", "[DONE]"))


async def test_the_endpoint_is_described_and_keeps_nothing(tokenizer: Tokenizer) -> None:
    _, made = app(tokenizer, "x")
    async with calling(made) as client:
        answer = await client.post(PATH, json={"input": "hi"})
        openapi = (await client.get("/openapi.json")).json()
        wrong = await client.get(f"{PATH}/{answer.json()['id']}")
    assert wrong.status_code == 404
    body = openapi["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = openapi["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert {"input", "instructions", "previous_response_id", "ttft_slo_ms"} <= described["properties"].keys()
