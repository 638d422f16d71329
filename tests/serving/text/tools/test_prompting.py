"""Tools in prompts: a template is recognised by rendering it, and one that knows of no tools is told of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.text.chat import ChatTemplate
from serving.text.tools.forms import (
    GENERIC,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAMED,
    PHI4_MINI_JSON,
    PHI_FUNCTOOLS,
    ToolForm,
)
from serving.text.tools.prompting import ToolPrompt, tool_prompt

PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}MARK{{ c.function | tojson }}{% endfor %}"
REFUSE = "{% if WRONG %}{{ raise_exception('no') }}{% endif %}"
TWO_CALLS = REFUSE.replace("WRONG", "m.tool_calls | default([]) | length > 1")
LONG_ID = REFUSE.replace("WRONG", "m.tool_call_id is defined and m.tool_call_id | length != 9")
IN_MESSAGE = PLAIN.replace("{% endfor %}", "{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}{% endfor %}")


def showing(mark: str, check: str = "") -> str:
    """A template that shows the variable `tools`, and calls after a mark."""
    messages = PLAIN.replace("{% endfor %}", check + CALLS.replace("MARK", mark) + "{% endfor %}")
    return "{% if tools %}{{ tools | tojson }}{% endif %}" + messages


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "é", "parameters": {"type": "object"}}}]


def prompt_of(parser: str, source: str) -> ToolPrompt:
    return tool_prompt(parser, ChatTemplate(source, {}), source)


@pytest.mark.parametrize(
    ("parser", "source", "form", "native"),
    [
        ("auto", PLAIN, GENERIC, False),
        ("auto", PLAIN + "{# <tool_call> #}", GENERIC, False),  # it has the marks, and shows no tools
        ("auto", showing("<tool_call>"), HERMES, True),
        ("auto", showing("<tool_call><function="), GENERIC, False),  # what it says of calls is another form
        ("auto", showing("<|python_tag|>"), LLAMA3_JSON, True),
        ("auto", showing("[TOOL_CALLS]"), MISTRAL, True),
        ("auto", showing("[TOOL_CALLS]name[ARGS]"), MISTRAL_NAMED, True),
        ("auto", showing("[TOOL_CALLS]", LONG_ID), MISTRAL, True),
        ("auto", IN_MESSAGE, PHI4_MINI_JSON, True),
        ("auto", showing("functools"), PHI_FUNCTOOLS, True),
        ("hermes", PLAIN, HERMES, False),
        ("llama3_json", showing(""), LLAMA3_JSON, True),
        ("generic", showing("<tool_call>"), GENERIC, False),
        ("none", showing("<tool_call>"), None, True),
    ],
)
def test_the_form_is_the_templates(parser: str, source: str, form: ToolForm | None, native: bool) -> None:
    found = prompt_of(parser, source)
    assert (found.form, found.native) == (form, native)
    assert found.many


def test_a_template_that_shows_one_call_allows_one_call() -> None:
    assert not prompt_of("auto", showing("<tool_call>", TWO_CALLS)).many


def test_without_a_template_there_is_nothing_to_render() -> None:
    assert tool_prompt("auto", None, "") == ToolPrompt(form=GENERIC)


def conversation(call_id: str = "call_123456789") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    return [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "7"},
    ]


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("parser", ["auto", "mistral", "llama3_json", "phi4_mini_json"])
def test_a_template_without_tools_shows_everything_as_text(parser: str, system: bool) -> None:
    found, messages = prompt_of(parser, PLAIN), conversation()
    messages = [{"role": "system", "content": "Be brief."}, *messages] if system else messages
    before = json.dumps(messages)
    shown, tools = found.shown(messages, TOOLS)
    assert tools is None
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert [set(message) for message in shown] == [{"role", "content"}] * 4
    assert shown[0]["content"].startswith("Be brief.\n\n") == system
    assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in shown[0]["content"]
    assert found.form is not None
    assert found.form.write([("function-name", '{"argument-name": "value"}')]) in shown[0]["content"]
    assert shown[2]["content"] == "Let me see.\n" + found.form.write([("weather", '{"city": "Köln"}')])
    assert shown[3]["content"] == "<tool_response>\n7\n</tool_response>"
    assert json.dumps(messages) == before


def test_a_conversation_without_tools_is_not_told_of_any() -> None:
    shown, _ = prompt_of("auto", PLAIN).shown(conversation(), [])
    assert [message["role"] for message in shown] == ["user", "assistant", "user"]


def test_a_template_with_tools_gets_them_as_they_are() -> None:
    shown, tools = prompt_of("auto", showing("<tool_call>")).shown(conversation(), TOOLS)
    assert tools == TOOLS
    assert shown == [*conversation()[:2], {**conversation()[2], "name": "weather"}]


@pytest.mark.parametrize("system", [True, False])
def test_tools_may_belong_to_the_system_message(system: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *conversation()] if system else conversation()
    shown, tools = prompt_of("auto", IN_MESSAGE).shown(messages, TOOLS)
    assert tools is None
    assert (shown[0]["role"], shown[0]["content"]) == ("system", "Be brief." if system else "")
    assert json.loads(shown[0]["tools"]) == [TOOLS[0]["function"]]
    assert len(shown) == 4


@pytest.mark.parametrize(("call_id", "kept"), [("call_123456789", False), ("a1B2c3D4e", True)])
def test_mistral_gets_ids_of_nine_letters_and_digits(call_id: str, kept: bool) -> None:
    shown, _ = prompt_of("auto", showing("[TOOL_CALLS]", LONG_ID)).shown(conversation(call_id), TOOLS)
    short = shown[1]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert shown[2]["tool_call_id"] == short
    assert (short == call_id) == kept
