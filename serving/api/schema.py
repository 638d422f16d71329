"""The request bodies of every endpoint, as strict pydantic models: types, ranges, and no field that is not known.

What needs the model or the tokenizer to be judged is checked in `serving.api.prepare`. A field stands here only if
it is honoured, or if ignoring it breaks no promise; those are marked.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from serving.api.conversation import Items, Message, ToolChoice, Tools

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024  # characters
DAY_MS = 86_400_000.0
MOST_PRIORITY = 49  # either way: the built-in classes are 100 apart, so a request stays among those of its class


def _check_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list):
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are supported")
        if any(isinstance(stop, str) and not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise ValueError(f"a stop string has between 1 and {MAX_STOP_LENGTH} characters")
    return value


Stop = Annotated[str | list[str] | None, BeforeValidator(_check_stop)]

_TEXT_OR_IDS: dict[str, Any] = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    ]
}
Prompt = Annotated[Any, WithJsonSchema(_TEXT_OR_IDS)]  # judged by `prepare`, which can say what is wrong where


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="Usage so far in every chunk")


class TextFormat(_Strict):
    type: Literal["text"]


class JsonObjectFormat(_Strict):
    type: Literal["json_object"]


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(default=None, description="The output follows the schema in any case")


class JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(_Strict):
    """What the output has to follow, in one of these forms; as vLLM names them."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json", description="A JSON schema")
    json_object: bool | None = Field(default=None, description="Any JSON object")
    regex: str | None = Field(default=None, description="A regular expression, of the whole output")
    choice: list[str] | None = Field(default=None, description="One of these texts")
    grammar: str | None = Field(default=None, description="A grammar in Lark's form, or in GBNF")


class SamplingBody(_Strict):
    """What chat and completions have in common."""

    model: str | None = Field(default=None, description="The served model's name; it when not given")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; 1 when not given")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="0 and -1 keep all")
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, description="No stop token or stop string before so many tokens")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = Field(default=None, description="structured_outputs.json")
    guided_regex: str | None = Field(default=None, description="structured_outputs.regex")
    guided_choice: list[str] | None = Field(default=None, description="structured_outputs.choice")
    guided_grammar: str | None = Field(default=None, description="structured_outputs.grammar")
    return_token_ids: bool | None = None
    ttft_slo_ms: float | None = Field(
        default=None, gt=0, le=DAY_MS, description="Objective for the time to the first token, ms; else its class's"
    )
    tpot_slo_ms: float | None = Field(
        default=None, gt=0, le=DAY_MS, description="Objective for the mean time per further token, ms; else its class's"
    )
    service_class: str | None = Field(default=None, description="One of the configured classes; else the default one")
    priority: int | None = Field(
        default=None, ge=-MOST_PRIORITY, le=MOST_PRIORITY, description="Added to its class's: smaller goes first"
    )
    prompt_cache_key: str | None = Field(default=None, description="The request's session, as x-session-id")
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=512, description="Only requests with the same salt share cached prefixes"
    )
    user: str | None = Field(default=None, description="The request's session where nothing else names one")
    metadata: dict[str, str] | None = Field(default=None, description="Accepted and not used: it is for `store`")
    store: Literal[False] | None = Field(default=None, description="Nothing is ever stored")
    service_tier: Literal["auto", "default"] | None = Field(default=None, description="There is one tier")


class ChatOptions(_Strict):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template")
    tools: Tools = Field(default=None, description="What the model may call")


class ChatCompletionBody(SamplingBody, ChatOptions):
    """POST /v1/chat/completions"""

    messages: Items[Message] = Field(min_length=1)
    add_special_tokens: bool = Field(default=False, description="Add BOS although the template has written it")
    max_tokens: int | None = Field(default=None, ge=1, description="Output tokens at most; the older name")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Output tokens at most")
    tool_choice: ToolChoice = Field(default=None, description="auto when not given")
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    prompt: Prompt
    max_tokens: int | None = Field(default=None, ge=0, description="Output tokens at most; 0 only with `echo`")
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, description="Must equal n")
    add_special_tokens: bool = Field(default=True, description="Add what the model expects around a text prompt")


class TokenizeBody(ChatOptions):
    """POST /tokenize: of `prompt` or of `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = Field(default=None, description="True for a prompt, false for messages")
    return_token_strs: bool | None = None


class DetokenizeBody(_Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]
