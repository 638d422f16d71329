"""Grammars of answers with tool calls: calls alone, or text that may end in calls. Knows no request.

Calls are written as serving.text.tools.forms has them, so that what a grammar allows its parser reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.grammar.forms import ANY_OBJECT, check_cost, json_part, lark_grammar, quoted
from serving.text.tools.forms import ToolForm

MOST_CALLS = 32  # in one answer
_ANYTHING = "(.|\\n)"
_COMBINED = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "not", "if"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallGrammar:
    """What calls may be. `schemas`: of each tool's arguments, by its name, None for any object."""

    form: ToolForm
    schemas: Mapping[str, dict[str, Any] | None]
    special: Mapping[str, int]  # marks of the form that are special tokens: a text cannot spell those
    many: bool = True

    def calls_only(self) -> str:
        """One call at least, and nothing else. Raises GrammarError."""
        return lark_grammar([f"start: {self._calls(self.form.begin, self.form.end)}", *self._rules()])

    def text_or_calls(self) -> str:
        """Any text, which calls may follow or take the place of. Raises GrammarError."""
        bare, starts, opened = not self.form.begin, ["TEXT?"], list[str]()
        # In forms without a mark what begins as an object is a call.
        text = f"[ \\t\\r\\n]*[^{{ \\t\\r\\n]{_ANYTHING}*" if bare else f"{_ANYTHING}+"
        for number, (begin, end) in enumerate(((self.form.begin, self.form.end), *self.form.others)):
            mark = next((mark for mark in self.form.opens if begin.startswith(mark)), None)
            if mark is None:
                starts.append(self._calls(begin, end))
            elif mark in self.special:
                starts.append(f"TEXT? {self._calls(begin, end)}")
            else:  # TEXT does not go past the mark: the library ends a lazy lexeme where it first can
                written = re.escape(mark).replace("/", "\\/")
                before = f"({text})?" if bare else f"{_ANYTHING}*"
                starts.append(f"opened_{number} {self._calls(begin.removeprefix(mark), end)}")
                opened.append(f"opened_{number}[lazy]: /{before}{written}/")
        return lark_grammar([f"start: {' | '.join(starts)}", *opened, f"TEXT: /{text}/", *self._rules()])

    def object_or_calls(self, schema: Any) -> str:
        """JSON that a schema accepts, or calls. Raises GrammarError."""
        return lark_grammar(
            [
                f"start: answer | {self._calls(self.form.begin, self.form.end)}",
                f"answer: {json_part(schema)}",
                *self._rules(),
            ]
        )

    def _calls(self, begin: str, end: str) -> str:
        more = f"(between call){{0,{MOST_CALLS - 1}}}" if self.many else ""
        return " ".join([*self._pieces(begin), "call", more, *self._pieces(end)])

    def _rules(self) -> list[str]:
        check_cost(list(self.schemas.values()))
        names = " | ".join(f"call_{i}" for i in range(len(self.schemas)))
        rules = [f"call: {names}"]
        if self.many:
            rules.append("between: " + " ".join(self._pieces(self.form.between)))
        for i, (name, schema) in enumerate(self.schemas.items()):
            arguments = json_part(ANY_OBJECT if schema is None else arguments_schema(schema))
            call = [*self._pieces(self.form.head(name)), arguments, *self._pieces(self.form.tail)]
            rules.append(f"call_{i}: " + " ".join(call))
        return rules

    def _pieces(self, text: str) -> list[str]:
        """The parts of a text that is written out, special tokens by their ids."""
        if not self.special:
            return [quoted(text)] if text else []
        marks = "|".join(re.escape(mark) for mark in self.special)
        parts = [part for part in re.split(f"({marks})", text) if part]
        return [f"<[{self.special[part]}]>" if part in self.special else quoted(part) for part in parts]


def arguments_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, of the properties the schema lists where it says nothing of others."""
    found = {"type": "object", **schema}
    if "properties" in found and not _COMBINED & found.keys():
        found.setdefault("additionalProperties", False)
    return found
