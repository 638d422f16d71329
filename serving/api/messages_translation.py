"""A body of Anthropic's Messages API as the chat request that it is served as.

Pure. Turns of one role are joined, results become messages of their own, and what a client calls a field is kept for
errors. What the chat request may say is decided where chat bodies are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from serving.api.messages_body import (
    AnyChoice,
    AssistantTurn,
    ClientTool,
    MessagesBody,
    MessagesConversation,
    NoChoice,
    OneChoice,
    RedactedThinkingBlock,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from serving.api.translation import Translation
from serving.errors import InvalidRequest

BILLING = "x-anthropic-billing-header:"  # a block that Claude Code sends to Anthropic's servers, not to the model
THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables by which chat templates are told whether to think
FAILED = "Error: "  # what a template has no field for

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function.name": "tool_choice.name",
}


def chat_of(fields: MessagesConversation, variables: Collection[str] = ()) -> Translation:
    """`variables` are those that the chat template looks at. Raises InvalidRequest for what no chat request can say."""
    conversation = _Conversation()
    if fields.system:
        conversation.system(fields.system)
    for i, turn in enumerate(fields.messages):
        conversation.turn(turn, f"messages[{i}]")
    chat: dict[str, Any] = {"model": fields.model, "messages": conversation.chat()}
    places = conversation.places | _NAMES
    if conversation.continues():
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
        places["continue_final_message"] = f"messages[{len(fields.messages) - 1}]"
    if fields.tools:
        chat["tools"] = [_tool(tool) for tool in fields.tools]
        places |= _tool_places(len(fields.tools))
    chat |= _tool_choice(fields)
    chat |= _output_format(fields, places)
    chat["chat_template_kwargs"] = _template_variables(fields, variables)
    chat |= _sampling(fields) if isinstance(fields, MessagesBody) else {}
    return Translation(chat={name: value for name, value in chat.items() if value is not None}, places=places)


def _template_variables(fields: MessagesConversation, known: Collection[str]) -> Mapping[str, Any] | None:
    """What the client sets itself goes before what `thinking` says."""
    wanted = _thinks(fields)
    switches = {} if wanted is None else {name: wanted for name in THINKING_SWITCHES if name in known}
    return switches | (fields.chat_template_kwargs or {}) or None


def _thinks(fields: MessagesConversation) -> bool | None:
    """Whether the model is to think; None where that is left to it."""
    return None if fields.thinking is None else fields.thinking.type != "disabled"


def thinking_is_left(fields: MessagesConversation, variables: Collection[str], *, thinks: bool) -> bool:
    """True if the model cannot be told what `thinking` asks for, and does otherwise. `thinks`: it can."""
    wanted = _thinks(fields)
    return wanted is not None and wanted != thinks and not (thinks and any(n in variables for n in THINKING_SWITCHES))


def _sampling(fields: MessagesBody) -> Mapping[str, Any]:
    session = None if fields.metadata is None else fields.metadata.user_id
    return {
        "user": session,
        **fields.shared(),
        "stop": fields.stop_sequences,
        "max_completion_tokens": max(1, fields.max_tokens),
    }


def _tool(tool: ClientTool) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_places(count: int) -> Mapping[str, str]:
    return {
        f"tools[{i}].function{of}": f"tools[{i}]{shown}"
        for i in range(count)
        for of, shown in (("", ""), (".parameters", ".input_schema"))
    }


def _tool_choice(fields: MessagesConversation) -> Mapping[str, Any]:
    choice = fields.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, NoChoice):
        return {"tool_choice": "none"}
    several = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if isinstance(choice, OneChoice):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **several}
    return {"tool_choice": "required" if isinstance(choice, AnyChoice) else "auto", **several}


def _output_format(fields: MessagesConversation, places: dict[str, str]) -> Mapping[str, Any]:
    newer = None if fields.output_config is None else fields.output_config.format
    if newer is not None and fields.output_format is not None:
        raise InvalidRequest("output_format and output_config.format exclude each other", param="output_format")
    asked = newer or fields.output_format
    if asked is None:
        return {}
    places["response_format"] = "output_format" if newer is None else "output_config.format"
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": asked.schema_}}}


class _Conversation:
    """Chat messages as they are made of turns, and where each of them comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def system(self, content: str | Sequence[TextBlock]) -> None:
        texts = [content] if isinstance(content, str) else [block.text for block in content]
        if shown := [text for text in map(_without_billing, texts) if text]:
            self._texts(self._message("system", "system"), shown)

    def turn(self, turn: UserTurn | AssistantTurn | SystemTurn, place: str) -> None:
        if isinstance(turn.content, str):
            self._texts(self._message(turn.role, place), [turn.content])
            return
        if not turn.content:
            self._message(turn.role, place)
        for i, block in enumerate(turn.content):
            if isinstance(block, ToolResultBlock):
                self._result(block, f"{place}.content[{i}]")
            else:
                self._block(self._message(turn.role, place), block, f"{place}.content[{i}]")

    def chat(self) -> list[dict[str, Any]]:
        """The messages as a chat body has them."""
        return [
            {**message, "reasoning_content": "\n".join(message["reasoning_content"])}
            if "reasoning_content" in message
            else message
            for message in self.messages
        ]

    def continues(self) -> bool:
        """True if the answer goes on with what the last turn says. Raises InvalidRequest where it cannot."""
        last = self.messages[-1]
        if last["role"] != "assistant":
            return False
        if "tool_calls" in last:
            raise InvalidRequest("messages: the last turn has tool_use blocks without results", param="messages")
        return True

    def _block(self, message: dict[str, Any], block: _Spoken, place: str) -> None:
        if isinstance(block, TextBlock):
            self._texts(message, [block.text])
        elif isinstance(block, ThinkingBlock):
            message.setdefault("reasoning_content", []).append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls = message.setdefault("tool_calls", [])
            path = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}].function"
            self.places |= {path: place, f"{path}.arguments": f"{place}.input"}
            calls.append({"id": block.id, "function": {"name": block.name, "arguments": block.input}})

    def _result(self, block: ToolResultBlock, place: str) -> None:
        content = block.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message = self._new("tool", place)
        message["tool_call_id"] = block.tool_use_id
        self._texts(message, [FAILED + text if block.is_error else text])

    def _message(self, role: str, place: str) -> dict[str, Any]:
        """The last message if it is of this role, else a new one: turns of one role are one."""
        if self.messages and self.messages[-1]["role"] == role:
            return self.messages[-1]
        return self._new(role, place)

    def _new(self, role: str, place: str) -> dict[str, Any]:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append({"role": role, "content": []})
        return self.messages[-1]

    def _texts(self, message: dict[str, Any], texts: Sequence[str]) -> None:
        message["content"] += [{"type": "text", "text": text} for text in texts]


_Spoken = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text
