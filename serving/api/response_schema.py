"""The body of POST /v1/responses, as strict pydantic models: what of OpenAI's Responses API is honoured.

What an input means is decided in serving.api.response_input. The server keeps no state, and says so where one is asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from serving.api.conversation import MAX_CALL_ID, NAME, check_tools
from serving.api.schema import GenerationBody, JsonObjectFormat, OutputLength, TextFormat
from serving.api.strict import Contract, Items, Strict

MAX_METADATA = 16  # pairs
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters
MOST_SHOWN = 40  # characters of a wrong type
MAX_LOGPROBS = 20

Status = Literal["in_progress", "completed", "incomplete"]


def _typed(value: Any, what: str, types: Iterable[str], usual: str | None = None, why: str = "") -> Any:
    """`value` with its type, which names one of several models. Raises ValueError for one that is not served."""
    if not isinstance(value, dict):
        return value
    given = usual if value.get("type") is None else value["type"]
    if given is None:
        raise ValueError("has no type")
    if not isinstance(given, str) or given not in types:
        shown = f"{given[:MOST_SHOWN]!r}" if isinstance(given, str) else "this"
        raise ValueError(f"{what} of type {shown} are not supported, only {', '.join(types)}{why}")
    return {**value, "type": given}


class InputText(Strict):
    hints = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """As an answer had it."""

    hints = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["output_text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


_part = partial(_typed, what="parts", types=("input_text", "output_text", "refusal"))
Part = Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type"), BeforeValidator(_part)]
_result_part = partial(_typed, what="parts of results", types=("input_text",))
ResultPart = Annotated[InputText, BeforeValidator(_result_part)]


class InputMessage(Strict):
    hints = frozenset({"phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]
    id: str | None = Field(default=None, description="As it was received; not used, as of the other items")
    status: Status | None = None


class FunctionCall(Strict):
    """A call that an answer made."""

    hints = frozenset({"async", "async_", "caller", "namespace", "parsed_arguments"})

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict):
    hints = frozenset({"caller", "name", "namespace"})

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    output: str | Items[ResultPart]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """What an answer's model thought."""

    hints = frozenset({"encrypted_content"})

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: Items[ReasoningText] | None = Field(default=None, description="Counts where there is no content")
    id: str | None = None
    status: Status | None = None


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_item = partial(_typed, what="items", types=_ITEMS, usual="message", why=": the server keeps no state to refer to")
Item = Annotated[
    InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(_item),
]


class ResponseTool(Strict):
    hints = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema; none: it takes no arguments")
    strict: bool | None = Field(default=None, description="Arguments follow the schema in any case")


_tool = partial(_typed, what="tools", types=("function",), why=": the server runs none of its own")
ResponseTools = Annotated[Items[Annotated[ResponseTool, BeforeValidator(_tool)]], BeforeValidator(check_tools)]


class ChosenFunction(Strict):
    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """Only these tools are there for the request."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ChosenFunction], BeforeValidator(check_tools)] = Field(min_length=1)


_choice = partial(_typed, what="choices", types=("function", "allowed_tools"))
ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None, BeforeValidator(_choice)
]


class ResponseSchema(Contract):
    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(default=None, description="The output follows the schema in any case")


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | ResponseSchema, Field(discriminator="type")] | None = None


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(Strict):
    hints = frozenset({"context", "effort", "mode"})

    summary: Summary | None = Field(default=None, description="Thoughts come as the summary, in whole")
    generate_summary: Summary | None = Field(default=None, description="The older name")


class EventOptions(Strict):
    """Of the stream; all there is in OpenAI's API are hints."""


def _refuse(value: object, why: str) -> None:
    if value not in (None, False, ""):
        raise ValueError(f"the server keeps no state: {why}")


AGAIN = "send the items of the conversation again, as input"
Earlier = Annotated[None, BeforeValidator(partial(_refuse, why=AGAIN))]
Later = Annotated[None, BeforeValidator(partial(_refuse, why="an answer is streamed, or waited for"))]
Stored = Annotated[None, BeforeValidator(partial(_refuse, why="send the prompt's text, as instructions or input"))]


def _check_metadata(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > MAX_METADATA:
            raise ValueError(f"has at most {MAX_METADATA} pairs")
        if any(len(key) > MAX_METADATA_KEY for key in value):
            raise ValueError(f"keys have at most {MAX_METADATA_KEY} characters")
    return value


Metadata = Annotated[dict[str, Annotated[str, Field(max_length=MAX_METADATA_VALUE)]], BeforeValidator(_check_metadata)]

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesBody(GenerationBody):
    """POST /v1/responses"""

    hints = frozenset({"access_programs", "background_options", "client_metadata", "image", "max_tool_calls"})
    contracts = {"context_management": (), "n": (1,)}  # noqa: RUF012 # as the base declares it

    input: str | Items[Item]
    instructions: str | None = Field(default=None, description="A system message before the input")
    max_output_tokens: OutputLength = Field(default=None, description="Output tokens at most, -1 for no bound")
    tools: ResponseTools | None = Field(default=None, description="Functions that the model may call")
    tool_choice: ResponseToolChoice = Field(default=None, description="auto when not given")
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most")
    text: TextOptions | None = Field(default=None, description="The form of the output")
    reasoning: ReasoningOptions | None = None
    include: Items[Includable] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    metadata: Metadata | None = Field(default=None, description="Comes back with the answer")
    store: bool | None = Field(default=None, description="Nothing is stored")
    truncation: Literal["auto", "disabled"] | None = Field(default=None, description="Nothing is truncated")
    stream_options: EventOptions | None = None
    previous_response_id: Earlier = None
    conversation: Earlier = None
    background: Later = None
    prompt: Stored = None
