"""The request bodies of every endpoint, as strict pydantic models: types, ranges, and the fields that are honoured.

What becomes of any other field is decided before, in `serving.api.fields`. What needs the model or the tokenizer to be
judged is checked in `serving.api.prepare`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from serving.api.conversation import Message, ToolChoice, Tools
from serving.api.strict import Contract, Items, Strict

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGIT_BIAS = 1024  # tokens
UNBOUNDED = -1  # of an output's length: as much as the context has room for
DAY_MS = 86_400_000.0
MOST_PRIORITY = 49  # either way: the built-in classes are 100 apart, so a request stays among those of its class


def check_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list):
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are supported")
        if any(isinstance(stop, str) and not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise ValueError(f"a stop string has between 1 and {MAX_STOP_LENGTH} characters")
    return value


Stop = Annotated[str | Items[str] | None, BeforeValidator(check_stop)]


def _check_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} tokens may have a bias")
    return value


LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_check_biases)]


def _check_length(value: object) -> object:
    if type(value) is int and value < 1 and value != UNBOUNDED:
        raise ValueError(f"must be at least 1, or {UNBOUNDED} for what the context has room for")
    return value


OutputLength = Annotated[int | None, BeforeValidator(_check_length)]

_TEXT_OR_IDS: dict[str, Any] = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    ]
}
Prompt = Annotated[Any, WithJsonSchema(_TEXT_OR_IDS)]  # judged by `prepare`, which can say what is wrong where


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="Usage so far in every chunk")


class TextFormat(Contract):
    type: Literal["text"]


class JsonObjectFormat(Contract):
    type: Literal["json_object"]


class JsonSchema(Contract):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(default=None, description="The output follows the schema in any case")


class JsonSchemaFormat(Contract):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Contract):
    """What the output has to follow, in one of these forms; as vLLM names them."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json", description="A JSON schema")
    json_object: bool | None = Field(default=None, description="Any JSON object")
    regex: str | None = Field(default=None, description="A regular expression, of the whole output")
    choice: Items[str] | None = Field(default=None, description="One of these texts")
    grammar: str | None = Field(default=None, description="A grammar in Lark's form, or in GBNF")


class PlacedBody(Strict):
    """What every request has that is given to workers: where it may go, and by when."""

    model: str | None = Field(default=None, description="The served model's name; it when not given")
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


class GenerationBody(PlacedBody):
    """What every endpoint that generates takes, whatever its API."""

    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; else the model's own, or 1")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Else the model's own, as of the next two")
    top_k: int | None = Field(default=None, ge=-1, description="0 and -1 keep all")
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, description="No stop token or stop string before so many tokens")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: LogitBias = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = Field(default=None, description="structured_outputs.json")
    guided_regex: str | None = Field(default=None, description="structured_outputs.regex")
    guided_choice: Items[str] | None = Field(default=None, description="structured_outputs.choice")
    guided_grammar: str | None = Field(default=None, description="structured_outputs.grammar")

    def shared(self) -> dict[str, Any]:
        """The fields from here that were given, as they are in a chat request too."""
        return {name: getattr(self, name) for name in GenerationBody.model_fields if name in self.model_fields_set}


class SamplingBody(GenerationBody):
    """What chat and completions have in common."""

    n: int | None = Field(default=None, ge=1)
    stop: Stop = None
    include_stop_str_in_output: bool = False
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=100, description="As repetition_penalty")
    max_new_tokens: OutputLength = Field(default=None, description="Output tokens at most; the smallest bound holds")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None


class ChatOptions(Strict):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template")
    tools: Tools = Field(default=None, description="What the model may call")


class ChatCompletionBody(SamplingBody, ChatOptions):
    """POST /v1/chat/completions"""

    messages: Items[Message] = Field(min_length=1)
    add_special_tokens: bool = Field(default=False, description="Add BOS although the template has written it")
    max_tokens: OutputLength = Field(default=None, description="Output tokens at most, -1 for no bound; the older name")
    max_completion_tokens: OutputLength = Field(default=None, description="Output tokens at most, -1 for no bound")
    tool_choice: ToolChoice = Field(default=None, description="auto when not given")
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    prompt: Prompt
    max_tokens: int | None = Field(
        default=None, ge=UNBOUNDED, description="Output tokens at most, -1 for no bound; 0 only with `echo`"
    )
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, description="Must equal n")
    add_special_tokens: bool = Field(default=True, description="Add what the model expects around a text prompt")


class EmbeddingBody(PlacedBody):
    """POST /v1/embeddings"""

    input: Prompt
    encoding_format: Literal["float", "base64"] = Field(default="float", description="base64: little-endian float32")
    dimensions: int | None = Field(default=None, ge=1, description="The first so many, of models trained for that")
    normalize: bool | None = Field(default=None, description="To length 1; else as the model says")
    truncate_prompt_tokens: OutputLength = Field(
        default=None, description="Of each input its last so many tokens, -1 for what the context has room for"
    )
    add_special_tokens: bool = Field(default=True, description="Add what the model expects around a text")


class TokenizeBody(ChatOptions):
    """POST /tokenize: of `prompt` or of `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = Field(default=None, description="True for a prompt, false for messages")
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: Items[int]
