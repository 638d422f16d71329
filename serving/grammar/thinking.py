"""Grammars for models that think before they answer: a grammar holds the answer, and the thoughts are free."""

from __future__ import annotations

import re
from collections.abc import Mapping

import orjson

from serving.text.reasoning import ReasoningForm

_ANSWER = "answer_after_thoughts"


def after_thinking(grammar: str, form: ReasoningForm, *, begun: bool, special: Mapping[str, int]) -> str:
    """The grammar of thoughts and then an answer that `grammar` allows.

    Without `begun` the output opens its thoughts itself, or has none. `special` are marks that are special tokens.
    """
    # Where the opening mark is text, it is one lexeme with the thoughts: an answer may be any text too, and of two
    # lexemes that begin alike the longer one would be taken for it.
    opened_by_token = form.opening in special
    mark = "" if begun or opened_by_token else _pattern(form.opening)
    if form.closing in special:
        text, spelled = ("TEXT", f"{mark}(.|\\n)*") if mark else ("TEXT?", "(.|\\n)+")
        rules = [f"thoughts: {text} <[{special[form.closing]}]>", f"TEXT: /{spelled}/"]
    else:
        rules = [f"thoughts[lazy]: /{mark}(.|\\n)*{_pattern(form.closing)}/"]
    # A model may write the mark once more where the prompt has.
    opening = f"<[{special[form.opening]}]>{'?' if begun else ''} " if opened_by_token else ""
    start = f"{opening}thoughts SPACE?"
    lark = "\n".join([f"start: {start if begun else f'({start})?'} @{_ANSWER}", *rules, "SPACE: /[ \\n]{1,4}/"])
    # A grammar is Lark's text, or JSON around one or several of which the first is where it begins.
    first, *others = orjson.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return orjson.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": _ANSWER}, *others]}).decode()


def _pattern(mark: str) -> str:
    return re.escape(mark).replace("/", "\\/")
