"""What a model thinks before it answers: whether it does, and how it is read from the answer."""

from __future__ import annotations

from serving.api.plan import ThinkingPlan
from serving.text.reasoning import reasoning_form
from serving.text.tokenizer import Tokenizer


class ThinkingReader:
    """For one model and a value of --reasoning-parser."""

    def __init__(self, tokenizer: Tokenizer, parser: str) -> None:
        self._form = reasoning_form(parser, tokenizer.chat_template or "")
        marks = () if self._form is None else (self._form.opening, self._form.closing)
        self._special = tokenizer.special_marks(marks)

    @property
    def thinks(self) -> bool:
        """The model can."""
        return self._form is not None

    def of(self, prompt: str, continued: str = "") -> ThinkingPlan | None:
        """For the answer to this prompt, or what follows where an answer is `continued`; None without thoughts."""
        form = self._form
        if form is None:
            return None
        begun = form.begun(prompt)
        if continued.strip():
            begun = form.inside(continued)
            if not begun:
                return None
        return ThinkingPlan(form=form, begun=begun, special=self._special)
