"""Splits an answer's text into content and tool calls while it comes, for every form of serving.text.tools.forms.

What comes out is a function of the text alone, however it was cut. What only looks like a call at first comes out as
content, and is not looked at again: the work is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache

from serving.text.tools.events import Collected, Parsed
from serving.text.tools.forms import ToolForm
from serving.text.tools.objects import CallReader, CallState
from serving.text.tools.values import ValueScanner

MOST_HEAD = 256  # characters between a mark and the arguments of a call that begins with its name
_NO_HEAD = re.compile(r"[^\w\s.\-\[\]]")
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*")
_SPACE = " \t\r\n"

Step = Callable[[str, int], int]  # takes the text from a position on, and gives the next position


class ToolCallParser:
    """Push the parts of one answer, then `finish`.

    White space around calls is not content. `known` names the request's tools; without `many` only the first call is
    given out.
    """

    def __init__(self, form: ToolForm, known: Collection[str], *, many: bool = True) -> None:
        self._form = form
        self._known = known
        self._many = many
        marks = (*form.opens, *form.closes)
        self._marks = re.compile("|".join(map(re.escape, marks)))
        self._possible = re.compile("(?:" + "|".join(map(_beginning, marks)) + r")\Z")
        self._out = Collected()
        self._step: Step = self._first if form.bare else self._content
        self._carry = ""  # the beginning of a mark, perhaps
        self._spaces: list[str] = []  # content if more content follows
        self._held: list[str] = []  # a call if it goes on as one; else content
        self._calls = 0  # begun
        self._name = ""  # with what follows it up to the arguments
        self._reader = CallReader()
        self._scanner = ValueScanner()
        self._in_list = False
        self._listed = 0  # calls begun when the list did
        self._just_called = False  # no content since the last call

    def push(self, text: str) -> Parsed:
        """What the next part of the text makes certain."""
        text, self._carry, at = self._carry + text, "", 0
        while at < len(text):
            at = self._step(text, at)
        return self._out.take()

    def finish(self) -> Parsed:
        """What is left when no text follows."""
        held, self._held = "".join(self._held), []
        if self._step == self._head:
            held += self._name
        if not self._cut_after_call():
            self._give(held + self._carry)
        self._carry = ""
        if not self._calls:
            self._out.content("".join(self._spaces))
        self._spaces = []
        return self._out.take()

    def _cut_after_call(self) -> bool:
        """True if the text breaks off in the mark or the comma that follows a call: none of its content."""
        if self._step == self._item:
            return self._calls > self._listed
        return self._just_called and self._step in (self._content, self._first)

    # Content and marks

    def _content(self, text: str, at: int) -> int:
        found = self._marks.search(text, at)
        if found is None:
            possible = self._possible.search(text, at)
            end = len(text) if possible is None else possible.start()
            self._give(text[at:end])
            self._carry = text[end:]
            return len(text)
        self._give(text[at : found.start()])
        mark = found.group()
        if mark in self._form.opens:
            self._hold(mark, self._body)
        elif not self._calls:
            self._give(mark)
        return found.end()

    def _give(self, text: str) -> None:
        """Content; white space at its end waits for what follows."""
        shown = text.rstrip()
        if shown:
            self._out.content("".join(self._spaces) + shown)
            self._spaces, self._just_called = [], False
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def _hold(self, text: str, then: Step) -> None:
        self._held.append(text)
        self._step = then

    def _release(self) -> None:
        """No call after all."""
        held, self._held, self._in_list = "".join(self._held), [], False
        self._give(held)
        self._step = self._content

    # Where a call may begin

    def _first(self, text: str, at: int) -> int:
        """The beginning of an answer, or what follows a call, where calls need no mark."""
        mark = text[at]
        if mark in _SPACE or (self._calls and mark in ";,"):
            self._hold(mark, self._first)
            return at + 1
        if mark == "{":
            return self._begin_object(text, at, self._known)
        self._release()
        return at

    def _body(self, text: str, at: int) -> int:
        """After a mark: an object, a list of them, or a name."""
        mark = text[at]
        if mark in _SPACE:
            self._hold(mark, self._body)
        elif mark == "[":
            self._in_list, self._listed = True, self._calls
            self._hold(mark, self._item)
        elif mark == "{":
            return self._begin_object(text, at, None)
        elif self._form.named and not _NO_HEAD.match(mark):
            self._name, self._step = "", self._head
            return at
        else:
            self._release()
            return at
        return at + 1

    def _item(self, text: str, at: int) -> int:
        """In a list, where a call is due."""
        mark = text[at]
        if mark == "{":
            return self._begin_object(text, at, None)
        if mark in _SPACE:
            self._hold(mark, self._item)
        elif mark == "]" and self._calls > self._listed:
            self._leave()
        else:
            self._release()
            return at
        return at + 1

    def _more(self, text: str, at: int) -> int:
        """In a list, after a call."""
        mark = text[at]
        if mark in _SPACE:
            return at + 1
        if mark == ",":
            self._hold(mark, self._item)
            return at + 1
        self._leave()
        return at + (mark == "]")

    def _leave(self) -> None:
        """After the last call of a mark."""
        self._held, self._in_list = [], False
        self._step = self._first if self._form.bare else self._content

    # Calls

    def _begin_object(self, text: str, at: int, known: Collection[str] | None) -> int:
        self._reader = CallReader(known)
        self._step = self._object
        return self._object(text, at)

    def _object(self, text: str, at: int) -> int:
        reader, had_begun = self._reader, self._reader.begun
        end = reader.read(text, at)
        if not reader.begun:
            self._held.append(text[at:end])
            if reader.state is CallState.NO_CALL:
                self._release()
            return end
        assert reader.name is not None, "a call begins with its name"
        if not had_begun:
            self._begin(reader.name)
        if reader.arguments:
            self._arguments("".join(reader.arguments))
            reader.arguments = []
        if reader.state is not CallState.GOES_ON:
            self._end(complete=reader.whole)
        return end

    def _head(self, text: str, at: int) -> int:
        """The name before the arguments, up to their first bracket."""
        found = _NO_HEAD.search(text, at)
        end = min(len(text) if found is None else found.start(), at + MOST_HEAD - len(self._name))
        self._name += text[at:end]
        if end == len(text):
            return end
        name = _HEAD.fullmatch(self._name)
        if text[end] != "{" or name is None:
            self._hold(self._name, self._content)
            self._release()
            return end
        self._begin(name[1])
        self._scanner, self._step = ValueScanner(), self._value
        return end

    def _value(self, text: str, at: int) -> int:
        end, ended = self._scanner.scan(text, at)
        self._arguments(text[at:end])
        if ended:
            self._end(complete=True)
        return end

    def _begin(self, name: str) -> None:
        self._held, self._spaces, self._just_called = [], [], True
        self._calls += 1
        if self._shows:
            self._out.begin(self._calls - 1, name)

    def _arguments(self, text: str) -> None:
        if self._shows:
            self._out.arguments(self._calls - 1, text)

    def _end(self, *, complete: bool) -> None:
        if complete and self._shows:
            self._out.end(self._calls - 1)
        if self._in_list:
            self._step = self._more
        else:
            self._leave()

    @property
    def _shows(self) -> bool:
        return self._many or self._calls == 1


@cache
def _beginning(mark: str) -> str:
    """A pattern for every proper beginning of a mark."""
    pattern = ""
    for character in mark[-2::-1]:
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern
