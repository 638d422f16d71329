"""The dialect of POST /v1/responses, OpenAI's Responses API, without state: nothing is kept between requests.

A response's items come from serving.api.response_output; here they become one object, or events around them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from serving.api.body import telling
from serving.api.choice import Choice, ChoiceDelta
from serving.api.dialect import PreparedRequest
from serving.api.fields import IgnoredFields
from serving.api.plan import RequestHead, ResponsePlan
from serving.api.prepare import Preparer
from serving.api.response_input import translated
from serving.api.response_output import ResponseOutput
from serving.api.response_schema import ENCRYPTED, ResponsesBody
from serving.api.sse import usage_of
from serving.errors import InvalidRequest, MillraceError
from serving.messages import FinishReason
from serving.text.tokenizer import Tokenizer

RATE_LIMITED = 429


class Responses:
    path = "/v1/responses"
    kind = ResponsesBody

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def prepare(self, body: bytes, head: RequestHead) -> PreparedRequest:
        fields, ignored = self._preparer.read(ResponsesBody, body)
        with telling(ignored):
            asked = translated(fields)
            plan = self._preparer.translated(asked, _ignored(fields, ignored), head, f"resp_{head.response_name}")
            return PreparedRequest(plan=plan, form=ResponseForm(_repeated(fields), _summary(fields)))


def _ignored(fields: ResponsesBody, ignored: IgnoredFields) -> IgnoredFields:
    """Values that are hints, in fields that are not."""
    hints = (
        (f"include.{ENCRYPTED}", "include", ENCRYPTED in (fields.include or ())),
        ("store", "store", fields.store),
        ("truncation", "truncation", fields.truncation == "auto"),
    )
    for name, field, asked in hints:
        if asked:
            ignored = ignored.and_hint(name, field)
    return ignored


def _summary(fields: ResponsesBody) -> str | None:
    asked = fields.reasoning
    return None if asked is None else asked.summary or asked.generate_summary


def _repeated(fields: ResponsesBody) -> dict[str, bytes]:
    """What a response repeats of its request, each field as JSON. Raises InvalidRequest where one cannot be."""
    for i, tool in enumerate(fields.tools or ()):
        _check_writable(tool.parameters, f"tools[{i}].parameters")
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        for tool in fields.tools or ()
    ]
    text = None if fields.text is None else fields.text.format
    shape: dict[str, Any] = {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude={"schema_"})
    if (schema := getattr(text, "schema_", None)) is not None:
        _check_writable(schema, "text.format.schema")
        shape["schema"] = schema
    choice = fields.tool_choice
    repeated = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": None, "summary": _summary(fields)},
        "text": {"format": shape},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_logprobs": fields.top_logprobs or 0,
        "user": fields.user,
    }
    return {name: orjson.dumps(value) for name, value in repeated.items()}


def _check_writable(value: object, param: str) -> None:
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise InvalidRequest(f"{param}: is nested too deep", param=param) from error


@dataclass(frozen=True, slots=True)
class ResponseForm:
    repeated: Mapping[str, bytes]  # fields as JSON
    summary: str | None

    def whole(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> ResponseWriter:
        return ResponseWriter(self, plan, choices, tokenizer)

    def stream(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> ResponseEvents:
        return ResponseEvents(self, plan, choices, tokenizer)


class _Response:
    """A response as it grows."""

    def __init__(self, form: ResponseForm, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
        self._form = form
        self._plan = plan
        self._choice = choices[0]
        self._output = ResponseOutput(
            plan.id, tokenizer, summary=form.summary is not None, logprobs=plan.logprobs is not None
        )

    def _shown(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole object; its output and usage are there when the answer has ended."""
        plan, sampling = self._plan, self._choice.request.sampling
        ended = status in ("completed", "incomplete")
        return {
            "id": plan.id,
            "object": "response",
            "created_at": plan.created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "max_tool_calls": None,
            "model": plan.model,
            "output": [item.shown() for item in self._output.items] if ended else [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            **{name: orjson.Fragment(written) for name, written in self._form.repeated.items()},
        }

    def _ended(self) -> str:
        return "incomplete" if self._choice.finish is FinishReason.LENGTH else "completed"

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._plan, [self._choice])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


class ResponseWriter(_Response):
    """The response that is not streamed."""

    async def add(self, choice: Choice, output: ChoiceDelta) -> None:
        for _ in self._output.push(output):
            pass

    def body(self) -> bytes:
        return orjson.dumps(self._shown(self._ended()))


class ResponseEvents(_Response):
    """The response as events, numbered from 0."""

    def __init__(self, form: ResponseForm, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
        super().__init__(form, plan, choices, tokenizer)
        self._number = 0

    def frames(self, choice: Choice, output: ChoiceDelta) -> bytes:
        frames = [] if self._number else [self._life("created", "in_progress"), self._life("in_progress")]
        return b"".join([*frames, *map(self._event, self._output.push(output))])

    def end(self) -> bytes:
        return self._life(self._ended())

    def failed(self, error: MillraceError) -> bytes:
        code = "server_error"
        if error.status < 500:  # OpenAI's codes are few
            code = "rate_limit_exceeded" if error.status == RATE_LIMITED else "invalid_prompt"
        told = {"code": code, "message": error.message, "param": error.param, "type": error.kind}
        return self._life("failed", error=told)

    def _life(self, name: str, status: str | None = None, error: dict[str, Any] | None = None) -> bytes:
        return self._event({"type": f"response.{name}", "response": self._shown(status or name, error)})

    def _event(self, fields: dict[str, Any]) -> bytes:
        written = orjson.dumps({**fields, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), written)
