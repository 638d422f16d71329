"""Grammars of answers with tool calls allow what their form writes, and no call that a schema does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from serving.grammar.forms import MAX_MULTIPLE_OF
from serving.grammar.grammars import GrammarError, Grammars
from serving.grammar.tool_calls import CallGrammar, arguments_schema
from serving.text.tokenizer import Tokenizer
from serving.text.tools.forms import (
    GENERIC,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAMED,
    PHI4_MINI_JSON,
    PHI_FUNCTOOLS,
    ToolForm,
)
from serving.text.tools.parser import ToolCallParser
from tests.serving.grammar.following import ENDS, SPECIAL, accepts

FORMS = [HERMES, GENERIC, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, PHI4_MINI_JSON, PHI_FUNCTOOLS]
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"],
    "$defs": {"name": {"type": "string"}},
}
SCHEMAS: dict[str, dict[str, Any] | None] = {"weather": WEATHER, "add": None}
GOOD = [("weather", '{"city": "Ulm", "days": 2}'), ("add", '{"a": [1]}')]


def grammar_of(form: ToolForm, *, special: bool = False, **options: Any) -> CallGrammar:
    marks = {form.opens[0]: SPECIAL} if special else {}
    return CallGrammar(**{"form": form, "schemas": SCHEMAS, "special": marks, **options})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.begin or form.name)
def test_a_grammar_allows_what_its_form_writes(
    grammars: Grammars, tokenizer: Tokenizer, form: ToolForm, special: bool
) -> None:
    made = grammar_of(form, special=special)
    mark = form.opens[0] if special else ""
    for calls in (GOOD[:1], GOOD, GOOD[::-1]):
        text = form.write(calls)
        for written in (made.calls_only(), made.text_or_calls(), made.object_or_calls({"type": "integer"})):
            assert accepts(grammars, tokenizer, written, text, mark)
    for name, arguments in (("weather", "{}"), ("weather", '{"city": "Ulm", "x": 1}'), ("plan", "{}"), ("add", "[]")):
        text = form.write([(name, arguments)])
        assert not accepts(grammars, tokenizer, made.calls_only(), text, mark)
        assert not accepts(grammars, tokenizer, made.text_or_calls(), text, mark) or not form.begin


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.begin or form.name)
def test_text_may_come_before_calls_or_without_any(grammars: Grammars, tokenizer: Tokenizer, form: ToolForm) -> None:
    either, calls = grammar_of(form).text_or_calls(), grammar_of(form).calls_only()
    for text in ("", "Hello.", "a\nb <tool", "functo", "é 😀"):
        assert accepts(grammars, tokenizer, either, text)
        assert not accepts(grammars, tokenizer, calls, text)
    assert accepts(grammars, tokenizer, either, "Let me see.\n" + form.write(GOOD)) or form.bare
    for before in ("", "Let me see. ", form.begin[:3] + "\n"):
        assert not accepts(grammars, tokenizer, either, before + form.begin + "oops") or form.bare
    if form.bare:
        assert not accepts(grammars, tokenizer, either, '{"name": "plan", "parameters": {}}')


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", [LLAMA3_JSON, PHI4_MINI_JSON, PHI_FUNCTOOLS], ids=lambda form: form.begin or form.name)
def test_calls_are_held_after_every_mark(
    grammars: Grammars, tokenizer: Tokenizer, form: ToolForm, special: bool
) -> None:
    """Of a form with several, the one that is its own and the others, as text and as special tokens."""
    bad = [("weather", "{}")]
    for i, (begin, end) in enumerate(((form.begin, form.end), *form.others)):
        other = replace(form, begin=begin, end=end)
        mark = next((mark for mark in form.opens if begin.startswith(mark)), "")
        if special and not mark:
            continue
        one_mark = {mark: SPECIAL} if special else {}
        either = CallGrammar(form=form, schemas=SCHEMAS, special=one_mark).text_or_calls()
        for before in ("", "Let me see. ") if mark else ("",):
            assert accepts(grammars, tokenizer, either, before + other.write(GOOD), mark if special else ""), i
            assert not accepts(grammars, tokenizer, either, before + other.write(bad), mark if special else ""), i
    assert accepts(grammars, tokenizer, either, "No function to call.")


def test_one_call_or_several(grammars: Grammars, tokenizer: Tokenizer) -> None:
    one = grammar_of(HERMES, many=False).calls_only()
    assert accepts(grammars, tokenizer, one, HERMES.write(GOOD[:1]))
    assert not accepts(grammars, tokenizer, one, HERMES.write(GOOD))


def test_an_object_may_take_the_place_of_calls(grammars: Grammars, tokenizer: Tokenizer) -> None:
    written = grammar_of(HERMES).object_or_calls({"type": "object", "required": ["a"]})
    assert accepts(grammars, tokenizer, written, '{"a": 1}')
    assert not accepts(grammars, tokenizer, written, '{"b": 1}')
    assert not accepts(grammars, tokenizer, written, "a")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.begin or form.name)
def test_what_a_grammar_forces_its_parser_reads(grammars: Grammars, tokenizer: Tokenizer, form: ToolForm) -> None:
    """Always the lowest token that is allowed: the call is whole, whatever a model says."""
    made = grammar_of(form, schemas={"add": {"properties": {"a": {"enum": [17]}}, "required": ["a"]}}, many=False)
    state, output = grammars.begin(made.calls_only()), list[int]()
    while len(output) < 200:
        (allowed,) = state.allowed(output)
        assert allowed is not None
        if allowed.ended:
            break
        bits = allowed.mask(tokenizer.vocab_size)
        output.append(next(i for i in bits.nonzero()[0].tolist() if i not in ENDS))
    parser = ToolCallParser(form, {"add"})
    begun, *arguments, ended = [*parser.push(tokenizer.decode(output)).calls, *parser.finish().calls]
    assert (begun.name, ended.ended) == ("add", True)
    assert json.loads("".join(part.arguments for part in arguments)) == {"a": 17}


def test_arguments_are_an_object_of_what_is_listed() -> None:
    assert arguments_schema({}) == {"type": "object"}
    assert arguments_schema({"properties": {}})["additionalProperties"] is False
    assert arguments_schema({"properties": {}, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in arguments_schema({"properties": {}, "anyOf": [{}]})


def test_tools_together_have_the_bounds_of_one_schema() -> None:
    costly = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": MAX_MULTIPLE_OF}}}
    grammar_of(HERMES, schemas={"a": costly}).calls_only()
    with pytest.raises(GrammarError, match="multipleOf"):
        grammar_of(HERMES, schemas={"a": costly, "b": costly}).calls_only()
    with pytest.raises(GrammarError, match="at most"):
        grammar_of(HERMES, schemas={f"a{i}": {**WEATHER, "description": "x" * 1000} for i in range(70)}).calls_only()
