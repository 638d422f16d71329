"""Writes answers in Anthropic's Messages API: one message object, or the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from serving.api.choice import Choice, ChoiceDelta
from serving.api.messages_blocks import (
    BlockBegins,
    BlockEvent,
    BlockGrows,
    BlockReader,
    joined,
    signature,
    tool_use_id,
)
from serving.api.messages_errors import messages_error
from serving.api.plan import ResponsePlan
from serving.errors import MillraceError
from serving.messages import FinishReason

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
MOST_SILENT = 64  # outputs that show nothing before a ping says that the answer goes on
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_INPUT_DELTA = ("input_json_delta", "partial_json")


class MessageWriter:
    """What both forms of an answer say beside its blocks. `clipped`: the context has less room than was asked for."""

    def __init__(self, plan: ResponsePlan, choice: Choice, *, clipped: bool) -> None:
        self._plan = plan
        self._choice = choice
        self._clipped = clipped

    def message(self, content: Sequence[Any], last: ChoiceDelta | None) -> dict[str, Any]:
        """The message object; `last` is the output that ended the answer, None while it goes on."""
        return {
            "id": self._plan.id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": content,
            **self.ending(last),
            "usage": self.usage(),
        }

    def ending(self, last: ChoiceDelta | None) -> dict[str, Any]:
        if last is None:
            return {"stop_reason": None, "stop_sequence": None}
        if last.ending == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if last.finish is FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if self._clipped else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def usage(self) -> dict[str, int]:
        """As Anthropic counts: the whole prompt is the sum of the input tokens of all three kinds."""
        cached = min(self._choice.cached_tokens or 0, self._plan.prompt_tokens)
        return {
            "input_tokens": self._plan.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.completion_tokens,
        }


class MessagesResult:
    """Collects the blocks of an answer that is not streamed."""

    def __init__(self, writer: MessageWriter, reader: BlockReader, response: str) -> None:
        self._writer = writer
        self._reader = reader
        self._response = response
        self._events: list[BlockEvent] = []
        self._last: ChoiceDelta | None = None

    async def add(self, choice: Choice, output: ChoiceDelta) -> None:
        self._events += self._reader.push(output)
        self._last = output

    def body(self) -> bytes:
        """The JSON of the complete message."""
        return orjson.dumps(self._writer.message(joined(self._events, self._response), self._last))


class MessagesStream:
    """The events of one stream. `request` is the id of the HTTP request, which an error names."""

    def __init__(self, writer: MessageWriter, reader: BlockReader, response: str, request: str) -> None:
        self._writer = writer
        self._reader = reader
        self._response = response
        self._request = request
        self._begun = False
        self._pinged = False
        self._silent = 0
        self._last: ChoiceDelta | None = None

    def frames(self, choice: Choice, output: ChoiceDelta) -> bytes:
        """The events for one output; empty when it has nothing to show yet."""
        frames = [] if self._begun else [_event("message_start", message=self._writer.message([], None))]
        self._begun, self._last = True, output
        for event in self._reader.push(output):
            frames += self._written(event)
        self._silent = 0 if frames else self._silent + 1
        if self._silent == MOST_SILENT:
            self._silent = 0
            return PING
        return b"".join(frames)

    def _written(self, event: BlockEvent) -> Iterator[bytes]:
        if isinstance(event, BlockGrows):
            kind, name = _DELTAS.get(event.kind, _INPUT_DELTA)
            yield _event("content_block_delta", index=event.index, delta={"type": kind, name: event.text})
        elif isinstance(event, BlockBegins):
            yield _event("content_block_start", index=event.index, content_block=self._empty(event))
            if not self._pinged:
                self._pinged = True
                yield PING
        else:
            if event.kind == "thinking":
                delta = {"type": "signature_delta", "signature": signature(self._response, event.index)}
                yield _event("content_block_delta", index=event.index, delta=delta)
            yield _event("content_block_stop", index=event.index)

    def _empty(self, event: BlockBegins) -> dict[str, Any]:
        if event.kind == "text":
            return {"type": "text", "text": ""}
        if event.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        name = tool_use_id(self._response, event.index)
        return {"type": "tool_use", "id": name, "name": event.name, "input": {}}

    def end(self) -> bytes:
        """What follows the last block."""
        ending = _event("message_delta", delta=self._writer.ending(self._last), usage=self._writer.usage())
        return ending + _event("message_stop")

    def failed(self, error: MillraceError) -> bytes:
        """The error, without the mark of a complete message."""
        return b"event: error\ndata: " + messages_error(error, self._request).body + b"\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
