"""What items become as messages of a chat, and how what is not served is refused."""

from __future__ import annotations

from typing import Any

import pytest

from serving.api.fields import MOST_NAMED
from serving.api.response_input import translated
from serving.api.response_schema import MAX_METADATA, ResponsesBody
from serving.api.translation import place_of
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import ScriptedGenerate, app_of, calling, saying
from tests.serving.api.test_tools import TEMPLATE, with_template

PATH = "/v1/responses"
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
SUMMARY = {
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "u"}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}

AS_USER = {"role": "user", "content": "hi"}
AS_TEXT = [{"type": "text", "text": "a"}]
AS_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
AS_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7"}

ITEMS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("a message", [USER], [AS_USER]),
    ("a developer's", [{"role": "developer", "content": "x"}], [{"role": "developer", "content": "x"}]),
    (
        "a whole turn is one message",
        [USER, THOUGHT, SAID, CALL, RESULT],
        [
            AS_USER,
            {"role": "assistant", "reasoning_content": "t", "content": AS_TEXT, "tool_calls": [AS_CALL]},
            AS_RESULT,
        ],
    ),
    ("two calls", [CALL, CALL, RESULT], [{"role": "assistant", "tool_calls": [AS_CALL, AS_CALL]}, AS_RESULT]),
    ("two texts", [SAID, SAID], [{"role": "assistant", "content": AS_TEXT}] * 2),
    (
        "text after a call",
        [CALL, SAID],
        [{"role": "assistant", "tool_calls": [AS_CALL]}, {"role": "assistant", "content": AS_TEXT}],
    ),
    (
        "calls of two turns",
        [CALL, RESULT, THOUGHT, CALL],
        [
            {"role": "assistant", "tool_calls": [AS_CALL]},
            AS_RESULT,
            {"role": "assistant", "reasoning_content": "t", "tool_calls": [AS_CALL]},
        ],
    ),
    ("a summary alone", [SUMMARY, USER], [{"role": "assistant", "reasoning_content": "s\nu"}, AS_USER]),
    ("no thoughts", [{"type": "reasoning", "summary": []}, USER], [AS_USER]),
    (
        "a refusal",
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{"role": "assistant", "content": [{"type": "text", "text": "no"}]}],
    ),
    (
        "a result in parts",
        [CALL, {**RESULT, "output": [{"type": "input_text", "text": "7"}]}],
        [
            {"role": "assistant", "tool_calls": [AS_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
        ],
    ),
]


@pytest.mark.parametrize(("items", "messages"), [case[1:] for case in ITEMS], ids=[case[0] for case in ITEMS])
def test_items_as_messages(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    plain = [{**item, "content": [{"type": "output_text", "text": "a"}]} if item is SAID else item for item in items]
    asked = translated(ResponsesBody.model_validate({"input": plain}))
    assert asked.chat["messages"] == messages


def test_places_lead_back_to_the_clients_fields() -> None:
    said = {"role": "assistant", "content": "a"}
    body = {"instructions": "i", "input": [USER, THOUGHT, said, CALL, RESULT], "tools": [FUNCTION]}
    asked = translated(ResponsesBody.model_validate(body))
    for param, place in {
        "messages[0].content": "instructions",
        "messages[1].content": "input[0].content",
        "messages[2].content": "input[2].content",
        "messages[2].tool_calls[0].function.arguments": "input[3].arguments",
        "messages[2].tool_calls[0].id": "input[3].call_id",
        "messages[3].content": "input[4].output",
        "messages[3].tool_call_id": "input[4].call_id",
        "messages": "input",
        "tools[0].function.parameters": "tools[0].parameters",
        "tool_choice.function.name": "tool_choice.name",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }.items():
        assert place_of(param, asked.places) == place


DEEP = b'{"a":' * 300 + b"1" + b"}" * 300
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "zzz"}}
UNKEPT = {**FUNCTION, "strict": True, "parameters": {"properties": {"a": {"uniqueItems": True}}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items of the conversation again"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "keeps no state"),
    ({"background": True}, "background", "keeps no state"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "keeps no state"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "keeps no state"),
    ({"input": [USER, {"type": "web_search_call", "id": "ws_1"}]}, "input[1]", "'web_search_call'"),
    ({"input": []}, "input", "no message"),
    ({"input": [{**USER, "role": "wizard"}]}, "input[0].role", "'user'"),
    ({"input": [{**USER, "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'input_image'"),
    ({"input": [{**RESULT, "output": [{"type": "input_file"}]}]}, "input[0].output[0]", "'input_file'"),
    ({"input": [{**CALL, "call_id": ""}]}, "input[0].call_id", "at least 1"),
    ({"input": [CALL] * 129}, "input[0].tool_calls", "at most 128"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
    ({"tools": [FUNCTION, {"type": "custom", "name": "x"}]}, "tools[1]", "'custom'"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "two tools"),
    ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name", "pattern"),
    ({"tools": [UNKEPT]}, "tools", "uniqueItems"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "none of the tools"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
    (
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**FUNCTION, "name": "g"}]},
        },
        "tool_choice.tools[0].name",
        "none of the tools",
    ),
    ({"text": {"format": SCHEMA}}, "text.format", "zzz"),
    ({"text": {"format": {**SCHEMA, "color": 1}}}, "text.format.color", "not a supported"),
    (
        {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
        "guided_regex",
        "text.format and guided_regex",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 100_000}, "max_output_tokens", "maximum context length"),
    ({"input": "x" * 3000}, "input", "maximum context length"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"top_logprobs": 21}, "top_logprobs", "20"),
    ({"include": ["everything"]}, "include[0]", "should be"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {str(i): "a" for i in range(MAX_METADATA + 1)}}, "metadata", "at most 16"),
    ({"metadata": {"a" * 65: "a"}}, "metadata", "64"),
    ({"n": 2}, "n", "not a supported"),
    ({"messages": [USER]}, "messages", "not a supported"),
    ({"stop": ["a"]}, "stop", "not a supported"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "not a supported"),
    ({"moderation": {"model": "m"}}, "moderation", "not a supported"),
    ({"model": "other"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("fields", "param", "told"), REFUSED)
async def test_refusals_name_the_clients_field(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, told: str
) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, with_template(tokenizer, TEMPLATE))) as client:
        answer = await client.post(PATH, json={"input": "hi", **fields})
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and told in error["message"], error
    assert script.started == []


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"tools":[{"type":"function","name":"f","parameters":%b}],"tool_choice":"none"', "tools[0].parameters"),
        (b'"text":{"format":{"type":"json_schema","name":"a","schema":{"a":%b}}}', "text.format"),
    ],
)
async def test_what_is_nested_too_deep_is_refused(tokenizer: Tokenizer, field: bytes, param: str) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        answer = await client.post(PATH, content=b'{"input":"hi",' + field % DEEP + b"}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


PASSES: list[tuple[dict[str, Any], str]] = [
    ({"store": False, "background": False, "previous_response_id": None, "conversation": None, "prompt": None}, ""),
    ({"tools": [], "tool_choice": "auto", "include": [], "metadata": None, "text": None, "reasoning": None}, ""),
    ({"store": True, "truncation": "auto"}, "store, truncation"),
    ({"truncation": "disabled", "service_tier": None, "n": 1, "stream_options": {}}, ""),
    ({"include": ["reasoning.encrypted_content", "web_search_call.results"]}, "include.reasoning.encrypted_content"),
    ({"reasoning": {"effort": "high", "generate_summary": "auto"}}, "reasoning.effort"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options.include_obfuscation"),
    ({"max_tool_calls": 3, "safety_identifier": "a", "user": "me"}, "max_tool_calls, safety_identifier"),
    ({"input": [{**USER, "id": "msg_1", "status": "completed", "type": "message"}]}, ""),
    ({"input": [{**USER, "type": None, "phase": "commentary"}]}, "input.phase"),
    ({"input": [USER, {**THOUGHT, "id": "rs_1", "encrypted_content": "abc"}]}, "input.encrypted_content"),
]


@pytest.mark.parametrize(("fields", "ignored"), PASSES)
async def test_what_passes_and_what_of_it_is_ignored(
    tokenizer: Tokenizer, fields: dict[str, Any], ignored: str
) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, strict_fields=True)) as client:
        answer = await client.post(PATH, json={"input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-millrace-ignored", "") == ignored


async def test_what_is_named_as_ignored_is_bounded(tokenizer: Tokenizer) -> None:
    body = {"input": "hi", "store": True, "truncation": "auto", **{f"x{number}": 1 for number in range(MOST_NAMED)}}
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 200
    named = answer.headers["x-millrace-ignored"].split(", ")
    assert len(named) == MOST_NAMED + 1 and named[-1] == "..." and "store" not in named
