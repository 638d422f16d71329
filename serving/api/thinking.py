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

    def of(self, prompt: str) -> ThinkingPlan | None:
        """For the answer to this prompt; None where the model does not think."""
        if self._form is None:
            return None
        return ThinkingPlan(form=self._form, begun=self._form.begun(prompt), special=self._special)
