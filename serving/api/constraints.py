"""What an output has to follow: the forms clients ask in, as one grammar.

A schema that asks for what cannot be kept is refused by name, and none is kept in part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from serving.api.plan import OutputForm, ThinkingPlan
from serving.api.schema import JsonObjectFormat, JsonSchemaFormat, SamplingBody, StructuredOutputs, TextFormat
from serving.api.tools import AskedTools
from serving.errors import InvalidRequest
from serving.grammar.forms import ANY_OBJECT, choice_grammar, json_grammar, regex_grammar, written_grammar
from serving.grammar.grammars import GrammarError
from serving.grammar.thinking import after_thinking

Forms = list[tuple[str, Callable[[], str]]]  # the field that asks, and how its grammar is made


def output_form(
    fields: SamplingBody, tools: AskedTools | None = None, thinking: ThinkingPlan | None = None
) -> OutputForm:
    """What the request asks for; whether it compiles is not looked at. Raises InvalidRequest that names the field.

    A model that thinks does so before it.
    """
    forms = _forms(fields)
    if tools is not None:
        forms = _with_tools(fields, tools, forms)
    if not forms:
        return OutputForm()
    if len(forms) > 1:
        both = " and ".join(param for param, _ in forms[:2])
        raise InvalidRequest(f"{both} exclude each other: ask for one form of output", param=forms[1][0])
    if fields.ignore_eos:
        raise InvalidRequest("ignore_eos: an output with a form ends where that does", param="ignore_eos")
    param, make = forms[0]
    try:
        grammar = make()
        if thinking is not None:
            grammar = after_thinking(grammar, thinking.form, begun=thinking.begun, special=thinking.special)
    except GrammarError as error:
        raise InvalidRequest(f"{param}: {clear(str(error))}", param=param, code="grammar") from error
    return OutputForm(grammar, param)


def _forms(fields: SamplingBody) -> Forms:
    found: Forms = []
    if isinstance(fields.response_format, JsonObjectFormat):
        found.append(("response_format", partial(json_grammar, ANY_OBJECT)))
    elif isinstance(fields.response_format, JsonSchemaFormat):
        schema = fields.response_format.json_schema.schema_
        found.append(("response_format", partial(json_grammar, schema)))
    older = StructuredOutputs.model_construct(
        json_=fields.guided_json, regex=fields.guided_regex, choice=fields.guided_choice, grammar=fields.guided_grammar
    )
    for of, prefix in ((fields.structured_outputs, "structured_outputs."), (older, "guided_")):
        if of is not None:
            found += [(prefix + name, make) for name, make in _asked(of)]
    return found


def _with_tools(fields: SamplingBody, tools: AskedTools, forms: Forms) -> Forms:
    if tools.forced:
        return [*forms, ("tool_choice", tools.grammar.calls_only)]
    answer = _answer(fields.response_format)
    if answer is not None and len(forms) == 1:
        return [("response_format", partial(tools.grammar.object_or_calls, answer))]
    if forms or (tools.held and (tools.strict or not fields.ignore_eos)):
        return [*forms, ("tools", tools.grammar.text_or_calls)]
    return forms


def _answer(asked: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | bool | None:
    """The schema of an answer in JSON."""
    if isinstance(asked, JsonSchemaFormat):
        return asked.json_schema.schema_
    return ANY_OBJECT if isinstance(asked, JsonObjectFormat) else None


def _asked(of: StructuredOutputs) -> Forms:
    found: Forms = []
    if of.json_ is not None:
        found.append(("json", partial(_schema, of.json_)))
    if of.json_object:
        found.append(("json_object", partial(json_grammar, ANY_OBJECT)))
    if of.regex is not None:
        found.append(("regex", partial(regex_grammar, of.regex)))
    if of.choice is not None:
        found.append(("choice", partial(choice_grammar, of.choice)))
    if of.grammar is not None:
        found.append(("grammar", partial(written_grammar, of.grammar)))
    return found


def _schema(given: object) -> str:
    """A schema may come as the text of one."""
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise GrammarError(f"the schema is not valid JSON: {error}") from error
    return json_grammar(given)


def clear(told: str) -> str:
    """The library's words, without its own options."""
    return told.split(". Enable ")[0].strip()[:500]
