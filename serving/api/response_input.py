"""What a body of the Responses API asks for, as the chat request that it is served as.

Pure. Consecutive items of an assistant's turn (thoughts, text, calls) become one message, as chats have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.api.response_schema import (
    LOGPROBS,
    AllowedTools,
    ChosenFunction,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    InputText,
    OutputText,
    ReasoningItem,
    RefusalPart,
    ResponsesBody,
    ResponseSchema,
    ResponseTool,
)
from serving.api.translation import Translation
from serving.errors import InvalidRequest

Parts = str | Sequence[InputText | OutputText | RefusalPart]


def translated(fields: ResponsesBody) -> Translation:
    """Raises InvalidRequest that names the field."""
    conversation = _Conversation()
    if fields.instructions is not None:
        conversation.add({"role": "system", "content": fields.instructions}, {".content": "instructions"})
    if isinstance(fields.input, str):
        conversation.add({"role": "user", "content": fields.input}, {".content": "input"})
    else:
        conversation.read(fields.input)
    if not conversation.messages:
        raise InvalidRequest("input has no message", param="input")
    tools, choice = _tools(fields)
    chat: dict[str, Any] = {
        **fields.shared(),
        "messages": conversation.messages,
        "tools": [_tool(tool) for tool in tools] or None,
        "tool_choice": choice,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "max_completion_tokens": fields.max_output_tokens,
        "response_format": _response_format(fields),
    }
    if fields.top_logprobs or LOGPROBS in (fields.include or ()):
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs}
    places = {
        **conversation.places,
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "tool_choice.function": "tool_choice",
    }
    given = fields.tools or []
    position = {id(tool): at for at, tool in enumerate(given)}
    places |= {f"tools[{i}].function": f"tools[{position[id(tool)]}]" for i, tool in enumerate(tools)}
    return Translation(chat=chat, places=places)


class _Conversation:
    """Items as messages, and where each of those came from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self._turn: dict[str, Any] | None = None  # the assistant's message that further items may join

    def add(self, message: dict[str, Any], places: dict[str, str]) -> None:
        """`places` are those of paths inside the message."""
        here = f"messages[{len(self.messages)}]"
        self.places.update({here + path: place for path, place in places.items()})
        self.messages.append(message)

    def read(self, items: Sequence[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem]) -> None:
        for position, item in enumerate(items):
            place = f"input[{position}]"
            match item:
                case ReasoningItem():
                    self._think(item, place)
                case FunctionCall():
                    self._call(item, place)
                case FunctionCallOutput():
                    self._turn = None
                    content = _content(item.output)
                    message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
                    self.add(message, {"": place, ".content": f"{place}.output", ".tool_call_id": f"{place}.call_id"})
                case InputMessage(role="assistant"):
                    turn = self._begin(place, joins=("reasoning_content",))
                    turn["content"] = _content(item.content)
                    self.places[f"messages[{len(self.messages) - 1}].content"] = f"{place}.content"
                case InputMessage():
                    self._turn = None
                    self.add({"role": item.role, "content": _content(item.content)}, {"": place})

    def _begin(self, place: str, joins: Sequence[str]) -> dict[str, Any]:
        """The assistant's message that goes on here: one that has nothing yet but what `joins` names, or a new one."""
        if self._turn is None or not self._turn.keys() <= {"role", *joins}:
            self._turn = {"role": "assistant"}
            self.add(self._turn, {"": place})
        return self._turn

    def _think(self, item: ReasoningItem, place: str) -> None:
        thoughts = "\n".join(part.text for part in item.content or item.summary or ())
        if thoughts:
            self._begin(place, joins=())["reasoning_content"] = thoughts

    def _call(self, item: FunctionCall, place: str) -> None:
        turn = self._begin(place, joins=("reasoning_content", "content", "tool_calls"))
        calls = turn.setdefault("tool_calls", [])
        here = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.places |= {f"{here}.id": f"{place}.call_id", f"{here}.function": place}
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})


def _content(content: Parts) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.refusal if isinstance(part, RefusalPart) else part.text} for part in content]


def _tools(fields: ResponsesBody) -> tuple[list[ResponseTool], Any]:
    """The tools that the request may call, and its choice as chats have it."""
    tools, choice = fields.tools or [], fields.tool_choice
    if isinstance(choice, ChosenFunction):
        return tools, {"type": "function", "function": {"name": choice.name}}
    if not isinstance(choice, AllowedTools):
        return tools, choice
    known = {tool.name for tool in tools}
    for i, tool in enumerate(choice.tools):
        if tool.name not in known:
            param = f"tool_choice.tools[{i}].name"
            raise InvalidRequest(f"{param}: {tool.name[:64]!r} is none of the tools", param=param)
    allowed = {tool.name for tool in choice.tools}
    return [tool for tool in tools if tool.name in allowed], choice.mode


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _response_format(fields: ResponsesBody) -> dict[str, Any] | None:
    asked = None if fields.text is None else fields.text.format
    if not isinstance(asked, ResponseSchema):
        return None if asked is None else {"type": asked.type}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}
