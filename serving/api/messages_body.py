"""The bodies of Anthropic's Messages API, as strict pydantic models: turns of content blocks, tools, and options.

What they mean as a chat is decided in serving.api.messages_translation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from serving.api.conversation import MAX_CALL_ID, NAME, check_tools
from serving.api.schema import GenerationBody, check_stop
from serving.api.strict import Contract, Items, Strict

MOST_SHOWN = 64  # characters of a client's word in an error


class TextBlock(Strict):
    hints = frozenset({"citations"})

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """What an assistant thought, for the chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Not checked")


class RedactedThinkingBlock(Strict):
    type: Literal["redacted_thinking"]
    data: str = Field(description="Not shown to the model")


class ToolUseBlock(Strict):
    hints = frozenset({"caller", "toolset_name"})

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


def only(whose: str, *known: str) -> Callable[[object], object]:
    """A check that says which blocks, or tools, there are not."""

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known:
            raise ValueError(f"{kind[:MOST_SHOWN]!r} is not supported here: {whose} {' or '.join(known)}")
        return value

    return check


ResultBlock = Annotated[TextBlock, BeforeValidator(only("the content of a result is", "text"))]


class ToolResultBlock(Strict):
    hints = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    content: str | Items[ResultBlock] | None = None
    is_error: bool | None = Field(default=None, description="Said before the content")


SystemBlock = Annotated[TextBlock, BeforeValidator(only("a system prompt is made of", "text"))]
UserBlock = Annotated[
    TextBlock | ToolResultBlock,
    Field(discriminator="type"),
    BeforeValidator(only("a user's block is", "text", "tool_result")),
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    Field(discriminator="type"),
    BeforeValidator(only("an assistant's block is", "text", "thinking", "redacted_thinking", "tool_use")),
]


class UserTurn(Strict):
    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantTurn(Strict):
    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class SystemTurn(Strict):
    role: Literal["system"]
    content: str | Items[SystemBlock]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(Strict):
    """A tool that the client runs."""

    hints = frozenset({"allowed_callers", "defer_loading", "input_examples"})

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema")
    strict: bool | None = Field(default=None, description="The input follows the schema in any case")
    eager_input_streaming: bool | None = Field(
        default=None, description="Stream the input as it is written, although it may turn out to be no JSON"
    )


ListedTool = Annotated[ClientTool, BeforeValidator(only("the server runs no tools; those of a client are", "custom"))]


class AutoChoice(Strict):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Strict):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class OneChoice(Strict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Strict):
    type: Literal["none"]
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(Strict):
    """Honoured where the chat template can be told; else a hint."""

    hints = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Contract):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    hints = frozenset({"effort"})

    format: OutputFormat | None = Field(default=None, description="What the answer has to follow")


class MessagesMetadata(Strict):
    user_id: str | None = Field(default=None, description="The request's session, where nothing else names one")


class MessagesConversation(Strict):
    """What is counted, and answered."""

    hints = frozenset(
        {"context_management", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
    )
    contracts: ClassVar[dict[str, tuple[object, ...]]] = {"container": (), "mcp_servers": ()}

    model: str | None = Field(default=None, description="The served model's name; it when not given")
    messages: Items[Turn] = Field(min_length=1)
    system: str | Items[SystemBlock] | None = None
    tools: Annotated[Items[ListedTool] | None, BeforeValidator(check_tools)] = None
    tool_choice: Annotated[AutoChoice | AnyChoice | OneChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="The older name of output_config.format")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template")


class CountTokensBody(MessagesConversation):
    """POST /v1/messages/count_tokens"""


class MessagesBody(MessagesConversation, GenerationBody):
    """POST /v1/messages"""

    hints = MessagesConversation.hints | {"stream_options"}
    contracts: ClassVar[dict[str, tuple[object, ...]]] = {**MessagesConversation.contracts, "n": (1,)}

    max_tokens: int = Field(ge=0, description="Output tokens at most; where the context has room for less, so many")
    stop_sequences: Annotated[Items[str] | None, BeforeValidator(check_stop)] = None
    metadata: MessagesMetadata | None = None
