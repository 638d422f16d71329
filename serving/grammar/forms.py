"""The forms in which clients ask for structured output, as grammars that llguidance reads. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from math import prod
from typing import Any

import orjson
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from serving.grammar.grammars import GrammarError

MAX_GRAMMAR = 64 << 10  # bytes: compiling takes about a tenth of a second at most
MAX_CHOICES = 4096
MAX_WRITTEN = 16 << 10  # bytes of expressions, in a schema together, and of grammars written out: the square counts
# Compiling grows with the square of an object's properties, and with what numbers have to be multiples of.
MAX_PROPERTIES = 1000
MAX_ALTERNATIVES = 800  # of a union, those of unions within it included: the first mask grows with their square
MAX_MULTIPLE_OF = 50_000  # of a schema's `multipleOf` together, as a sum and, of different ones, as a product
MAX_GBNF = 2 << 10  # bytes: it is read in Python, and not in linear time
# Between the parts of a JSON text, as printers write it: a space, or a line break and the next line's indentation.
# The library's own has no end: models that repeat themselves would never come back.
WHITESPACE = r"(?: | ?\r?\n[ \t]{0,32})"
ANY_OBJECT = {"type": "object"}


def json_grammar(schema: Any) -> str:
    """JSON that a schema accepts. Raises GrammarError."""
    text = _text({} if schema is True else schema)
    check_cost(schema)
    try:
        return _bounded(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise GrammarError(str(error)) from error


def regex_grammar(pattern: str) -> str:
    """Texts that a regular expression (Rust's syntax) accepts as a whole. Raises GrammarError."""
    return _bounded(LLMatcher.grammar_from_regex(_bounded(pattern, MAX_WRITTEN)))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts. Raises GrammarError."""
    if not choices or len(choices) > MAX_CHOICES:
        raise GrammarError(f"between 1 and {MAX_CHOICES} choices can be given")
    words = " | ".join(quoted(choice) for choice in choices)
    return _bounded(LLMatcher.grammar_from_lark(f"start: {words}"))


def written_grammar(grammar: str) -> str:
    """A grammar written out, in Lark's form or in GBNF. Raises GrammarError."""
    if grammar.lstrip().startswith("{") or "%json" in grammar:
        raise GrammarError("schemas within a grammar are not supported: ask for json")  # their cost is not known here
    if "::=" not in _bounded(grammar, MAX_WRITTEN):
        return _bounded(LLMatcher.grammar_from_lark(grammar))
    _bounded(grammar, MAX_GBNF)
    with ThreadPoolExecutor(1) as thread:  # whatever the library's reader raises is this grammar's error
        reading = thread.submit(gbnf_to_lark, grammar)
    if (mistake := reading.exception()) is not None:
        raise GrammarError(f"the GBNF cannot be read: {mistake}") from mistake
    return _bounded(LLMatcher.grammar_from_lark(reading.result()))


def lark_grammar(rules: Sequence[str]) -> str:
    """Rules in Lark's form as one grammar. Raises GrammarError."""
    return _bounded(LLMatcher.grammar_from_lark(_bounded("\n".join(rules))))


def json_part(schema: Any) -> str:
    """JSON that a schema accepts, as a part of a rule in Lark's form. Raises GrammarError."""
    given = {} if schema is True else {"not": {}} if schema is False else schema
    check_cost(given)
    if not isinstance(given, dict):
        raise GrammarError("a schema is an object")
    return "%json " + _text({**given, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def quoted(choice: str) -> str:
    """A string as Lark reads it: JSON's escapes, and no others."""
    return _text(choice)


def check_cost(schema: Any) -> None:
    """Raises GrammarError for a schema, or a list of those that become one grammar, that takes long to compile."""
    _check_unions(schema)
    multiples: list[int] = []  # without their decimal points
    patterns, rest = 0, [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            rest += one.values()
            properties, multiple = one.get("properties"), one.get("multipleOf")
            if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
                raise GrammarError(f"properties: an object has at most {MAX_PROPERTIES}")
            if isinstance(one.get("pattern"), str):
                patterns += len(one["pattern"])
            if isinstance(one.get("patternProperties"), dict):
                patterns += sum(map(len, one["patternProperties"]))
            if isinstance(multiple, (int, float)) and not isinstance(multiple, bool):
                _, digits, exponent = Decimal(str(multiple)).normalize().as_tuple()
                multiples.append(int("".join(map(str, digits))) * 10 ** max(0, int(exponent)))
    if patterns > MAX_WRITTEN:
        raise GrammarError(f"pattern: together at most {MAX_WRITTEN} characters")
    if max(sum(multiples), prod({abs(multiple) or 1 for multiple in multiples})) > MAX_MULTIPLE_OF:
        raise GrammarError(f"multipleOf: together at most {MAX_MULTIPLE_OF}, counted without decimal points")


def _check_unions(schema: Any) -> None:
    """Raises GrammarError for a union of too many alternatives. Looks at every part of the schema once."""
    rest: list[tuple[Any, list[int] | None]] = [(schema, None)]  # with what counts for the union that it is a part of
    while rest:
        one, counted = rest.pop()
        if isinstance(one, list):
            rest += ((each, None) for each in one)
        if not isinstance(one, dict):
            continue
        unions = [one[word] for word in ("anyOf", "oneOf") if isinstance(one.get(word), list)]
        if unions:
            counted = counted or [0]
        elif counted:
            counted[0] += 1
        for union in unions:
            rest += ((each, counted) for each in union)
        rest += ((each, None) for each in one.values() if not any(each is union for union in unions))
        if counted and counted[0] > MAX_ALTERNATIVES:
            raise GrammarError(f"anyOf: a union has at most {MAX_ALTERNATIVES} alternatives")


def _text(value: Any) -> str:
    try:
        return _bounded(orjson.dumps(value).decode())
    except TypeError as error:
        raise GrammarError(f"no JSON: {error}") from error


def _bounded(text: str, most: int = MAX_GRAMMAR) -> str:
    if len(text.encode()) > most:
        raise GrammarError(f"at most {most} bytes can be compiled")
    return text
