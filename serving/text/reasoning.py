"""Splits what a model thinks from what it answers, while the text comes: `<think>` … `</think>`, then the answer.

What comes out is a function of the text alone, however it was cut; white space around either part is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_LEAD = 64  # characters of white space before the opening mark


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningForm:
    """How a model thinks. `always`: also where neither prompt nor answer have the opening mark."""

    name: str
    opening: str = "<think>"
    closing: str = "</think>"
    always: bool = False

    def begun(self, prompt: str) -> bool:
        """True if an answer to this prompt begins with thoughts, without a mark."""
        end = prompt.rstrip()
        return end.endswith(self.opening) or (self.always and not end.endswith(self.closing))

    def inside(self, answer: str) -> bool:
        """True if what follows this part of an answer is thoughts."""
        return answer.rfind(self.opening) > answer.rfind(self.closing)


_FORMS = {form.name: form for form in (ReasoningForm(name="qwen3"), ReasoningForm(name="deepseek_r1", always=True))}


def reasoning_form(parser: str, template: str) -> ReasoningForm | None:
    """The form for a value of --reasoning-parser; for `auto` that of a chat template that knows of thoughts."""
    if parser == "auto":
        parser = "qwen3" if "</think>" in template else "none"
    return _FORMS.get(parser)


class ReasoningSplitter:
    """Push the parts of one answer, then `finish`. Linear in the text."""

    def __init__(self, form: ReasoningForm, *, begun: bool) -> None:
        self._form = form
        self._step: Callable[[str], tuple[str, str]] = self._begin_thoughts if begun else self._open
        self.over: int | None = None
        """Where thoughts and the mark behind them end, in characters of the whole text; None: not known yet."""
        self._pushed = 0  # characters
        self._held = ""  # the beginning of a mark, perhaps
        self._spaces: list[str] = []  # thought if more thoughts follow
        self._thought = False

    def push(self, text: str) -> tuple[str, str]:
        """The thoughts and the answer that the next part of the text makes certain."""
        self._pushed += len(text)
        return self._step(text)

    def finish(self) -> tuple[str, str]:
        """What is left when no text follows."""
        held, self._held = self._held, ""
        if self._step in (self._think, self._begin_thoughts):
            self.over = self._pushed
            return self._thoughts(held), ""
        self.over = self.over or 0
        return "", held

    def _open(self, text: str) -> tuple[str, str]:
        """At the beginning of an answer."""
        text = self._held + text
        begins, mark = text.lstrip(), self._form.opening
        if len(text) - len(begins) <= MOST_LEAD:
            if begins.startswith(mark):
                self._held, self._step = "", self._think
                return self._think(begins.removeprefix(mark))
            if mark.startswith(begins):
                self._held = text
                return "", ""
        self._held, self._step, self.over = "", self._pass_on, 0
        return "", text

    def _begin_thoughts(self, text: str) -> tuple[str, str]:
        """The prompt has begun them; some models write the mark once more."""
        text = self._held + text
        begins, mark = text.lstrip(), self._form.opening
        if len(text) - len(begins) <= MOST_LEAD:
            if mark.startswith(begins) and begins != mark:
                self._held = text
                return "", ""
            text = begins.removeprefix(mark)
        self._held, self._step = "", self._think
        return self._think(text)

    def _think(self, text: str) -> tuple[str, str]:
        text, mark = self._held + text, self._form.closing
        self._held = ""
        end = text.find(mark)
        if end >= 0:
            self._step = self._begin_answer
            self.over = self._pushed - len(text) + end + len(mark)
            return self._thoughts(text[:end]), self._begin_answer(text[end + len(mark) :])[1]
        kept = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
        self._held = text[len(text) - kept :]
        return self._thoughts(text[: len(text) - kept]), ""

    def _thoughts(self, text: str) -> str:
        """Without white space at either end, which at the end is known only when more follows."""
        shown = text.rstrip() if self._thought else text.strip()
        rest = text[len(text.rstrip()) :]
        if shown:
            shown = "".join(self._spaces) + shown
            self._spaces, self._thought = [], True
        if self._thought and rest:
            self._spaces.append(rest)
        return shown

    def _begin_answer(self, text: str) -> tuple[str, str]:
        answer = text.lstrip()
        if answer:
            self._step = self._pass_on
        return "", answer

    def _pass_on(self, text: str) -> tuple[str, str]:
        return "", text
