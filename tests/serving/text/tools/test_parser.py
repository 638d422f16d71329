"""Every form of tool calls is read the same however its text is cut, and what is no call comes out as it was."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.tools.events import Parsed
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
from serving.text.tools.parser import MOST_HEAD, ToolCallParser

FORMS = [HERMES, GENERIC, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, PHI4_MINI_JSON, PHI_FUNCTOOLS]
KNOWN = frozenset({"weather", "add", "no-op"})
Call = tuple[str, str, bool]  # name, arguments, complete


def read(form: ToolForm, parts: Sequence[str], *, many: bool = True) -> tuple[str, list[Call]]:
    """Content and calls of an answer that comes in these parts; each call begins once, in order, before its text."""
    parser, content = ToolCallParser(form, KNOWN, many=many), ""
    names: list[str] = []
    arguments: list[str] = []
    ended: list[int] = []
    for parsed in [*map(parser.push, parts), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(names)
                names.append(delta.name)
                arguments.append("")
            assert delta.index == len(names) - 1
            assert delta.index not in ended
            arguments[delta.index] += delta.arguments
            if delta.ended:
                ended.append(delta.index)
    return content, [(name, text, i in ended) for i, (name, text) in enumerate(zip(names, arguments, strict=True))]


def in_order(form: ToolForm, parts: Sequence[str]) -> list[str | int]:
    """Content joined, and the number of each call, as they follow each other in the answer."""
    parser, order = ToolCallParser(form, KNOWN), list[str | int]()
    for part in (part for parsed in [*map(parser.push, parts), parser.finish()] for part in parsed.parts):
        if not isinstance(part, str):
            order += [part.index] if part.name is not None else []
        elif order and isinstance(order[-1], str):
            order[-1] += part
        else:
            order.append(part)
    return order


def in_parts(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(ends)]


def cuts_of(text: str) -> list[list[str]]:
    """Whole, character by character, and in two at every place."""
    return [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]


OBJECT = '{"name": "weather", "arguments": {"city": "Köln \\"}{[", "days": [1, {"a": null}]}}'
ARGUMENTS = '{"city": "Köln \\"}{[", "days": [1, {"a": null}]}'
WEATHER: Call = ("weather", ARGUMENTS, True)
ADD: Call = ("add", '{"a": 1}', True)
EMPTY: Call = ("no-op", "{}", True)
ADD_OBJECT = '{"arguments": {"a": 1}, "name": "add"}'
ANSWERS: list[tuple[ToolForm, str, str, list[Call]]] = [
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>", "", [WEATHER]),
    (HERMES, f"<tool_call>{OBJECT}", "", [WEATHER]),
    (HERMES, f"Let me see.\n\n<tool_call>\n{OBJECT}\n</tool_call>\n", "Let me see.", [WEATHER]),
    (HERMES, f"<tool_call>{OBJECT}</tool_call>\n<tool_call>{ADD_OBJECT}</tool_call> So.", " So.", [WEATHER, ADD]),
    (HERMES, '<tool_call>{"name": "no-op"}</tool_call>', "", [EMPTY]),
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call", "", [WEATHER]),  # cut off by max_tokens
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_", "", [WEATHER]),
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call> So <", "\n So <", [WEATHER]),
    (HERMES, "Is a </tool", "Is a </tool", []),
    (LLAMA3_JSON, f"{ADD_OBJECT}; ", "", [ADD]),
    (PHI4_MINI_JSON, f"<|tool_call|>[{ADD_OBJECT}, ", "", [ADD]),
    (PHI4_MINI_JSON, f"<|tool_call|>[{ADD_OBJECT}]<|/to", "", [ADD]),
    (HERMES, '<tool_call>{"name": "no-op", "arguments": null}</tool_call>', "", [EMPTY]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
    (HERMES, '<tool_call>{"id": 7, "type": "function", "name": "add", "arguments": {"a": 1}}', "", [ADD]),
    (HERMES, '<tool_call>{"name": "unheard", "arguments": {}}', "", [("unheard", "{}", True)]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', "}", [ADD]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1', False)]),
    (HERMES, '<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    (HERMES, "<tool_call> is the mark. ", "<tool_call> is the mark. ", []),
    (HERMES, f"<tool_call><tool_call>{OBJECT}", "<tool_call>", [WEATHER]),
    (HERMES, "a <tool_cal b <", "a <tool_cal b <", []),
    (HERMES, "</tool_call> \n", "</tool_call> \n", []),
    (HERMES, OBJECT, OBJECT, []),
    (LLAMA3_JSON, '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    (LLAMA3_JSON, f"\n {OBJECT}; {ADD_OBJECT}", "", [WEATHER, ADD]),
    (LLAMA3_JSON, f"<|python_tag|>{OBJECT}", "", [WEATHER]),
    (LLAMA3_JSON, f"I look it up. <|python_tag|>{ADD_OBJECT}", "I look it up.", [ADD]),
    (LLAMA3_JSON, f"So: {ADD_OBJECT}", f"So: {ADD_OBJECT}", []),
    (LLAMA3_JSON, '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    (LLAMA3_JSON, '{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
    (LLAMA3_JSON, '{"city": "Paris"} ', '{"city": "Paris"} ', []),
    (LLAMA3_JSON, "{name: 1}", "{name: 1}", []),
    (LLAMA3_JSON, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (MISTRAL, f"[TOOL_CALLS][{OBJECT}, {ADD_OBJECT}]", "", [WEATHER, ADD]),
    (MISTRAL, f"[TOOL_CALLS] [{ADD_OBJECT}]", "", [ADD]),
    (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[ARGS]" + '{"a": 1}', "", [WEATHER, ADD]),
    (MISTRAL, '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "", [ADD]),
    (MISTRAL, '[TOOL_CALLS]add{"a": 1}', "", [ADD]),
    (MISTRAL, "[TOOL_CALLS] are calls, they say.", "[TOOL_CALLS] are calls, they say.", []),
    (MISTRAL, "[TOOL_CALLS]two words[ARGS]{}", "[TOOL_CALLS]two words[ARGS]{}", []),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MISTRAL, "[TOOL_CALLS]" + "a" * (MOST_HEAD + 1) + "{}", "[TOOL_CALLS]" + "a" * (MOST_HEAD + 1) + "{}", []),
    (MISTRAL, '[TOOL_CALLS]no$[TOOL_CALLS]add{"a": 1}', "[TOOL_CALLS]no$", [ADD]),
    (PHI4_MINI_JSON, f"functools[{OBJECT},{ADD_OBJECT}]", "", [WEATHER, ADD]),
    (PHI4_MINI_JSON, f"<|tool_call|>[{ADD_OBJECT}]<|/tool_call|>", "", [ADD]),
    (PHI4_MINI_JSON, "functools is a module. functo", "functools is a module. functo", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_an_answer_is_read_the_same_however_it_is_cut(
    form: ToolForm, text: str, content: str, calls: list[Call]
) -> None:
    for parts in cuts_of(text):
        assert read(form, parts) == (content, calls), parts


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.begin or form.name)
def test_what_a_form_writes_it_reads(form: ToolForm) -> None:
    text = form.write([("weather", ARGUMENTS), ("no-op", "{}")])
    for parts in cuts_of(text):
        assert read(form, parts) == ("", [WEATHER, EMPTY])
    assert read(form, [text], many=False) == ("", [WEATHER])


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES, KNOWN)
    assert parser.push('<tool_call>{"name": "add"').calls == ()
    (begun, first) = parser.push(', "arguments": {"a').calls
    assert (begun.name, begun.arguments, first.arguments) == ("add", "", '{"a')
    (second,) = parser.push('": 1').calls
    assert (second.name, second.arguments, second.ended) == (None, '": 1', False)
    *_, last = parser.push("}}").calls
    assert last.ended


PIECES = [
    *{mark for form in FORMS for mark in form.marks},
    *('{"name": "add", "arguments": {"a": 1}}', '"name"', '"arguments"', "add", '"', "\\", "{", "}", "[", "]"),
    *(":", ",", ";", " ", "\n", "text", "1", "null", "<", "[TOOL"),
]


@settings(deadline=None, max_examples=300)
@given(
    form=st.sampled_from(FORMS),
    pieces=st.lists(st.sampled_from(PIECES), max_size=14),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    many=st.booleans(),
)
def test_any_text_is_read_the_same_however_it_is_cut(
    form: ToolForm, pieces: list[str], cuts: list[int], many: bool
) -> None:
    text = "".join(pieces)
    whole = read(form, [text], many=many)
    assert read(form, in_parts(text, cuts), many=many) == whole
    assert read(form, list(text), many=many) == whole
    if not whole[1]:
        assert whole[0] == text
    assert in_order(form, in_parts(text, cuts)) == in_order(form, [text]) == in_order(form, list(text))


def test_content_and_calls_come_in_order() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for parts in cuts_of(f"One{call} two{call}"):
        assert in_order(HERMES, parts) == ["One", 0, " two", 1], parts


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=80)
@given(
    form=st.sampled_from(FORMS),
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(KNOWN)), st.dictionaries(st.text(max_size=6), json_values, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 500), max_size=12),
    ascii_only=st.booleans(),
)
def test_any_calls_come_back_whole(
    form: ToolForm, calls: list[tuple[str, dict[str, object]]], cuts: list[int], ascii_only: bool
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    content, found = read(form, in_parts(form.write(written), cuts))
    assert content == ""
    assert found == [(name, arguments, True) for name, arguments in written]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.begin or form.name)
@pytest.mark.parametrize(
    "unit", ["<tool_call>", '<tool_call>{"a": "', "[TOOL_CALLS][", "[TOOL_CALLS]a", "{", " ", "<", "functools[", '"']
)
def test_reading_takes_linear_time(form: ToolForm, unit: str) -> None:
    def seconds(count: int) -> float:
        parser, began = ToolCallParser(form, KNOWN), time.process_time()
        for opening in (form.write([])[:8], '{"name": "', *[unit] * count):
            parser.push(opening)
        parser.finish()
        return time.process_time() - began

    seconds(100)
    short = min(seconds(1_000) for _ in range(3))
    assert min(seconds(8_000) for _ in range(2)) < 8 * 4 * short + 0.01


@pytest.mark.parametrize("arguments", ['"\\ud83d"', '"{\\"a\\": \\"\\ud83d\\"}"'])
def test_half_of_a_surrogate_pair_can_be_sent(arguments: str) -> None:
    """A model may write its escape: the answer goes on, with a replacement for it."""
    for parts in cuts_of(f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'):
        _, calls = read(HERMES, parts)
        assert "\ufffd" in "".join(text for _, text, _ in calls)
        for name, text, _ in calls:
            (name + text).encode()


@settings(deadline=None, max_examples=200)
@given(
    form=st.sampled_from(FORMS),
    pieces=st.lists(
        st.sampled_from(['<tool_call>{"name": "add", "arguments": {}}</tool_call>', "a ", " ", "\n", "[TOOL_CALLS]"]),
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 300), max_size=10),
)
def test_content_before_the_first_call_is_told(form: ToolForm, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    found = []
    for parts in ([text], in_parts(text, cuts)):
        parser = ToolCallParser(form, KNOWN)
        total = Parsed()
        for parsed in [*map(parser.push, parts), parser.finish()]:
            total += parsed
        found.append((total.content, total.lead, len(total.calls) > 0))
    assert found[0] == found[1]
    content, lead, called = found[0]
    assert called or lead == len(content)
