"""The forms in which structured output is asked for: what they accept, what they refuse, and what that may cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from serving.grammar import forms
from serving.grammar.forms import choice_grammar, json_grammar, regex_grammar, written_grammar
from serving.grammar.grammars import GrammarCompiler, GrammarError, Grammars
from serving.text.tokenizer import Tokenizer
from tests.serving.grammar.following import accepts


@pytest.mark.parametrize(
    ("grammar", "text", "wanted"),
    [
        (lambda: choice_grammar(["red", "green"]), "red", True),
        (lambda: choice_grammar(["red", "green"]), "redgreen", False),
        (lambda: choice_grammar(['a"b\\', "é\n"]), 'a"b\\', True),
        (lambda: choice_grammar(['a"b\\', "é\n"]), "é\n", True),
        (lambda: written_grammar('start: "a" /[0-9]+/'), "a12", True),
        (lambda: written_grammar('root ::= "a" root | "b"'), "aab", True),
        (lambda: written_grammar('root ::= "a" root | "b"'), "aa", False),
        (lambda: json_grammar({"type": "object"}), '{"a": [1, null]}', True),
        (lambda: json_grammar({"type": "object"}), "[1]", False),
        (lambda: json_grammar(True), "[1]", True),
        (lambda: json_grammar({"type": "integer", "multipleOf": 7}), "21", True),
        (lambda: json_grammar({"properties": {"multipleOf": True}}), '{"multipleOf": 1}', True),
        (lambda: json_grammar({"type": "integer", "multipleOf": 7}), "22", False),
        (lambda: json_grammar({"$defs": {"a": {"const": 1}}, "$ref": "#/$defs/a"}), "1", True),
    ],
)
def test_a_form_accepts_what_it_says(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Callable[[], str], text: str, wanted: bool
) -> None:
    assert accepts(grammars, tokenizer, grammar(), text) == wanted


@pytest.mark.parametrize("indent", [None, 0, 2, 4, 8, "\t"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",", ": ")])
def test_json_may_be_laid_out_as_printers_do(
    grammars: Grammars, tokenizer: Tokenizer, indent: int | str | None, separators: tuple[str, str]
) -> None:
    text = json.dumps({"a": [1, {"b": []}], "c": {}}, indent=indent, separators=separators)
    assert accepts(grammars, tokenizer, json_grammar({"type": "object"}), text)


def test_there_is_an_end_to_whitespace(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for space in ("  ", "\n\n", "\n" + 33 * " "):
        assert not accepts(grammars, tokenizer, json_grammar({"type": "array"}), f"[{space}1]")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "a keyword that cannot be kept": (lambda: json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "no type": (lambda: json_grammar({"type": "strin"}), "strin"),
    "another document": (lambda: json_grammar({"$ref": "http://127.0.0.1/x"}), "not present"),
    "many properties": (lambda: json_grammar({"properties": {str(n): True for n in range(1001)}}), "properties"),
    "many alternatives": (lambda: json_grammar({"anyOf": [{"minimum": n} for n in range(801)]}), "alternatives"),
    "many alternatives in turn": (
        lambda: json_grammar({"items": {"oneOf": [{"anyOf": [{"minimum": n} for n in range(401)]}] * 2}}),
        "alternatives",
    ),
    "a large multiple": (lambda: json_grammar({"items": [{"multipleOf": 50_001}]}), "multipleOf"),
    "a large multiple, written short": (lambda: json_grammar({"multipleOf": 1e300}), "multipleOf"),
    "multiples of several": (lambda: json_grammar({"allOf": [{"multipleOf": 499}, {"multipleOf": 491}]}), "multipleOf"),
    "a schema in a grammar": (lambda: written_grammar('start: %json {"multipleOf": 60007}'), "schemas"),
    "a grammar as JSON": (lambda: written_grammar('{"grammars": [{"json_schema": {}}]}'), "schemas"),
    "GBNF without a root": (lambda: written_grammar('a ::= "b"'), "GBNF"),
    "GBNF of no rule": (lambda: written_grammar("root ::= a"), "GBNF"),
    "GBNF of no number": (lambda: written_grammar('root ::= "a"{²}'), "GBNF"),
    "GBNF that breaks off": (lambda: written_grammar('root ::= "a\\'), "GBNF"),
    "long GBNF": (lambda: written_grammar("root ::= " + '"a" ' * 600), "at most"),
    "many multiples": (lambda: json_grammar({"anyOf": [{"multipleOf": 999}] * 51}), "multipleOf"),
    "too long": (lambda: regex_grammar("a" * (forms.MAX_WRITTEN + 1)), "at most"),
    "a long grammar": (lambda: written_grammar("start: /" + "a" * forms.MAX_WRITTEN + "/"), "at most"),
    "long patterns": (lambda: json_grammar({"anyOf": [{"pattern": "a" * 1000}] * 17}), "pattern"),
    "long names": (lambda: json_grammar({"patternProperties": {str(n) * 100: True for n in range(100)}}), "pattern"),
    "a long schema": (lambda: json_grammar({"enum": ["x" * forms.MAX_GRAMMAR]}), "at most"),
    "many choices": (lambda: choice_grammar(["a"] * 5000), "choices"),
    "beyond 64 bits": (lambda: json_grammar({"const": 2**70}), "64"),
    "too deep": (lambda: json_grammar(nested(200)), "recursion"),
    "deep GBNF": (lambda: written_grammar("root ::= " + "(" * 1500), "GBNF"),
    "unclosed": (lambda: regex_grammar("(a"), "regex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(compiler: GrammarCompiler, name: str) -> None:
    make, told = REFUSED[name]
    with pytest.raises(GrammarError, match=told):
        compiler.submit(make()).result()


COSTLY: dict[str, Callable[[], str]] = {
    "properties": lambda: json_grammar({"type": "object", "properties": {str(n): True for n in range(1000)}}),
    "objects": lambda: json_grammar({"anyOf": [{"properties": {f"{n}": {"type": "string"}}} for n in range(800)]}),
    "objects in turn": lambda: json_grammar(
        {"anyOf": [{"anyOf": [{"properties": {f"{n}": {}}} for n in range(k, k + 400)]} for k in (0, 400)]}
    ),
    "optional properties": lambda: json_grammar(
        {"properties": {str(n): {"anyOf": [{"type": "string"}, {"type": "null"}]} for n in range(1000)}}
    ),
    "multiples": lambda: json_grammar({"anyOf": [{"type": "integer", "multipleOf": 997}] * 50}),
    "items": lambda: json_grammar({"type": "array", "minItems": 10**9, "maxItems": 10**9}),
    "length": lambda: json_grammar({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "repetition": lambda: regex_grammar("((((a{1,100}){1,100}){1,100}){1,100})"),
    "ambiguous": lambda: regex_grammar(r"(a|b)*a(a|b){5000}"),
    "alternatives": lambda: regex_grammar("|".join(f"(x{n}.*y{n}.*)" for n in range(1000))),
    "stars": lambda: regex_grammar("(ab|c)*" * 2300),
    "an error in the deep": lambda: written_grammar("start: a0\n" + "\n".join(f"a{n}:a{n + 1}" for n in range(1400))),
    "choices": lambda: choice_grammar([f"{n:09d}" for n in range(4096)]),
    "references": lambda: json_grammar(
        {
            "$defs": {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(30)} | {"a30": {}},
            "$ref": "#/$defs/a0",
        }
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_the_most_costly_that_are_accepted_take_less_than_a_second(compiler: GrammarCompiler, name: str) -> None:
    compiler.submit(regex_grammar("a")).result()

    def seconds() -> float:
        began = time.process_time()
        try:
            compiler.submit(COSTLY[name]()).result()
        except GrammarError as error:
            words = ("large", "big", "precomputation", "unknown name", "Too many items")
            assert any(word in str(error) for word in words)
        return time.process_time() - began

    assert any(seconds() < 1.0 for _ in range(3))


def chain(links: int) -> dict[str, Any]:
    refs = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(links)}
    return {"$defs": {**refs, f"a{links}": {}}, "$ref": "#/$defs/a0"}


def rules(name: str, last: str) -> str:
    return f"start: {name}0\n" + "\n".join(f"{name}{n}:{name}{n + 1}" for n in range(1300)) + f"\n{name}1300: {last}"


DEEP: dict[str, Callable[[], str]] = {
    "rules": lambda: written_grammar(rules("a", '"x"')),
    "terminals": lambda: written_grammar(rules("A", '"x"')),
    "a circle": lambda: written_grammar(rules("a", "a0")),
    "references": lambda: json_grammar(chain(1500)),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_grammar_as_deep_as_it_may_be_long_ends_no_process(grammars: Grammars, name: str) -> None:
    """The library descends; where its stack ends the process does."""
    state = grammars.begin(DEEP[name]())
    try:
        state.allowed([])
    except GrammarError as error:
        assert str(error)
