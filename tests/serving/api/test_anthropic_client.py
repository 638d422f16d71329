"""The `anthropic` package drives a real server on a real socket."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, ScriptedGenerate, app_of, listening, saying
from tests.serving.api.test_thinking import THINKS, THOUGHT
from tests.serving.api.test_tools import CALL, TEMPLATE, TWO_CALLS, app, with_template

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: list[Any] = [{"role": "user", "content": "How warm is it in Ulm?"}]
TEXT = "The mill stands where the river narrows, déjà vu 😀 and on."
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}


def client_at(port: int, key: str = KEY) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0)


def plain(message: Any) -> dict[str, Any]:
    """A message without the ids that each answer has of its own."""
    shown: dict[str, Any] = message.model_dump(mode="json", exclude_none=True)
    for part in (shown, *shown["content"]):
        part.pop("id", None)
        part.pop("signature", None)
    return shown


async def both(client: anthropic.AsyncAnthropic, **asked: Any) -> tuple[Any, list[Any]]:
    """The answer, and the events of the same one streamed, which come to the same message."""
    asked = {"model": MODEL, "max_tokens": 1000, "messages": ASKED, **asked}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        events = [event async for event in stream]
        assert plain(await stream.get_final_message()) == plain(whole)
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    return whole, events


async def test_a_text(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, TEXT), cached=2)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        answer = await client.messages.create(model=MODEL, max_tokens=200, messages=HELLO, system="Be brief.")
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    prompt = tokenizer.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert script.started[0].prompt == tuple(prompt)
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text == TEXT
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", MODEL, "max_tokens")
    assert answer.usage.input_tokens == len(prompt) - 2
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.output_tokens == len(tokenizer.encode(TEXT))
    assert answer.id == script.started[0].request_id and answer.id.startswith("msg_")
    assert answer._request_id is not None and answer._request_id in answer.id
    assert counted.input_tokens == len(prompt)
    assert len(script.started) == 1  # counting generates nothing


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_a_stream(tokenizer: Tokenizer, chunk: int) -> None:
    script = ScriptedGenerate(saying(tokenizer, TEXT), chunk=chunk, cached=3)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        whole, events = await both(client, messages=HELLO, max_tokens=200)
        async with client.messages.stream(model=MODEL, max_tokens=200, messages=HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
        raw = await client.messages.create(model=MODEL, max_tokens=200, messages=HELLO, stream=True)
        kinds = [event.type async for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens
    assert events[0].message.stop_reason is None


@pytest.mark.parametrize(
    ("said", "fields", "reason", "sequence", "text"),
    [
        ("one two", {}, "end_turn", None, "one two"),
        ("one two END three", {"stop_sequences": ["zzz", "END"]}, "stop_sequence", "END", "one two "),
        ("one two three four five", {"max_tokens": 3}, "max_tokens", None, None),
        ("many words " * 5000, {"max_tokens": 20_000}, "model_context_window_exceeded", None, None),
    ],
)
async def test_why_an_answer_stopped(
    tokenizer: Tokenizer, said: str, fields: dict[str, Any], reason: str, sequence: str | None, text: str | None
) -> None:
    _, made = app(tokenizer, said, chunk=70 if len(said) > 99 else 1)
    async with listening(made) as port, client_at(port) as client:
        answer, events = await both(client, **fields)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    assert text is None or answer.content[0].text == text
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == (reason, sequence)
    assert delta.usage.output_tokens == answer.usage.output_tokens


async def test_nothing_is_said(tokenizer: Tokenizer) -> None:
    _, made = app(tokenizer, "")
    async with listening(made) as port, client_at(port) as client:
        answer, _ = await both(client)
        none, _ = await both(client, max_tokens=0)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "end_turn", 1)
    assert (none.content, none.stop_reason, none.usage.output_tokens) == ([], "max_tokens", 0)


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["generic", "native"])
async def test_a_conversation_of_two_turns(tokenizer: Tokenizer, template: str | None) -> None:
    tokenizer = tokenizer if template is None else with_template(tokenizer, template)
    script, made = app(tokenizer, TWO_CALLS, "It is 7 degrees.")
    async with listening(made) as port, client_at(port) as client:
        messages: list[Any] = [*ASKED]
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1000, "tools": [WEATHER, ADD]}
        first = await client.messages.create(messages=messages, **asked)
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert (first.stop_reason, first.content[0].text) == ("tool_use", "I ask twice.")
        calls = first.content[1:]
        assert [(call.name, call.input) for call in calls] == [
            ("weather", {"city": "Ulm é 😀"}),
            ("add", {"a": [1, 2]}),
        ]
        assert len({call.id for call in calls}) == 2 and all(call.id.startswith("toolu_") for call in calls)
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "7 degrees"},
            {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "too hard"}]},
            {"type": "text", "text": "Go on."},
        ]
        results[1]["is_error"] = True
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await client.messages.create(messages=messages, **asked)
        counted = await client.messages.count_tokens(messages=messages, model=MODEL, tools=[WEATHER, ADD])
    assert [block.text for block in second.content] == ["It is 7 degrees."]
    assert second.stop_reason == "end_turn"
    assert counted.input_tokens == second.usage.input_tokens == len(script.started[1].prompt)
    shown = tokenizer.decode(script.started[1].prompt, skip_special_tokens=False)
    for part in ("The weather of a city", "I ask twice.", '"name": "weather"', "Ulm é 😀", "7 degrees"):
        assert part in shown
    assert shown.index("7 degrees") < shown.index("Error: too hard") < shown.index("Go on.")


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["generic", "native"])
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        TWO_CALLS,
        "No <tool_call> at all.",
        '<tool_call>{"name": "weather"',
        '<tool_call>{"name": "weather", "arguments": {"city": "Ulm", "a": "b',
        f"{CALL} So{CALL}",
    ],
)
async def test_a_stream_comes_to_the_whole_answer(
    tokenizer: Tokenizer, chunk: int, template: str | None, text: str
) -> None:
    tokenizer = tokenizer if template is None else with_template(tokenizer, template)
    _, made = app(tokenizer, text, chunk=chunk)
    async with listening(made) as port, client_at(port) as client:
        await both(client, tools=[WEATHER, ADD])


async def test_an_input_that_is_no_object_can_be_read(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {\'city\': 1}}</tool_call>'
    for chunk in (1, 5, 1000):
        _, made = app(with_template(tokenizer, TEMPLATE), text, chunk=chunk)
        async with listening(made) as port, client_at(port) as client:
            answer, _ = await both(client, tools=[WEATHER])
        assert answer.content[0].input == {"INVALID_JSON": "{'city': 1}"}


async def test_tool_choice(tokenizer: Tokenizer) -> None:
    script, made = app(with_template(tokenizer, TEMPLATE), CALL)
    choices: list[Any] = [{"type": kind} for kind in ("auto", "any", "none")] + [{"type": "tool", "name": "add"}]
    async with listening(made) as port, client_at(port) as client:
        for choice in choices:
            await client.messages.create(
                model=MODEL, max_tokens=100, messages=ASKED, tools=[WEATHER, ADD], tool_choice=choice
            )
        single = {"type": "auto", "disable_parallel_tool_use": True}
        one = await client.messages.create(
            model=MODEL, max_tokens=99, messages=ASKED, tools=[WEATHER], tool_choice=single
        )
    grammars = [request.sampling.grammar for request in script.started]
    assert not grammars[0] and not grammars[2] and not grammars[4]
    assert "weather" in grammars[1] and "add" in grammars[1]
    assert "weather" not in grammars[3] and "add" in grammars[3]
    shown = [tokenizer.decode(request.prompt) for request in script.started]
    assert "The weather of a city" in shown[0] and "The weather of a city" not in shown[2]
    assert [block.type for block in one.content] == ["tool_use"]


async def test_thoughts_are_blocks_and_are_sent_back(tokenizer: Tokenizer) -> None:
    script, made = app(with_template(tokenizer, THINKS), THOUGHT + "I ask. " + CALL)
    async with listening(made) as port, client_at(port) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        whole, events = await both(client, tools=[WEATHER], thinking=thinking)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert (whole.content[0].thinking, whole.content[1].text) == ("Warm? é 😀", "I ask.")
        assert whole.content[0].signature
        assert any(event.type == "signature" for event in events)
        redacted = {"type": "redacted_thinking", "data": "abc"}
        said = {"role": "assistant", "content": [redacted, *whole.content[:2]]}
        await client.messages.create(
            model=MODEL, max_tokens=10, messages=[*ASKED, said, {"role": "user", "content": "So?"}]
        )
    assert "[assistant]Warm? é 😀|I ask.[user]" in tokenizer.decode(script.started[2].prompt)


async def test_thinking_is_switched_where_the_template_can_be_told(tokenizer: Tokenizer) -> None:
    switch = "{% if enable_thinking is defined %}thinks: {{ enable_thinking }}{% endif %}"
    for template, told in ((switch + THINKS, True), (THINKS, False), (TEMPLATE, False)):
        script, made = app(with_template(tokenizer, template), "Hi")
        async with listening(made) as port, client_at(port) as client:
            ignored = []
            for thinking in ({"type": "enabled", "budget_tokens": 2000}, {"type": "disabled"}, anthropic.omit):
                raw = await client.messages.with_raw_response.create(
                    model=MODEL, max_tokens=10, messages=ASKED, thinking=thinking
                )
                ignored.append(raw.headers.get("x-millrace-ignored", ""))
        prompts = [tokenizer.decode(request.prompt) for request in script.started]
        assert ["thinks: True" in text for text in prompts] == [told, False, False]
        assert ["thinks: False" in text for text in prompts] == [False, told, False]
        budget = "thinking.budget_tokens"
        left = {switch + THINKS: ("", ""), THINKS: ("", "thinking"), TEMPLATE: (", thinking", "")}[template]
        assert ignored == [budget + left[0], left[1], ""]


async def test_an_answer_goes_on_with_the_last_turn(tokenizer: Tokenizer) -> None:
    script, made = app(tokenizer, " is Paris.")
    begun = [{"role": "user", "content": "Capital"}, {"role": "assistant", "content": "The capital of France"}]
    async with listening(made) as port, client_at(port) as client:
        answer, _ = await both(client, messages=begun)
        counted = await client.messages.count_tokens(model=MODEL, messages=begun)
    assert answer.content[0].text == " is Paris."
    assert tokenizer.decode(script.started[0].prompt, skip_special_tokens=False).endswith(
        "<|im_start|>assistant\nThe capital of France"
    )
    assert counted.input_tokens == answer.usage.input_tokens


async def test_an_answer_follows_a_schema(tokenizer: Tokenizer) -> None:
    script, made = app(tokenizer, '{"city": "Ulm"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    async with listening(made) as port, client_at(port) as client:
        raw = await client.messages.with_raw_response.create(
            model=MODEL, max_tokens=99, messages=ASKED, output_config=config
        )
        older = {"output_format": {"type": "json_schema", "schema": schema}}
        await client.messages.create(model=MODEL, max_tokens=99, messages=ASKED, extra_body=older)
        assert json.loads((await raw.parse()).content[0].text) == {"city": "Ulm"}
    assert raw.headers["x-millrace-ignored"] == "output_config.effort"
    assert script.started[0].sampling.grammar == script.started[1].sampling.grammar != ""


class City(BaseModel):
    city: str
    days: list[int]


async def test_helpers_of_the_package_work(tokenizer: Tokenizer) -> None:
    answer = City(city="Ulm", days=[1, 2])
    _, made = app(tokenizer, answer.model_dump_json())
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 99, "messages": ASKED}
    async with listening(made) as port, client_at(port) as client:
        parsed = await client.messages.parse(output_format=City, **asked)
        assert parsed.parsed_output == answer
        async with client.messages.stream(output_format=City, **asked) as stream:
            assert (await stream.get_final_message()).parsed_output == answer
        assert [model.id async for model in client.models.list()] == [MODEL]
        beta = await client.beta.messages.create(betas=["context-management-2025-06-27"], **asked)
        assert beta.content[0].text == answer.model_dump_json()


async def test_tools_are_run(tokenizer: Tokenizer) -> None:
    ran: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        ran.append(city)
        return "7 degrees"

    script, made = app(with_template(tokenizer, TEMPLATE), CALL, "It is 7 degrees.")
    async with listening(made) as port, client_at(port) as client:
        runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=200, messages=ASKED, tools=[weather])
        last = await runner.until_done()
    assert ran == ["Ulm é 😀"] and len(script.started) == 2
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "It is 7 degrees.")
