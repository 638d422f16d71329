"""Tools in prompts: in the way a chat template shows them, or in a system message where it knows of none.

Messages are those a template is given: "role", "content" (a string), and of an assistant "tool_calls" whose
arguments are objects. Nothing given is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from serving.errors import InvalidRequest
from serving.text.chat import ChatTemplate
from serving.text.tools.forms import GENERIC, ToolForm, form_named

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # each {"type": "function", "function": {"name", "description", "parameters"}}

_PROBE = "probe_6f1c"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_ASKED = {"role": "user", "content": "?"}
_INTRODUCTION = """You can call functions. Each line here describes one, as JSON:
<tools>
{tools}
</tools>
To call functions, answer with nothing but this, the name and the arguments filled in:
{example}
The results come in <tool_response>. Answer in plain words where no function is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPrompt:
    """How one model's prompts show tools, and in what form its answers have calls; no `form`: tools are refused."""

    form: ToolForm | None
    in_variable: bool = False  # the template shows `tools`
    in_message: bool = False  # it shows the "tools" of a system message
    many: bool = True  # several calls in one message are no error

    @property
    def native(self) -> bool:
        return self.in_variable or self.in_message

    def shown(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], Tools | None]:
        """The messages and the `tools` to give to the template."""
        if not self.native:
            return self._described(messages, tools), None
        named = _with_names(messages)
        if self.form is not None and self.form.short_ids:
            named = [_with_short_ids(message) for message in named]
        if not tools:
            return named, None
        return (named, tools) if self.in_variable else (_with_tools(named, tools), None)

    def _described(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        """Everything about tools as plain text, in messages of the roles that every template knows."""
        plain = [self._plain(message) for message in messages]
        if not tools or self.form is None:
            return plain
        example = self.form.write([("function-name", '{"argument-name": "value"}')])
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _INTRODUCTION.format(tools=listed, example=example)
        return _with_system(plain, text)

    def _plain(self, message: Message) -> Message:
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        calls = message.get("tool_calls")
        if not calls:
            return message
        functions = [call["function"] for call in calls]
        written = (self.form or GENERIC).write(
            [(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions]
        )
        content = f"{message['content']}\n{written}" if message["content"] else written
        return {"role": message["role"], "content": content}


def tool_prompt(parser: str, template: ChatTemplate | None, source: str) -> ToolPrompt:
    """How a template shows tools, found by rendering one, and the form for a value of --tool-call-parser."""
    form = form_named(parser, source)
    if template is None or form is GENERIC:
        return ToolPrompt(form=form)
    system = {"role": "system", "content": "!", "tools": json.dumps([_PROBE_TOOL["function"]])}
    prompt = ToolPrompt(
        form=form,
        in_variable=_shows(template, [_ASKED], [_PROBE_TOOL]),
        in_message=_shows(template, [system, _ASKED], None),
    )
    if not prompt.native and parser == "auto":
        return ToolPrompt(form=GENERIC)
    return replace(prompt, many=not prompt.native or _takes_two_calls(template, prompt))


def _shows(template: ChatTemplate, messages: Sequence[Message], tools: Tools | None) -> bool:
    try:
        return _PROBE in template.render(messages, tools=tools)
    except InvalidRequest:
        return False


def _takes_two_calls(template: ChatTemplate, prompt: ToolPrompt) -> bool:
    calls = [{"id": f"call{i:05}", "type": "function", "function": {"name": _PROBE, "arguments": {}}} for i in range(2)]
    results = [{"role": "tool", "content": "1", "name": _PROBE, "tool_call_id": call["id"]} for call in calls]
    asked: list[Message] = [_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    messages, tools = prompt.shown(asked, [_PROBE_TOOL])
    try:
        template.render(messages, tools=tools)
    except InvalidRequest:
        return False
    return True


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_tools(messages: list[Message], tools: Tools) -> list[Message]:
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Results carry the name of what was called: some templates show it, and clients do not send it."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        named.append(message)
    return named


def _with_short_ids(message: Message) -> Message:
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short(message["tool_call_id"])}
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]}
    return message


def _short(call_id: str) -> str:
    """Nine letters and digits, a function of the id."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]
