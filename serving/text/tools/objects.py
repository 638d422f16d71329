"""Reads one tool call written as a JSON object, `{"name": …, "arguments": {…}}`, while it is being written.

Keys may come in any order, others beside them are passed over, and `parameters` is another word for `arguments`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from serving.text.tools.values import ValueScanner

ARGUMENTS = ("arguments", "parameters")
_VALUES = '"{[-0123456789tfn'  # what a JSON value begins with


class CallState(Enum):
    """How the text so far continues."""

    GOES_ON = auto()
    COMPLETE = auto()
    NO_CALL = auto()  # of what has not begun: it is none; of what has: no object any more


class _Due(Enum):
    OPENING = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallReader:
    """One call. With `known` names only those are calls, and only with arguments: text that merely looks alike is none.

    `name` and `arguments` are for the taking as soon as `begun`; whoever takes arguments empties the list.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self.state = CallState.GOES_ON
        self.name: str | None = None
        self.begun = False  # that it is a call, and which, is certain
        self.whole = False  # its arguments are complete
        self.arguments: list[str] = []
        self._known = known
        self._due = _Due.OPENING
        self._key: str | None = None
        self._scanner: ValueScanner | None = None
        self._value: list[str] = []  # of the value or key being read
        self._streams = False  # the value being read is the arguments, and goes out as it comes

    def read(self, text: str, at: int) -> int:
        """Read on; the position up to which the text belongs to the object, or to what is none."""
        while at < len(text) and self.state is CallState.GOES_ON:
            if self._scanner is not None:
                end, ended = self._scanner.scan(text, at)
                (self.arguments if self._streams else self._value).append(text[at:end])
                at = end
                if ended:
                    self._end_value()
            elif text[at] in " \t\r\n":
                at += 1
            else:
                at += self._step(text[at])
        return at

    def _step(self, mark: str) -> int:
        """Take a character between values; 0 where it is the first of one, or belongs to no object."""
        due = self._due
        if due is _Due.OPENING and mark == "{":
            self._due = _Due.FIRST_KEY
        elif due in (_Due.FIRST_KEY, _Due.COMMA) and mark == "}":
            self._close()
        elif due in (_Due.FIRST_KEY, _Due.KEY) and mark == '"':
            self._key, self._scanner = None, ValueScanner()
            return 0
        elif due is _Due.COLON and mark == ":":
            self._due = _Due.VALUE
        elif due is _Due.VALUE and mark in _VALUES:
            self._scanner = ValueScanner()
            self._streams = self._wants_arguments() and mark == "{" and self.name is not None
            self.begun = self.begun or self._streams
            return 0
        elif due is _Due.COMMA and mark == ",":
            self._due = _Due.KEY
        else:
            self.state = CallState.NO_CALL
            return 0
        return 1

    def _wants_arguments(self) -> bool:
        return self._key in ARGUMENTS and not self.whole

    def _end_value(self) -> None:
        text, self._value, self._scanner = "".join(self._value), [], None
        if self._key is None:
            key = _decoded(text)
            self._key, self._due = key if isinstance(key, str) else "", _Due.COLON
            return
        self._due = _Due.COMMA
        if self._streams:
            self.whole, self._streams = True, False
        elif self._wants_arguments():
            given = _decoded(text)
            # Some models write the object as a string once more.
            self.arguments = [given if isinstance(given, str) else "{}" if given is None else text]
            self.whole = True
        elif self._key == "name" and self.name is None:
            self._take_name(_decoded(text))
        self.begun = self.begun or (self.whole and self.name is not None)

    def _take_name(self, name: object) -> None:
        if isinstance(name, str) and name and (self._known is None or name in self._known):
            self.name = name
        else:
            self.state = CallState.NO_CALL

    def _close(self) -> None:
        if not self.begun and self.name is not None and self._known is None:
            self.arguments, self.begun, self.whole = ["{}"], True, True
        self.state = CallState.COMPLETE if self.begun else CallState.NO_CALL


def _decoded(text: str) -> object:
    """The value; text that is none stands for itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text if text[:1] != '"' else ()
    # Half of a surrogate pair is no text, and could not be sent.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value
