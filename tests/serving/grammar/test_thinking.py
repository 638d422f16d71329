"""A grammar holds the answer of a model that thinks, whatever its thoughts are."""

from __future__ import annotations

import pytest

from serving.grammar.forms import choice_grammar, json_grammar, regex_grammar
from serving.grammar.grammars import Grammars
from serving.grammar.thinking import after_thinking
from serving.grammar.tool_calls import CallGrammar
from serving.text.reasoning import ReasoningForm
from serving.text.tokenizer import Tokenizer
from serving.text.tools.forms import HERMES
from tests.serving.grammar.test_tool_calls import SPECIAL, accepts

FORM = ReasoningForm(name="qwen3")
CALLS = CallGrammar(form=HERMES, schemas={"add": None}, special={})
ANSWERS = [
    (json_grammar({"type": "object"}), '{"a": 1}', "a"),
    (choice_grammar(["red", "green"]), "green", "blue"),
    (regex_grammar("a+"), "aa", "b"),
    (CALLS.calls_only(), HERMES.write([("add", "{}")]), "text"),
    (CALLS.text_or_calls(), "text", "<tool_call>oops"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), ANSWERS)
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_the_answer_is_held(
    grammars: Grammars, tokenizer: Tokenizer, grammar: str, good: str, bad: str, begun: bool, special: bool
) -> None:
    mark = FORM.closing if special else ""
    made = after_thinking(grammar, FORM, begun=begun, special={FORM.closing: SPECIAL} if special else {})
    opening = "" if begun else "<think>"
    for thoughts in ("", "\nI wonder {[ <b> é.\n"):
        before = f"{opening}{thoughts}</think>\n\n"
        assert accepts(grammars, tokenizer, made, before + good, mark)
        assert not accepts(grammars, tokenizer, made, before + bad, mark)
        assert not accepts(grammars, tokenizer, made, opening + thoughts + "x", mark) or good == "text"
    assert accepts(grammars, tokenizer, made, good, mark) != begun
