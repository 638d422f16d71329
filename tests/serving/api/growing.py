"""Bodies that grow with a number, one family for each way of being large: their cost must grow no faster.


Each family makes a body of about so many bytes. Depends on nothing but the API's field names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"

Make = Callable[[int], bytes]


def _chat(**fields: Any) -> bytes:
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    return json.dumps({**good, **fields}, separators=(",", ":")).encode()


def _content(content: Any) -> bytes:
    return _chat(messages=[{"role": "user", "content": content}])


def _completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 1, **fields}, separators=(",", ":")).encode()


def _response(**fields: Any) -> bytes:
    return json.dumps({"input": "hi", "max_output_tokens": 1, **fields}, separators=(",", ":")).encode()


def _embedding(given: Any, **fields: Any) -> bytes:
    return json.dumps({"input": given, **fields}, separators=(",", ":")).encode()


def _raw(text: str) -> bytes:
    """A chat with these further bytes in it, which `json` would not write."""
    return b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,' + text.encode() + b"}"


def _nested(opening: str, closing: str, size: int) -> str:
    depth = size // (len(opening) + len(closing))
    return opening * depth + "1" + closing * depth


def _form(schema: Any) -> bytes:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _tool(number: int, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters or {"type": "object"}}}


def _messages(**fields: Any) -> bytes:
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    return json.dumps({**good, **fields}, separators=(",", ":")).encode()


def _blocks(role: str, block: Any, size: int) -> bytes:
    """A conversation whose second turn has so many blocks."""
    count = size // len(json.dumps(block, separators=(",", ":")))
    return _messages(messages=[{"role": "user", "content": "hi"}, {"role": role, "content": [block] * count}])


_TEXT_BLOCK = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
_THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "a"}
_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a"}]}
_CLIENT_TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "a"}
OF_RESPONSES: dict[str, tuple[str, Make]] = {
    "an input": (RESPONSES, lambda n: _response(input="mill " * (n // 5))),
    "instructions": (RESPONSES, lambda n: _response(instructions="mill " * (n // 5))),
    "streamed instructions": (RESPONSES, lambda n: _response(instructions="mill " * (n // 5), stream=True)),
    "items": (RESPONSES, lambda n: _response(input=[{"role": "user", "content": "a"}] * (n // 29))),
    "items of an assistant": (RESPONSES, lambda n: _response(input=[{"role": "assistant", "content": ""}] * (n // 33))),
    "items of no type": (RESPONSES, lambda n: _response(input=[{}] * (n // 3))),
    "wrong items": (RESPONSES, lambda n: _response(input=[1] * (n // 2))),
    "items of a wrong type": (RESPONSES, lambda n: _response(input=[{"type": "x"}] * (n // 13))),
    "items of thoughts": (RESPONSES, lambda n: _response(input=[THOUGHT] * (n // 71))),
    "items of calls": (RESPONSES, lambda n: _response(input=[CALLED] * (n // 71))),
    "calls and results": (RESPONSES, lambda n: _response(input=[CALLED, RESULT] * (n // 131))),
    "items of results": (RESPONSES, lambda n: _response(input=[RESULT] * (n // 59))),
    "parts of items": (
        RESPONSES,
        lambda n: _response(input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}] * (n // 32)}]),
    ),
    "parts of thoughts": (
        RESPONSES,
        lambda n: _response(
            input=[{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}] * (n // 36)}]
        ),
    ),
    "a long type": (RESPONSES, lambda n: _response(input=[{"type": "x" * n}])),
    "includes": (RESPONSES, lambda n: _response(include=["reasoning.encrypted_content"] * (n // 30))),
    "pairs": (RESPONSES, lambda n: _response(metadata={str(i): "a" for i in range(n // 11)})),
    "a large function": (
        RESPONSES,
        lambda n: _response(
            tools=[
                {"type": "function", "name": "f", "parameters": {"properties": {f"k{i}": {} for i in range(n // 10)}}}
            ]
        ),
    ),
    "allowed tools": (
        RESPONSES,
        lambda n: _response(
            tool_choice={
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [FUNCTION] * (n // 33),
            }
        ),
    ),
    "a form of words": (
        RESPONSES,
        lambda n: _response(
            text={"format": {"type": "json_schema", "name": "a", "schema": {"enum": [f"w{i}" for i in range(n // 9)]}}}
        ),
    ),
}


FAMILIES: dict[str, tuple[str, Make]] = {
    **OF_RESPONSES,
    "a long text": (CHAT, lambda n: _content("mill " * (n // 5))),
    "one long word": (CHAT, lambda n: _content("x" * n)),
    "no letters": (CHAT, lambda n: _content(" \n" * (n // 3))),
    "escapes": (CHAT, lambda n: _content("\u20ac" * (n // 6))),
    "many messages": (CHAT, lambda n: _chat(messages=[{"role": "user", "content": "a"}] * (n // 29))),
    "many roles": (CHAT, lambda n: _chat(messages=[{"role": "wizard", "content": "a"}] * (n // 31))),
    "many parts": (CHAT, lambda n: _content([{"type": "text", "text": "a"}] * (n // 26))),
    "wrong parts": (CHAT, lambda n: _content([1] * (n // 2))),
    "parts of parts": (CHAT, lambda n: _content([[[1]]] * (n // 6))),
    "parts of a wrong type": (CHAT, lambda n: _content([{"type": "image"}] * (n // 17))),
    "wrong messages": (CHAT, lambda n: _chat(messages=[1] * (n // 2))),
    "a long name": (CHAT, lambda n: _chat(messages=[{"role": "user", "content": "a", "name": "x" * n}])),
    "a long model": (CHAT, lambda n: _chat(model="x" * n)),
    "a long user": (CHAT, lambda n: _chat(user="x" * n)),
    "a long session": (CHAT, lambda n: _chat(prompt_cache_key="x" * n)),
    "a long class": (CHAT, lambda n: _chat(service_class="x" * n)),
    "unknown fields": (CHAT, lambda n: _chat(**{f"field{i}": i for i in range(n // 17)})),
    "unknown nested fields": (
        CHAT,
        lambda n: _chat(messages=[{"role": "user", "content": "a", f"x{i}": 1} for i in range(n // 37)]),
    ),
    "one field again and again": (CHAT, lambda n: _raw(",".join(['"n":1'] * (n // 6)))),
    "metadata": (CHAT, lambda n: _chat(metadata={str(i): "a" for i in range(n // 12)})),
    "template variables": (CHAT, lambda n: _chat(chat_template_kwargs={f"k{i}": "a" for i in range(n // 12)})),
    "stop strings": (CHAT, lambda n: _chat(stop=["a"] * (n // 4))),
    "a long stop string": (CHAT, lambda n: _chat(stop="x" * n)),
    "wrong stop strings": (CHAT, lambda n: _chat(stop=[1] * (n // 2))),
    "stop tokens": (CHAT, lambda n: _chat(stop_token_ids=[7] * (n // 2))),
    "logit bias": (CHAT, lambda n: _chat(logit_bias={str(i): 1 for i in range(n // 9)})),
    "logit bias, padded": (
        CHAT,
        lambda n: _chat(logit_bias={"0" * (i % 15) + "1" * (i > 14): 1 for i in range(n // 16)}),
    ),
    "logit bias for choices": (CHAT, lambda n: _chat(n=256, logit_bias={str(i): 1 for i in range(min(384, n // 9))})),
    "wrong logit bias": (CHAT, lambda n: _chat(logit_bias={str(i): "a" for i in range(n // 11)})),
    "a long number": (CHAT, lambda n: _raw('"seed":' + "1" * n)),
    "a long fraction": (CHAT, lambda n: _raw('"temperature":0.' + "1" * n)),
    "a large exponent": (CHAT, lambda n: _raw('"temperature":1e-' + "9" * n)),
    "spaces": (CHAT, lambda n: _raw(" " * n + '"n":1')),
    "deep lists": (CHAT, lambda n: _raw('"x":' + _nested("[", "]", n))),
    "deep objects": (CHAT, lambda n: _raw('"x":' + _nested('{"a":', "}", n))),
    "an unfinished body": (CHAT, lambda n: b'{"messages":[' + b'"a",' * (n // 4)),
    "no JSON": (CHAT, lambda n: b"\xff" * n),
    "a list": (CHAT, lambda n: b"[" + b"1," * (n // 2) + b"1]"),
    "a schema of properties": (CHAT, lambda n: _form({"properties": {f"k{i}": True for i in range(n // 11)}})),
    "a schema of words": (CHAT, lambda n: _form({"enum": [f"w{i}" for i in range(n // 9)]})),
    "a schema of anyOf": (CHAT, lambda n: _form({"anyOf": [{"const": i} for i in range(n // 13)]})),
    "a schema of references": (
        CHAT,
        lambda n: _form({"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n // 33)}}),
    ),
    "a long pattern": (CHAT, lambda n: _form({"type": "string", "pattern": "(a|b)?" * (n // 6)})),
    "a regex": (CHAT, lambda n: _chat(guided_regex="(ab|c)*" * (n // 7))),
    "choices": (CHAT, lambda n: _chat(guided_choice=[f"c{i}" for i in range(n // 8)])),
    "a grammar": (
        CHAT,
        lambda n: _chat(guided_grammar="start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(n // 12))),
    ),
    "GBNF": (CHAT, lambda n: _chat(guided_grammar="root ::= " + '"a" ' * (n // 6))),
    "tools": (CHAT, lambda n: _chat(tools=[_tool(i) for i in range(n // 80)])),
    "a large tool": (CHAT, lambda n: _chat(tools=[_tool(0, {"properties": {f"k{i}": {} for i in range(n // 10)}})])),
    "ids": (COMPLETIONS, lambda n: _completion(prompt=[7] * (n // 2))),
    "wrong ids": (COMPLETIONS, lambda n: _completion(prompt=[7] * (n // 2) + ["a"])),
    "ids beyond the vocabulary": (COMPLETIONS, lambda n: _completion(prompt=[10**9] * (n // 11))),
    "texts": (COMPLETIONS, lambda n: _completion(prompt=["a"] * (n // 4))),
    "lists of ids": (COMPLETIONS, lambda n: _completion(prompt=[[7]] * (n // 4))),
    "an echoed text": (COMPLETIONS, lambda n: _completion(prompt="mill " * (n // 5), echo=True)),
    "a text to embed": (EMBEDDINGS, lambda n: _embedding("mill " * (n // 5))),
    "texts to embed": (EMBEDDINGS, lambda n: _embedding(["mill " * (n // 10000)] * min(2000, n // 5))),
    "more texts than may be": (EMBEDDINGS, lambda n: _embedding(["a"] * (n // 4))),
    "ids to embed": (EMBEDDINGS, lambda n: _embedding([7] * (n // 2))),
    "ids to embed, cut": (EMBEDDINGS, lambda n: _embedding([7] * (n // 2), truncate_prompt_tokens=8)),
    "lists of ids to embed": (EMBEDDINGS, lambda n: _embedding([[7] * max(1, n // 4000)] * min(2000, n // 4))),
    "wrong ids to embed": (EMBEDDINGS, lambda n: _embedding([7] * (n // 2) + ["a"], truncate_prompt_tokens=-1)),
    "vectors as base64": (
        EMBEDDINGS,
        lambda n: _embedding([[7] * (n // 1024)] * min(512, n), encoding_format="base64"),
    ),
    "a text to count": (TOKENIZE, lambda n: json.dumps({"prompt": "mill " * (n // 5)}).encode()),
    "messages to count": (
        TOKENIZE,
        lambda n: json.dumps({"messages": [{"role": "user", "content": "a"}] * (n // 33)}).encode(),
    ),
    "ids to read": (DETOKENIZE, lambda n: json.dumps({"tokens": [7] * (n // 3)}).encode()),
    "turns of one role": (MESSAGES, lambda n: _messages(messages=[{"role": "user", "content": "a"}] * (n // 29))),
    "turns in turn": (
        MESSAGES,
        lambda n: _messages(
            messages=[{"role": role, "content": "a"} for _ in range(n // 63) for role in ("user", "assistant")]
        ),
    ),
    "blocks of text": (MESSAGES, lambda n: _blocks("user", _TEXT_BLOCK, n)),
    "thoughts": (MESSAGES, lambda n: _blocks("assistant", _THOUGHT, n)),
    "tool uses": (MESSAGES, lambda n: _blocks("assistant", _USE, n)),
    "a large input": (
        MESSAGES,
        lambda n: _blocks("assistant", {**_USE, "input": {f"k{i}": i for i in range(n // 14)}}, 2 * n),
    ),
    "a deep input": (
        MESSAGES,
        lambda n: (
            b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f",'
            b'"input":{"a":' + _nested("[", "]", n).encode() + b"}}]}]}"
        ),
    ),
    "results": (MESSAGES, lambda n: _blocks("user", _RESULT, n)),
    "images": (MESSAGES, lambda n: _blocks("user", {"type": "image", "source": {"type": "base64", "data": ""}}, n)),
    "wrong blocks": (MESSAGES, lambda n: _messages(messages=[{"role": "user", "content": [1] * (n // 2)}])),
    "a long type of block": (MESSAGES, lambda n: _blocks("user", {"type": "x" * n}, n)),
    "a long role": (MESSAGES, lambda n: _messages(messages=[{"role": "x" * n, "content": "a"}])),
    "a system of blocks": (MESSAGES, lambda n: _messages(system=[_TEXT_BLOCK] * (n // 66))),
    "a long system": (MESSAGES, lambda n: _messages(system="mill " * (n // 5))),
    "billing": (MESSAGES, lambda n: _messages(system="x-anthropic-billing-header:\n" * (n // 28))),
    "client tools": (MESSAGES, lambda n: _messages(tools=[{**_CLIENT_TOOL, "name": f"f{i}"} for i in range(n // 52)])),
    "a large client tool": (
        MESSAGES,
        lambda n: _messages(
            tools=[{**_CLIENT_TOOL, "input_schema": {"properties": {f"k{i}": {} for i in range(n // 10)}}}]
        ),
    ),
    "stop sequences": (MESSAGES, lambda n: _messages(stop_sequences=["a"] * (n // 4))),
    "edits": (MESSAGES, lambda n: _messages(context_management={"edits": [{"type": "clear"}] * (n // 17)})),
    "an output format": (
        MESSAGES,
        lambda n: _messages(
            output_config={
                "format": {"type": "json_schema", "schema": {"properties": {f"k{i}": True for i in range(n // 11)}}}
            }
        ),
    ),
    "a long user id": (MESSAGES, lambda n: _messages(metadata={"user_id": "x" * n})),
    "turns to count": (COUNT_TOKENS, lambda n: _messages(messages=[{"role": "user", "content": "a"}] * (n // 29))),
    "a text to count in a turn": (
        COUNT_TOKENS,
        lambda n: _messages(messages=[{"role": "user", "content": "mill " * (n // 5)}]),
    ),
    "blocks to count": (COUNT_TOKENS, lambda n: _blocks("assistant", _USE, n)),
}
