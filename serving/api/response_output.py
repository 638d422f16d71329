"""The output items of one response as they grow: thoughts, a message, function calls, each with its events' fields.

Pure. Items and their texts are a function of the answer alone, however it was cut: text that follows a call is held
back and comes last, as a message of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from serving.api.choice import ChoiceDelta, ParsedDelta
from serving.api.logprobs import LogprobEntry, chat_logprobs
from serving.api.tools import call_id
from serving.messages import FinishReason
from serving.text.tokenizer import Tokenizer
from serving.text.tools.events import CallDelta

Fields = dict[str, Any]  # of an event, beside its sequence number; the type is the first of them


@dataclass(kw_only=True, slots=True)
class OutputItem:
    """One item. `status` is what it ends with."""

    index: int  # in the output
    id: str
    texts: list[str] = field(default_factory=list)
    status: Literal["completed", "incomplete"] = "completed"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def at(self) -> Fields:
        """What all of its events name."""
        return {"item_id": self.id, "output_index": self.index}

    def shown(self) -> Fields:
        """The item as it is now."""
        raise NotImplementedError

    def begun(self) -> Fields:
        """The item with nothing in it."""
        raise NotImplementedError

    def opening(self) -> Iterable[Fields]:
        """Events between the item's and its first text's."""
        return ()

    def delta(self, text: str, entries: Sequence[LogprobEntry]) -> Fields:
        raise NotImplementedError

    def closing(self) -> Iterable[Fields]:
        """Events before the one that ends the item."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class ReasoningOutput(OutputItem):
    """Thoughts: the item's content, or where a summary was asked for its summary."""

    summary: bool

    def shown(self) -> Fields:
        return self._item([self._part(self.text)], self.status)

    def begun(self) -> Fields:
        return self._item([], "in_progress")

    def _item(self, parts: list[Fields], status: str) -> Fields:
        summary, content = (parts, []) if self.summary else ([], parts)
        item = {"id": self.id, "type": "reasoning", "summary": summary, "encrypted_content": None, "status": status}
        return item if self.summary else {**item, "content": content}

    def _part(self, text: str) -> Fields:
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": text}

    def _event(self, of_part: str, of_content: str, **fields: Any) -> Fields:
        kind, index = (of_part, "summary_index") if self.summary else (of_content, "content_index")
        return {"type": f"response.{kind}", **self.at(), index: 0, **fields}

    def opening(self) -> Iterable[Fields]:
        yield self._event("reasoning_summary_part.added", "content_part.added", part=self._part(""))

    def delta(self, text: str, entries: Sequence[LogprobEntry]) -> Fields:
        return self._event("reasoning_summary_text.delta", "reasoning_text.delta", delta=text)

    def closing(self) -> Iterable[Fields]:
        text = self.text
        yield self._event("reasoning_summary_text.done", "reasoning_text.done", text=text)
        yield self._event("reasoning_summary_part.done", "content_part.done", part=self._part(text))


@dataclass(kw_only=True, slots=True)
class MessageOutput(OutputItem):
    """Text, with the log-probabilities of the answer's tokens where they were asked for."""

    tokenizer: Tokenizer
    entries: list[LogprobEntry] = field(default_factory=list)

    def shown(self) -> Fields:
        return self._item([self._part(self.text, self.entries)], self.status)

    def begun(self) -> Fields:
        return self._item([], "in_progress")

    def _item(self, parts: list[Fields], status: str) -> Fields:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}

    def _part(self, text: str, entries: Sequence[LogprobEntry]) -> Fields:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(entries)}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> list[Fields]:
        shown: list[Fields] = chat_logprobs(entries, self.tokenizer)["content"] if entries else []
        return shown

    def opening(self) -> Iterable[Fields]:
        part = self._part("", [])
        yield {"type": "response.content_part.added", **self.at(), "content_index": 0, "part": part}

    def delta(self, text: str, entries: Sequence[LogprobEntry]) -> Fields:
        kind, logprobs = "response.output_text.delta", self._logprobs(entries)
        return {"type": kind, **self.at(), "content_index": 0, "delta": text, "logprobs": logprobs}

    def closing(self) -> Iterable[Fields]:
        part = self._part(self.text, self.entries)
        told = {"text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **self.at(), "content_index": 0, **told}
        yield {"type": "response.content_part.done", **self.at(), "content_index": 0, "part": part}


@dataclass(kw_only=True, slots=True)
class CallOutput(OutputItem):
    call_id: str
    name: str

    def shown(self) -> Fields:
        return self._item(self.text, self.status)

    def begun(self) -> Fields:
        return self._item("", "in_progress")

    def _item(self, arguments: str, status: str) -> Fields:
        item = {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id}
        return {**item, "name": self.name, "arguments": arguments}

    def delta(self, text: str, entries: Sequence[LogprobEntry]) -> Fields:
        return {"type": "response.function_call_arguments.delta", **self.at(), "delta": text}

    def closing(self) -> Iterable[Fields]:
        kind = "response.function_call_arguments.done"
        yield {"type": kind, **self.at(), "name": self.name, "arguments": self.text}


class ResponseOutput:
    """Push a choice's outputs, the last with a `finish`; `items` are in order then.

    With `logprobs`, the entries of all tokens belong to the first message, which ends only with the answer.
    """

    def __init__(self, response: str, tokenizer: Tokenizer, *, summary: bool, logprobs: bool) -> None:
        self.items: list[OutputItem] = []
        self._response = response
        self._tokenizer = tokenizer
        self._summary = summary
        self._logprobs = logprobs
        self._open: OutputItem | None = None  # the item that grows
        self._message: MessageOutput | None = None  # the first one, where it is to end with the answer
        self._entries: list[LogprobEntry] = []  # that no message has yet
        self._calls = 0
        self._late: list[str] = []  # text after a call

    def push(self, output: ChoiceDelta) -> Iterator[Fields]:
        """The events for one output. They have to be taken, as items grow meanwhile."""
        self._entries += output.entries
        if isinstance(output, ParsedDelta):
            yield from self._parsed(output)
        elif output.text:
            yield from self._say(output.text)
        if output.finish is not None:
            yield from self._end(output.finish)

    def _parsed(self, output: ParsedDelta) -> Iterator[Fields]:
        if output.thoughts:
            if not isinstance(self._open, ReasoningOutput):
                item = ReasoningOutput(index=len(self.items), id=self._id("rs"), summary=self._summary)
                yield from self._begin(item)
            yield from self._grow(output.thoughts)
        lead = 0 if self._calls else output.lead
        if lead:
            yield from self._say(output.text[:lead])
        for call in output.calls:
            yield from self._call(call)
        if output.text[lead:]:
            self._late.append(output.text[lead:])

    def _say(self, text: str) -> Iterator[Fields]:
        if not isinstance(self._open, MessageOutput):
            yield from self._begin_message()
        yield from self._grow(text)

    def _begin_message(self) -> Iterator[Fields]:
        item = MessageOutput(index=len(self.items), id=self._id("msg"), tokenizer=self._tokenizer)
        yield from self._begin(item)

    def _call(self, call: CallDelta) -> Iterator[Fields]:
        if call.name is not None:
            yield from self._close()
            name = call_id(self._response, 0, self._calls)
            item = CallOutput(index=len(self.items), id=self._id("fc"), call_id=name, name=call.name)
            item.status = "incomplete"  # until its end has come
            self._calls += 1
            yield from self._begin(item)
        assert isinstance(self._open, CallOutput), "a call begins with its name"
        if call.arguments:
            yield from self._grow(call.arguments)
        if call.ended:
            self._open.status = "completed"

    def _begin(self, item: OutputItem) -> Iterator[Fields]:
        yield from self._close()
        self.items.append(item)
        self._open = item
        if self._logprobs and self._message is None and isinstance(item, MessageOutput):
            self._message = item
        yield {"type": "response.output_item.added", "output_index": item.index, "item": item.begun()}
        yield from item.opening()

    def _grow(self, text: str) -> Iterator[Fields]:
        item = self._open
        assert item is not None, "only an item that is open grows"
        entries: list[LogprobEntry] = []
        if self._message is not None and item is self._message:
            entries, self._entries = self._entries, []
            self._message.entries += entries
        item.texts.append(text)
        yield item.delta(text, entries)

    def _close(self) -> Iterator[Fields]:
        """The open item ends, but for one that is to end with the answer."""
        if self._open is not None and self._open is not self._message:
            yield from self._done(self._open)
        self._open = None

    def _done(self, item: OutputItem) -> Iterator[Fields]:
        yield from item.closing()
        yield {"type": "response.output_item.done", "output_index": item.index, "item": item.shown()}

    def _end(self, finish: FinishReason) -> Iterator[Fields]:
        if self._late:
            yield from self._say("".join(self._late))
        elif not self.items:
            yield from self._begin_message()
        last = self.items[-1]
        if finish is FinishReason.LENGTH and not isinstance(last, CallOutput):
            last.status = "incomplete"
        yield from self._close()
        if self._message is not None:
            if self._entries:
                self._open = self._message
                yield from self._grow("")
            yield from self._done(self._message)

    def _id(self, kind: str) -> str:
        """Of the next item: the same whenever the same response is made again."""
        return f"{kind}_" + blake2b(f"{self._response}/{len(self.items)}".encode(), digest_size=16).hexdigest()
