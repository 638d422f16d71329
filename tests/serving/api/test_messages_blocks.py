"""An answer's content blocks are the same however its text was cut, streamed or not, and inputs are objects."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.api.choice import ChoiceDelta, ParsedDelta
from serving.api.messages_blocks import (
    BlockBegins,
    BlockEnds,
    BlockEvent,
    BlockGrows,
    BlockReader,
    joined,
    no_json,
    read_input,
)
from serving.messages import FinishReason
from serving.text.reasoning import ReasoningSplitter, reasoning_form
from serving.text.tools.forms import HERMES
from serving.text.tools.parser import ToolCallParser

THINKS = reasoning_form("qwen3", "")
CALL = '<tool_call>{"name": "add", "arguments": {"a": [1, "é"]}}</tool_call>'
Shown = list[dict[str, Any]]


def outputs(parts: Sequence[str]) -> list[ParsedDelta]:
    """What a parsed choice makes of an answer that comes in these parts, and ends."""
    assert THINKS is not None
    splitter, parser = ReasoningSplitter(THINKS, begun=False), ToolCallParser(HERMES, {"add"})
    found: list[ParsedDelta] = []
    for i, text in enumerate([*parts, ""]):
        ends = i == len(parts)
        thoughts, answer = splitter.push(text) if not ends else splitter.finish()
        added = parser.push(answer).parts + (parser.finish().parts if ends else ())
        finish = FinishReason.STOP if ends else None
        content = "".join(part for part in added if isinstance(part, str))
        found.append(ParsedDelta(content, [], (), finish, None, thoughts, added))
    return found


def events_of(parts: Sequence[str], **options: Any) -> list[BlockEvent]:
    reader = BlockReader(**options)
    return [event for output in outputs(parts) for event in reader.push(output)]


def shown(events: Sequence[BlockEvent]) -> Shown:
    return json.loads(orjson.dumps(joined(events, "msg_1")))  # type: ignore[no-any-return]


def streamed(events: Sequence[BlockEvent]) -> list[tuple[str, str, str]]:
    """Kind, name and joined text of each block, checked as a client checks the order of events."""
    blocks: list[tuple[str, str, str]] = []
    open_block: int | None = None
    for event in events:
        if isinstance(event, BlockBegins):
            assert open_block is None and event.index == len(blocks)
            open_block = event.index
            blocks.append((event.kind, event.name, ""))
        else:
            assert event.index == open_block and event.kind == blocks[-1][0]
            if isinstance(event, BlockGrows):
                assert event.text
                blocks[-1] = (event.kind, blocks[-1][1], blocks[-1][2] + event.text)
            open_block = None if isinstance(event, BlockEnds) else open_block
    assert open_block is None
    return blocks


def in_parts(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(ends)]


def test_thoughts_text_and_calls_are_blocks_in_their_order() -> None:
    text = f"<think>\nHm.\n</think>\n\nFirst.\n{CALL}\nThen.{CALL}"
    for parts in ([text], list(text)):
        found = shown(events_of(parts))
        assert [block["type"] for block in found] == ["thinking", "text", "tool_use", "text", "tool_use"]
        assert (found[0]["thinking"], found[1]["text"], found[3]["text"]) == ("Hm.", "First.", "\nThen.")
        assert found[2]["name"] == "add" and found[2]["input"] == found[4]["input"] == {"a": [1, "é"]}
        assert found[2]["id"] != found[4]["id"] and found[0]["signature"]


@pytest.mark.parametrize("text", ["", "Hi", "<think>\n\n</think>\n\n", f"{CALL}"])
def test_no_block_of_text_is_empty(text: str) -> None:
    assert all(block.get("text", block.get("thinking", "-")) for block in shown(events_of([text])))


def test_an_answer_that_is_not_parsed_is_one_block() -> None:
    reader = BlockReader()
    parts = [ChoiceDelta(text, [], (), None) for text in ("", "Hel", "", "lo")]
    events = [
        event for output in [*parts, ChoiceDelta(".", [], (), FinishReason.LENGTH)] for event in reader.push(output)
    ]
    assert streamed(events) == [("text", "", "Hello.")]
    assert shown(events) == [{"type": "text", "text": "Hello."}]


def test_an_input_comes_when_it_is_whole_or_as_it_is_written_where_it_is_sure() -> None:
    def grown(**options: Any) -> list[str]:
        return [event.text for event in events_of(list(CALL), **options) if isinstance(event, BlockGrows)]

    assert grown() == ['{"a": [1, "é"]}']
    assert len(grown(sure=True)) > 5 and "".join(grown(sure=True)) == '{"a": [1, "é"]}'
    assert grown(eager=frozenset({"add"})) == grown(sure=True)
    assert grown(eager=frozenset({"other"})) == grown()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ("{'a': 1}", {"INVALID_JSON": "{'a': 1}"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": "\\ud83d"}', {"INVALID_JSON": '{"a": "\\ud83d"}'}),
        ('{"a": 1, "b": "rm -rf /tmp', {"a": 1}),
        ('{"a": [1, {"b": 123456789012345678901234567890, "c', {"a": [1, {"b": 123456789012345678901234567890}]}),
        ("{'a", {"INVALID_JSON": "{'a"}),
    ],
)
def test_an_input_is_an_object_whatever_the_model_wrote(arguments: str, expected: dict[str, Any]) -> None:
    whole = "" if arguments[-1] != "}" else "}</tool_call>"
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}{whole}'
    for parts in ([text], list(text)):
        events = events_of(parts)
        (block,) = shown(events)
        assert block["input"] == expected
        ((_, _, sent),) = streamed(events)
        assert sent == arguments if "INVALID_JSON" not in expected else json.loads(sent) == expected


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, CALL[:40], CALL[40:], " ", "\n", "text", "é", "{"]


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    sure=st.booleans(),
)
def test_blocks_are_the_same_however_the_answer_was_cut(pieces: list[str], cuts: list[int], sure: bool) -> None:
    text = "".join(pieces)
    whole = events_of([text], sure=sure)
    for parts in (in_parts(text, cuts), list(text)):
        events = events_of(parts, sure=sure)
        assert streamed(events) == streamed(whole)
        assert shown(events) == shown(whole)
    for block, (kind, name, sent) in zip(shown(whole), streamed(whole), strict=True):
        assert block["type"] == kind
        assert name == block.get("name", "")
        if kind != "tool_use":
            assert block[kind] == sent


@pytest.mark.parametrize("text", ["a", CALL, "<tool_call>", '{"a":'])
def test_reading_takes_linear_time(text: str) -> None:
    def seconds(count: int) -> float:
        made = outputs([text] * count)
        reader, began = BlockReader(), time.process_time()
        joined([event for output in made for event in reader.push(output)], "msg_1")
        return time.process_time() - began

    seconds(100)
    short = min(seconds(1_000) for _ in range(3))
    assert min(seconds(8_000) for _ in range(2)) < 8 * 4 * short + 0.01


@pytest.mark.parametrize("text", ['{"a": 1e999}', '{"a": -1e999, "b": [1E400]}', '{"a": ' + "9" * 400 + "}"])
def test_numbers_beyond_ours_are_written_as_they_came(text: str) -> None:
    """`Infinity` is no JSON: a strict reader would refuse the whole answer."""
    assert orjson.dumps(read_input(text)) == text.encode()


@pytest.mark.parametrize("text", ['{"a": Infinity}', '{"a": NaN}', '{"a": 1e999, "b', '{"a": Infinity, "b'])
def test_no_answer_holds_what_is_no_json(text: str) -> None:
    read = read_input(text)
    written = no_json(text).encode() if read is None else orjson.dumps(read)
    assert isinstance(json.loads(written, parse_constant=pytest.fail), dict)
