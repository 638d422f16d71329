"""Turns of content blocks become the chat messages they mean, in time linear in them, and errors name the blocks."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from serving.api.body import checked, parse_body
from serving.api.messages_body import MessagesBody
from serving.api.messages_translation import chat_of
from serving.api.schema import ChatCompletionBody
from serving.api.translation import Translation, place_of
from serving.errors import InvalidRequest

USER = {"role": "user", "content": "Hi"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "7"}
CALL = {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}


def translated(**fields: Any) -> Translation:
    body = {"max_tokens": 9, "messages": [USER], **fields}
    asked = chat_of(parse_body(MessagesBody, json.dumps(body).encode(), strict=True)[0], {"enable_thinking"})
    checked(ChatCompletionBody, asked.chat)
    return asked


def messages(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The chat messages, each with its content as texts."""
    found = translated(messages=[*turns], **fields).chat["messages"]
    return [{**message, "content": [part["text"] for part in message["content"]]} for message in found]


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        translated(**fields)
    return error.value.message


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": shown} for shown in texts]


def said(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [*texts], **more}


def test_turns_of_one_role_are_one() -> None:
    turns = [USER, {"role": "user", "content": text("a", "b")}, {"role": "assistant", "content": "c"}, USER]
    assert messages(*turns) == [said("user", "Hi", "a", "b"), said("assistant", "c"), said("user", "Hi")]


def test_the_system_prompt_comes_first_without_what_is_not_for_the_model() -> None:
    assert messages(USER, system="S") == [said("system", "S"), said("user", "Hi")]
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=00000;"
    assert messages(USER, system=text(billing, "A", "B"))[0] == said("system", "A", "B")
    assert messages(USER, system=f"{billing}\nA")[0] == said("system", "A")
    for nothing in ("", [], text(billing), text("")):
        assert messages(USER, system=nothing) == [said("user", "Hi")]
    middle = {"role": "system", "content": text("C")}
    assert messages(middle, USER, middle, system="S") == [
        said("system", "S", "C"),
        said("user", "Hi"),
        said("system", "C"),
    ]


def test_calls_and_results_become_messages() -> None:
    failed = {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": text("no", "way")}
    turns = [
        USER,
        {"role": "assistant", "content": [*text("I ask."), CALL, {**CALL, "id": "b"}]},
        {"role": "user", "content": [RESULT, failed, {"type": "tool_result", "tool_use_id": "c"}, *text("Go on.")]},
        {"role": "user", "content": "!"},
    ]
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": "a", "function": function}, {"id": "b", "function": function}]
    assert messages(*turns) == [
        said("user", "Hi"),
        said("assistant", "I ask.", tool_calls=calls),
        said("tool", "7", tool_call_id="a"),
        said("tool", "Error: no\nway", tool_call_id="b"),
        said("tool", "", tool_call_id="c"),
        said("user", "Go on.", "!"),
    ]


def test_thoughts_are_handed_to_the_template() -> None:
    thoughts = [{"type": "thinking", "thinking": word, "signature": "s"} for word in "ab"]
    redacted = {"type": "redacted_thinking", "data": "x"}
    found = messages(USER, {"role": "assistant", "content": [*thoughts, redacted, *text("c")]}, USER)
    assert found[1] == said("assistant", "c", reasoning_content="a\nb")


def test_options_have_the_names_that_a_chat_has() -> None:
    schema = {"type": "object"}
    asked = translated(
        model="m",
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stream=True,
        seed=7,
        cache_salt="salt",
        metadata={"user_id": "me"},
        tools=[{**TOOL, "type": "custom", "description": "d", "strict": True, "eager_input_streaming": True}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    function = {"name": "add", "description": "d", "parameters": schema, "strict": True}
    assert {name: value for name, value in asked.chat.items() if name != "messages"} == {
        "model": "m",
        "max_completion_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "seed": 7,
        "cache_salt": "salt",
        "user": "me",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    for choice, chat in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert translated(tools=[TOOL], tool_choice={"type": choice}).chat["tool_choice"] == chat
    own = translated(thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": False, "a": 1})
    assert own.chat["chat_template_kwargs"] == {"enable_thinking": False, "a": 1}


def test_the_last_turn_of_an_assistant_is_continued() -> None:
    asked = translated(messages=[USER, {"role": "assistant", "content": "The"}])
    assert (asked.chat["continue_final_message"], asked.chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in translated().chat
    called = [USER, {"role": "assistant", "content": [CALL]}]
    assert refused(messages=called) == "messages: the last turn has tool_use blocks without results"


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "server_tool_use", "container_upload"])
def test_blocks_that_are_not_served_are_named(kind: str) -> None:
    block = {"type": kind, "source": {"type": "url", "url": "http://a"}}
    for role in ("user", "assistant"):
        told = refused(messages=[USER, {"role": role, "content": [*text("a"), block]}])
        assert told.startswith(f"messages[1].content[1]: '{kind}' is not supported here: ")
    told = refused(messages=[{"role": "user", "content": [{**RESULT, "content": [block]}]}])
    assert told.startswith(f"messages[0].content[0].content[0]: '{kind}' is not supported here: ")
    assert refused(system=[block]).startswith(f"system[0]: '{kind}' is not supported here: ")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0]: 'tool_use' is not supported"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: Input tag 'tool' found using 'role'"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
            "tools[0]: 'web_search_202",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: 'bash_20250124' is not supported here"),
        ({"tools": [TOOL] * 129}, "tools: at most 128 tools are supported"),
        ({"tool_choice": {"type": "some"}}, "tool_choice: Input tag 'some' found"),
        ({"thinking": {"type": "often"}}, "thinking.type: Input should be"),
        ({"stop_sequences": ["a"] * 33}, "stop_sequences: at most 32 stop strings"),
        ({"container": "c"}, "container: is not a supported field"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers: is not a supported field"),
        ({"n": 2}, "n: is not a supported field"),
        ({"output_format": {"type": "json_schema", "schema": {}, "strict": 1}}, "output_format.strict: is not a supp"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: Input should be 'json_schema'"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format and output_config.format exclude each other",
        ),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], told: str) -> None:
    assert refused(**fields).startswith(told)


def test_places_lead_back_to_the_blocks() -> None:
    turns = [USER, {"role": "assistant", "content": [*text("a"), CALL]}, {"role": "user", "content": [RESULT]}]
    places = translated(messages=turns, system="S", tools=[TOOL]).places
    for chat, shown in {
        "messages[0].content": "system.content",
        "messages[2].tool_calls[0].function.arguments": "messages[1].content[1].input",
        "messages[3].content": "messages[2].content[0].content",
        "tools[0].function.parameters": "tools[0].input_schema",
        "tools[0].function.name": "tools[0].name",
        "tool_choice.function.name": "tool_choice.name",
        "stop": "stop_sequences",
        "temperature": "temperature",
    }.items():
        assert place_of(chat, places) == shown


def test_neutral_fields_and_hints_pass() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": None, **cached}]}],
        "system": None,
        "tools": [],
        "container": None,
        "mcp_servers": [],
        "stop_sequences": [],
        "n": 1,
        "logprobs": False,
        "context_management": {"edits": []},
        "service_tier": "auto",
        **cached,
    }
    fields, ignored = parse_body(MessagesBody, orjson.dumps(body), strict=True)
    assert list(ignored.counted) == [
        "messages.content.cache_control",
        "context_management",
        "service_tier",
        "cache_control",
    ]
    assert fields.tools is None


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": text("a")},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x" * 100}]},
        {"role": "user", "content": [RESULT]},
    ],
)
def test_translating_takes_linear_time(turn: dict[str, Any]) -> None:
    def seconds(count: int) -> float:
        fields = MessagesBody.model_validate({"max_tokens": 9, "messages": [turn] * count})
        began = time.process_time()
        chat_of(fields)
        return time.process_time() - began

    seconds(100)
    short = min(seconds(1_000) for _ in range(3))
    assert min(seconds(8_000) for _ in range(2)) < 8 * 4 * short + 0.01
