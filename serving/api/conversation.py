"""Messages and tools of a chat request, as strict pydantic models: what a conversation may consist of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from serving.api.strict import Items, Strict

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message
MAX_CALL_ID = 256  # characters
NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str | dict[str, Any] = Field(description="JSON, or as some clients have it an object")


class ToolCall(Strict):
    """A call that an assistant made."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, description="Its place, as streamed deltas have it; not used")


def _check_calls(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_CALLS:
        raise ValueError(f"a message has at most {MAX_CALLS} calls")
    return value


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = Field(
        default=None, validate_default=True, description="May be left out or null in an assistant's message"
    )
    name: str | None = Field(default=None, description="Handed to the chat template")
    tool_calls: Annotated[Items[ToolCall] | None, BeforeValidator(_check_calls)] = Field(
        default=None, description="What an assistant called"
    )
    tool_call_id: str | None = Field(
        default=None, validate_default=True, max_length=MAX_CALL_ID, description="Which call a tool's message answers"
    )
    reasoning_content: str | None = Field(default=None, description="What an assistant thought, for the chat template")
    # An assistant's message sent back as it was received has these, and null says nothing.
    refusal: None = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _has_content(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise ValueError("is required")
        return value

    @field_validator("tool_calls")
    @classmethod
    def _calls_of_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role", "assistant") != "assistant":
            raise ValueError("only an assistant's message has calls")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _id_of_result(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role")
        if role == "tool" and not value:
            raise ValueError("is required in a tool's message")
        if value is not None and role not in (None, "tool"):
            raise ValueError("belongs to a tool's message")
        return value


class FunctionTool(Strict):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema; none: it takes no arguments")
    strict: bool | None = Field(default=None, description="Arguments follow the schema in any case")


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


def check_tools(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise ValueError(f"at most {MAX_TOOLS} tools are supported")
    return value


Tools = Annotated[Items[Tool] | None, BeforeValidator(check_tools)]


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None
