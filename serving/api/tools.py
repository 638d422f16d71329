"""The tools of a chat request: what of them the prompt shows, how the answer is held to them, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from serving.api.conversation import NamedTool, Tool
from serving.api.plan import ToolPlan
from serving.api.schema import ChatCompletionBody
from serving.errors import InvalidRequest
from serving.grammar.tool_calls import CallGrammar
from serving.text.tokenizer import Tokenizer
from serving.text.tools.prompting import ToolPrompt

MAX_TOOL_BYTES = 256 << 10  # of all tools of a request together, as JSON
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTools:
    """The tools a request may call. `forced`: the answer is calls; `held`: it is text or calls, by grammar.

    `strict`: some of them promise that.
    """

    plan: ToolPlan
    grammar: CallGrammar
    forced: bool
    held: bool
    strict: bool


class ToolReader:
    """Reads them for one model. Raises InvalidRequest that names the field."""

    def __init__(self, tokenizer: Tokenizer, prompt: ToolPrompt) -> None:
        self._prompt = prompt
        self._special = tokenizer.special_marks(() if prompt.form is None else prompt.form.marks)

    def of(self, fields: ChatCompletionBody) -> AskedTools | None:
        """None where nothing may be called: the answer is text."""
        tools, choice = fields.tools or [], fields.tool_choice
        if not tools and (choice == "required" or isinstance(choice, NamedTool)):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if not tools or choice == "none":
            return None
        if self._prompt.form is None:
            raise tools_refused()
        callable_tools = [_named(tools, choice.function.name)] if isinstance(choice, NamedTool) else tools
        forced = choice == "required" or isinstance(choice, NamedTool)
        strict = any(tool.function.strict for tool in tools)
        many = fields.parallel_tool_calls is not False and not isinstance(choice, NamedTool) and self._prompt.many
        return AskedTools(
            plan=ToolPlan(
                form=self._prompt.form,
                names=frozenset(tool.function.name for tool in tools),
                many=many,
                shown=frozenset(self._special.values()),
            ),
            grammar=CallGrammar(
                form=self._prompt.form,
                schemas={tool.function.name: _schema(tool, forced=forced) for tool in callable_tools},
                special=self._special,
                many=many,
            ),
            forced=forced,
            held=not forced and (strict or self._prompt.form.name == "generic"),
            strict=strict,
        )


def _named(tools: Sequence[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise InvalidRequest(
        f"tool_choice names {name[:64]!r}, which is none of the tools", param="tool_choice.function.name"
    )


def _schema(tool: Tool, *, forced: bool) -> dict[str, Any] | None:
    """What a grammar holds the arguments to: the schema where the call is forced or it is strict, else any object."""
    given = NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters
    return given if forced or tool.function.strict else None


def tools_refused() -> InvalidRequest:
    """The error for tools where answers are not read for calls."""
    told = "tools are not supported: the server runs with --tool-call-parser none"
    return InvalidRequest(told, param="tools", code="no_tools")


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates take them. Raises InvalidRequest for too many bytes, or two of one name."""
    shown: list[dict[str, Any]] = []
    seen: set[str] = set()
    size = 0
    for i, tool in enumerate(tools):
        of = tool.function
        function: dict[str, Any] = {"name": of.name}
        if of.description is not None:
            function["description"] = of.description
        function["parameters"] = NO_ARGUMENTS if of.parameters is None else of.parameters
        if of.name in seen:
            raise InvalidRequest(f"two tools are named {of.name}", param=f"tools[{i}].function.name")
        seen.add(of.name)
        size += _size(function, f"tools[{i}].function.parameters")
        if size > MAX_TOOL_BYTES:
            raise InvalidRequest(f"tools have at most {MAX_TOOL_BYTES} bytes together", param="tools")
        shown.append({"type": "function", "function": function})
    return shown


def _size(function: Mapping[str, Any], param: str) -> int:
    try:
        return len(orjson.dumps(function))
    except TypeError as error:
        raise InvalidRequest(f"{param}: is nested too deep", param=param) from error


def call_id(response: str, choice: int, index: int) -> str:
    """The id of a call: the same whenever the same response is made again."""
    return "call_" + blake2b(f"{response}/{choice}/{index}".encode(), digest_size=12).hexdigest()
