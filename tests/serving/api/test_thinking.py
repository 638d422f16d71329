"""Thoughts through the API: `reasoning_content`, whole and streamed, beside content and tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, calling, listening
from tests.serving.api.test_tools import ADD, ASKED, CALL, WEATHER, app, client_at, with_template

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.content }}{% endfor %}[assistant]"
THINKS = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + CHAT + "{# </think> #}"
OPENED = THINKS + "<think>\n"
THOUGHT = "<think>\nWarm? é 😀\n</think>\n\n"
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}

ANSWERS: list[tuple[str, str, dict[str, Any], str | None, str | None, int]] = [
    (THINKS, THOUGHT + "7 degrees.", {}, "Warm? é 😀", "7 degrees.", 0),
    (THINKS, "7 degrees.", {}, None, "7 degrees.", 0),
    (OPENED, THOUGHT.removeprefix("<think>") + "7 degrees.", {}, "Warm? é 😀", "7 degrees.", 0),
    (OPENED, "Warm?", {}, "Warm?", None, 0),
    (THINKS, THOUGHT + CALL, {"tools": [WEATHER, ADD]}, "Warm? é 😀", None, 1),
    (THINKS, f"<think>{CALL}</think>No.", {"tools": [WEATHER, ADD]}, CALL, "No.", 0),
    (THINKS, THOUGHT + "I ask. " + CALL, {"tools": [WEATHER], "n": 2}, "Warm? é 😀", "I ask.", 1),
    (THINKS, "", {}, None, "", 0),
]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(("template", "text", "fields", "thoughts", "content", "calls"), ANSWERS)
async def test_thoughts_are_apart_whole_and_streamed(
    tokenizer: Tokenizer,
    chunk: int,
    template: str,
    text: str,
    fields: dict[str, Any],
    thoughts: str | None,
    content: str | None,
    calls: int,
) -> None:
    _, made = app(with_template(tokenizer, template), text, chunk=chunk)
    async with listening(made) as port, client_at(port) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=ASKED, **fields)
        stream = await client.chat.completions.create(model=MODEL, messages=ASKED, stream=True, **fields)
        chunks = [part.choices[0] async for part in stream]
    for choice in whole.choices:
        message = choice.message.model_dump()
        assert message.get("reasoning_content") == thoughts
        assert message["content"] == content
        assert len(message["tool_calls"] or ()) == calls
        own = [part for part in chunks if part.index == choice.index]
        deltas = [part.delta.model_dump() for part in own]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (thoughts or "")
        assert "".join(delta["content"] or "" for delta in deltas) == (content or "")
        assert sum(call["id"] is not None for delta in deltas for call in delta["tool_calls"] or ()) == calls
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + [choice.finish_reason]


async def test_without_a_parser_thoughts_are_content(tokenizer: Tokenizer) -> None:
    script, made = app(with_template(tokenizer, THINKS), THOUGHT + "Yes.", reasoning_parser="none")
    async with calling(made) as client:
        message = (await client.post("/v1/chat/completions", json={"messages": ASKED})).json()["choices"][0]["message"]
        await client.post("/v1/chat/completions", json={"messages": ASKED, **SCHEMA})
    assert message["content"] == THOUGHT + "Yes."
    assert "reasoning_content" not in message
    assert "think" not in script.started[1].sampling.grammar


async def test_a_grammar_begins_after_thoughts(tokenizer: Tokenizer) -> None:
    script, made = app(with_template(tokenizer, THINKS), THOUGHT + "{}")
    async with calling(made) as client:
        response = await client.post("/v1/chat/completions", json={"messages": ASKED, **SCHEMA})
    assert response.json()["choices"][0]["message"]["content"] == "{}"
    assert "</think>" in script.started[0].sampling.grammar.replace("\\", "")


async def test_thoughts_are_sent_back(tokenizer: Tokenizer) -> None:
    script, made = app(with_template(tokenizer, THINKS), "Hi")
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "I thought."}
    async with calling(made) as client:
        assert (await client.post("/v1/chat/completions", json={"messages": [said, *ASKED]})).status_code == 200
    assert "[assistant]I thought.|Yes." in tokenizer.decode(script.started[0].prompt)


@pytest.mark.parametrize(
    ("begun", "text", "thoughts", "content"),
    [
        ("It is", " 7 degrees.", None, " 7 degrees."),  # an answer goes on
        ("<think>Warm?</think>It is", " 7 degrees.", None, " 7 degrees."),
        ("<think>Warm", "? é</think>7 degrees.", "? é", "7 degrees."),
        ("", "Warm?</think>7 degrees.", "Warm?", "7 degrees."),
        ("", "<think>Warm?</think>7 degrees.", "Warm?", "7 degrees."),
    ],
)
async def test_an_answer_that_goes_on_is_no_thought(
    tokenizer: Tokenizer, begun: str, text: str, thoughts: str | None, content: str
) -> None:
    _, made = app(with_template(tokenizer, CHAT), text, reasoning_parser="deepseek_r1")
    fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False} if begun else {}
    messages = [*ASKED, {"role": "assistant", "content": begun}] if begun else ASKED
    async with calling(made) as client:
        answer = (await client.post("/v1/chat/completions", json={"messages": messages, **fields})).json()
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thoughts, content)
