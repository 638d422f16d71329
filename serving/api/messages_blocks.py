"""The content blocks of an answer in Anthropic's Messages API, as its thoughts, text and calls come.

Pure. The same events make a stream and, joined, the answer that is not streamed; what they join to is a function of
the answer's text alone, however it was cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import orjson
from pydantic_core import from_json

from serving.api.choice import ChoiceDelta, ParsedDelta
from serving.text.tools.events import CallDelta

BlockKind = Literal["thinking", "text", "tool_use"]


@dataclass(frozen=True, slots=True)
class BlockBegins:
    index: int
    kind: BlockKind
    name: str = ""  # of the tool


@dataclass(frozen=True, slots=True)
class BlockGrows:
    index: int
    kind: BlockKind
    text: str  # of a tool's input: its JSON


@dataclass(frozen=True, slots=True)
class BlockEnds:
    index: int
    kind: BlockKind


BlockEvent = BlockBegins | BlockGrows | BlockEnds


class BlockReader:
    """Push the outputs of one choice; the last of them, which has a `finish`, ends the last block.

    A block has a text and none is empty but a tool's. An input that may turn out to be no JSON is held back until it
    is whole, unless its tool is one of `eager` or `sure` says that it is JSON.
    """

    def __init__(self, *, eager: frozenset[str] = frozenset(), sure: bool = False) -> None:
        self._eager = eager
        self._sure = sure
        self._count = 0
        self._open: BlockKind | None = None
        self._streams = False  # the input that is being written goes out as it comes
        self._held: list[str] = []

    def push(self, output: ChoiceDelta) -> list[BlockEvent]:
        """What the output adds to the blocks."""
        return list(self._events(output))

    def _events(self, output: ChoiceDelta) -> Iterator[BlockEvent]:
        thoughts, parts = (output.thoughts, output.parts) if isinstance(output, ParsedDelta) else ("", (output.text,))
        if thoughts:
            yield from self._text("thinking", thoughts)
        for part in parts:
            if isinstance(part, CallDelta):
                yield from self._call(part)
            elif part:
                yield from self._text("text", part)
        if output.finish is not None:
            yield from self._end()

    def _text(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open != kind:
            yield from self._begin(kind)
        yield BlockGrows(self._count - 1, kind, text)

    def _call(self, call: CallDelta) -> Iterator[BlockEvent]:
        if call.name is not None:
            yield from self._begin("tool_use", call.name)
            self._streams = self._sure or call.name in self._eager
        if call.arguments and self._streams:
            yield BlockGrows(self._count - 1, "tool_use", call.arguments)
        elif call.arguments:
            self._held.append(call.arguments)
        if call.ended:
            yield from self._end()

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[BlockEvent]:
        yield from self._end()
        self._open, self._count = kind, self._count + 1
        yield BlockBegins(self._count - 1, kind, name)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is None:
            return
        if self._held:
            text, self._held = "".join(self._held), []
            yield BlockGrows(self._count - 1, "tool_use", text if read_input(text) is not None else no_json(text))
        yield BlockEnds(self._count - 1, self._open)
        self._open = None


def read_input(text: str) -> object | None:
    """A tool's input, to be written by orjson; of one that was broken off, what is certain. None: it is no object."""
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        if isinstance(value, dict):
            return orjson.Fragment(text)  # as it was written: numbers may be longer and larger than ours
    except (ValueError, RecursionError):
        pass
    try:
        part = from_json(text, allow_partial=True, allow_inf_nan=False)
        written = json.dumps(part, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return orjson.Fragment(written) if isinstance(part, dict) else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def no_json(text: str) -> str:
    """What takes the place of an input that is no object: the form that Anthropic's documentation has for it."""
    return orjson.dumps({"INVALID_JSON": text}).decode()


def joined(events: Sequence[BlockEvent], response: str) -> list[Mapping[str, Any]]:
    """The blocks of an answer that is not streamed, to be written by orjson; `response` is its id."""
    names: list[tuple[BlockKind, str]] = []
    texts: list[list[str]] = []
    for event in events:
        if isinstance(event, BlockBegins):
            names.append((event.kind, event.name))
            texts.append([])
        elif isinstance(event, BlockGrows):
            texts[event.index].append(event.text)
    return [_block(response, index, kind, name, "".join(texts[index])) for index, (kind, name) in enumerate(names)]


def _block(response: str, index: int, kind: BlockKind, name: str, text: str) -> Mapping[str, Any]:
    if kind == "text":
        return {"type": "text", "text": text}
    if kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": signature(response, index)}
    read = read_input(text)
    shown = orjson.Fragment(no_json(text)) if read is None else read
    return {"type": "tool_use", "id": tool_use_id(response, index), "name": name, "input": shown}


def tool_use_id(response: str, index: int) -> str:
    """The id of a block: the same whenever the same response is made again."""
    return "toolu_" + _digest(response, index)


def signature(response: str, index: int) -> str:
    """What clients expect beside thoughts and send back: a name, no proof of anything."""
    return _digest(response, index)


def _digest(response: str, index: int) -> str:
    return blake2b(f"{response}/{index}".encode(), digest_size=12).hexdigest()
