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


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a part of an answer's text adds. A call that the text breaks off has no end."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class Collected:
    """Collects content and calls between two answers of a parser, neighbouring parts of arguments as one."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []  # of the call at `_index`, not in `_calls` yet
        self._index = 0

    def content(self, text: str) -> None:
        self._content.append(text)

    def begin(self, index: int, name: str) -> None:
        self._join()
        self._index = index
        self._calls.append(CallDelta(index, name=name))

    def arguments(self, index: int, text: str) -> None:
        self._index = index
        self._arguments.append(text)

    def end(self, index: int) -> None:
        self._join()
        self._calls.append(CallDelta(index, ended=True))

    def take(self) -> Parsed:
        """What was collected since the last time."""
        self._join()
        parsed = Parsed("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return parsed

    def _join(self) -> None:
        if text := "".join(self._arguments):
            self._calls.append(CallDelta(self._index, arguments=text))
        self._arguments = []
