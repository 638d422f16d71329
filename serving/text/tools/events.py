"""What a parsed answer consists of: content, and the tool calls in it as they grow. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is added to the call at `index`: its beginning (a name), a part of its arguments' text, or its end."""

    index: int
    name: str | None = None
    arguments: str = ""
    ended: bool = False


Part = str | CallDelta  # content, or what is added to a call


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a part of an answer's text adds, in the order of the text. A call that the text breaks off has no end."""

    parts: tuple[Part, ...] = ()

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))

    @property
    def lead(self) -> int:
        """Characters of the content that come before the first call that begins here; all where none does."""
        length = 0
        for part in self.parts:
            if isinstance(part, str):
                length += len(part)
            elif part.name is not None:
                break
        return length

    def __add__(self, later: Parsed) -> Parsed:
        return Parsed(self.parts + later.parts)


class Collected:
    """Collects content and calls between two answers of a parser, neighbouring parts of arguments as one."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._arguments: list[str] = []  # of the call at `_index`, not in `_parts` yet
        self._index = 0

    def content(self, text: str) -> None:
        if text:
            self._join()
            self._parts.append(text)

    def begin(self, index: int, name: str) -> None:
        self._join()
        self._index = index
        self._parts.append(CallDelta(index, name=name))

    def arguments(self, index: int, text: str) -> None:
        self._index = index
        self._arguments.append(text)

    def end(self, index: int) -> None:
        self._join()
        self._parts.append(CallDelta(index, ended=True))

    def take(self) -> Parsed:
        """What was collected since the last time."""
        self._join()
        parsed = Parsed(tuple(self._parts))
        self._parts = []
        return parsed

    def _join(self) -> None:
        if text := "".join(self._arguments):
            self._parts.append(CallDelta(self._index, arguments=text))
        self._arguments = []
