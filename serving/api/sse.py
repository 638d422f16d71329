"""Renders the deltas of a streamed response as server-sent events, in OpenAI's format with vLLM's extensions.

What stays the same over a stream is rendered when it begins; for a delta only its text is encoded. It does not decide
what to show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from serving.api.choice import Choice, ChoiceDelta, ParsedDelta
from serving.api.failures import error_body
from serving.api.logprobs import LogprobEntry, chat_logprobs, completion_logprobs
from serving.api.plan import ResponsePlan
from serving.api.tools import call_id
from serving.errors import MillraceError
from serving.text.tokenizer import Tokenizer
from serving.text.tools.events import CallDelta

DONE = b"data: [DONE]\n\n"


def usage_of(plan: ResponsePlan, choices: Sequence[Choice]) -> dict[str, Any]:
    """The `usage` object for the tokens so far.

    A prompt is counted once however many choices it has, and of its tokens those are cached that no choice computed.
    """
    cached: dict[int, int] = {}
    for choice in choices:
        count = choice.cached_tokens or 0
        cached[choice.prompt_number] = min(cached.get(choice.prompt_number, count), count)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": plan.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def head_of(plan: ResponsePlan, kind: str) -> dict[str, Any]:
    """The fields every response and every chunk begins with."""
    head = {"id": plan.id, "object": kind, "created": plan.created, "model": plan.model}
    return head if plan.fingerprint is None else {**head, "system_fingerprint": plan.fingerprint}


class SseWriter:
    """The bytes of one stream's events. This is a text completion's."""

    kind = "text_completion"
    before, after = b',"text":', b""  # around the text
    announces = False  # a choice begins with a chunk that says whose turn it is
    render_logprobs: Callable[[Sequence[LogprobEntry], Tokenizer], dict[str, Any]] = staticmethod(completion_logprobs)

    def __init__(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._choices = choices
        self._tokenizer = tokenizer
        self._open = b"data: " + orjson.dumps(head_of(plan, self.kind))[:-1] + b',"choices":['
        self._before = [self._open + b'{"index":%d' % choice.index + self.before for choice in choices]
        self._close = b"" if plan.continuous_usage else b',"usage":null}\n\n' if plan.include_usage else b"}\n\n"
        self._plain = self.after + b',"logprobs":null,"finish_reason":null}]' + self._close
        self._announced = [not self.announces for _ in choices]

    def frames(self, choice: Choice, output: ChoiceDelta) -> bytes:
        """The events for one output; empty when it has nothing to show yet."""
        index = choice.index
        announcement = b"" if self._announced[index] else self._announce(index)
        if output.finish is None and not output.entries and not self._plan.return_token_ids:
            if not output.text:
                return announcement
            body = self._before[index] + orjson.dumps(output.text) + self._plain
            return announcement + (body + self._usage_so_far() if self._plan.continuous_usage else body)
        return announcement + self._full(choice, output)

    def _announce(self, index: int, content: bytes = b'""') -> bytes:
        self._announced[index] = True
        role = self._open + b'{"index":%d,"delta":{"role":"assistant","content":%s}' % (index, content)
        ids = b""
        if self._plan.return_token_ids:
            ids = b',"prompt_token_ids":' + orjson.dumps(self._choices[index].request.prompt)
        close = self._usage_so_far() if self._plan.continuous_usage else self._close
        return role + b',"logprobs":null,"finish_reason":null}]' + ids + close

    def _full(self, choice: Choice, output: ChoiceDelta) -> bytes:
        """A chunk with more than text."""
        return self._before[choice.index] + orjson.dumps(output.text) + self.after + self._rest(output)

    def _rest(self, output: ChoiceDelta) -> bytes:
        """What follows the delta in a chunk."""
        rendered = self.render_logprobs(output.entries, self._tokenizer) if output.entries else None
        parts = [b',"logprobs":', orjson.dumps(rendered), b',"finish_reason":', orjson.dumps(output.ending)]
        if output.finish is not None:
            parts += [b',"stop_reason":', orjson.dumps(output.stop_reason)]
        if self._plan.return_token_ids:
            parts += [b',"token_ids":', orjson.dumps(output.tokens)]
        parts += [b"}]", self._usage_so_far() if self._plan.continuous_usage else self._close]
        return b"".join(parts)

    def _usage_so_far(self) -> bytes:
        return b',"usage":' + orjson.dumps(usage_of(self._plan, self._choices)) + b"}\n\n"

    def end(self) -> bytes:
        """What follows the last choice's end: the usage when asked for, and the mark of a complete stream."""
        return self._open + b"]" + self._usage_so_far() + DONE if self._plan.include_usage else DONE

    def failed(self, error: MillraceError) -> bytes:
        """The error, without the mark of a complete stream."""
        return b"data: " + error_body(error) + b"\n\n"


class ChatSseWriter(SseWriter):
    kind = "chat.completion.chunk"
    before, after = b',"delta":{"content":', b"}"
    announces = True
    render_logprobs = staticmethod(chat_logprobs)


class ParsedSseWriter(ChatSseWriter):
    """The same for a chat whose answers are parsed: each chunk has thoughts, or content, or one call's part."""

    def frames(self, choice: Choice, output: ChoiceDelta) -> bytes:
        """The events for one output; empty when it has nothing to show yet."""
        assert isinstance(output, ParsedDelta), "choices of such a plan are parsed"
        if not output.calls and not output.thoughts and output.finish is None and self._announced[choice.index]:
            return super().frames(choice, output)
        ends = output.finish is not None or bool(output.entries) or self._plan.return_token_ids
        deltas: list[dict[str, Any]] = [{"reasoning_content": output.thoughts}] if output.thoughts else []
        deltas += [{"content": output.text}] if output.text else []
        deltas += [{"tool_calls": [self._call(choice, call)]} for call in output.calls if not call.ended]
        if not deltas and not ends:
            return b""
        frames = []
        if not self._announced[choice.index]:
            frames.append(self._announce(choice.index, b"null" if deltas and not output.text else b'""'))
        opening = self._open + b'{"index":%d,"delta":' % choice.index
        close = self._usage_so_far() if self._plan.continuous_usage else self._close
        after = b',"logprobs":null,"finish_reason":null}]' + close
        frames += [opening + orjson.dumps(delta) + after for delta in deltas]
        if ends:
            frames.append(opening + b"{}" + self._rest(output))
        return b"".join(frames)

    def _call(self, choice: Choice, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        name = {"name": call.name, "arguments": call.arguments}
        shown = call_id(self._plan.id, choice.index, call.index)
        return {"index": call.index, "id": shown, "type": "function", "function": name}
