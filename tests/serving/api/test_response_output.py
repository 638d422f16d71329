"""A streamed response says what the whole one says, however the answer was cut, each event when it is due."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.api.choice import choice_of
from serving.api.plan import ResponsePlan, ThinkingPlan, ToolPlan
from serving.api.responses import ResponseForm
from serving.messages import Delta, FinishReason
from serving.text.reasoning import ReasoningForm
from serving.text.tokenizer import Tokenizer
from serving.text.tools.forms import HERMES
from tests.serving.api.plans import PLAIN, deltas, plan_of

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm é 😀"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
PIECES = ["<think>", "</think>", CALL, OTHER, CALL[:40], "<tool_call>", " \n", "é 😀", "I ask. ", "No.", "{"]
THOUGHT = "<think>\nWarm? é\n</think>\n\n"


def response_plan(*, tools: bool, thinking: bool, logprobs: bool, many: bool = True) -> ResponsePlan:
    sampling = replace(PLAIN.sampling, logprobs=0 if logprobs else None)
    names = frozenset({"weather", "add"})
    return plan_of(
        replace(PLAIN, sampling=sampling),
        id="resp_1",
        tools=ToolPlan(form=HERMES, names=names, many=many, shown=frozenset()) if tools else None,
        thinking=ThinkingPlan(form=ReasoningForm(name="qwen3"), begun=False, special={}) if thinking else None,
    )


FORMS = {summary: ResponseForm({"metadata": b"{}"}, "auto" if summary else None) for summary in (False, True)}


def whole(tokenizer: Tokenizer, plan: ResponsePlan, parts: Sequence[Delta], summary: bool) -> dict[str, Any]:
    choice = choice_of(plan, plan.sequences[0], tokenizer)
    writer = FORMS[summary].whole(plan, [choice], tokenizer)
    for part in parts:
        asyncio.run(writer.add(choice, choice.push(part)))
    return json.loads(writer.body())


def streamed(tokenizer: Tokenizer, plan: ResponsePlan, parts: Sequence[Delta], summary: bool) -> list[dict[str, Any]]:
    choice = choice_of(plan, plan.sequences[0], tokenizer)
    writer = FORMS[summary].stream(plan, [choice], tokenizer)
    text = b"".join([*(writer.frames(choice, choice.push(part)) for part in parts), writer.end()]).decode()
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client makes it of the events that come before the last; each has to be due."""
    output: list[dict[str, Any]] = []
    ended: set[int] = set()
    for event in events[2:-1]:
        at, kind = event["output_index"], event["type"].removeprefix("response.")
        assert at not in ended
        if kind == "output_item.added":
            assert at == len(output) and event["item"]["status"] == "in_progress"
            output.append(event["item"])
            continue
        item = output[at]
        if kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            ended.add(at)
            continue
        assert event["item_id"] == item["id"]
        if kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        else:
            parts = item["summary"] if "summary_index" in event else item["content"]
            grow(parts, kind, event)
    assert ended == set(range(len(output)))
    return output


def grow(parts: list[dict[str, Any]], kind: str, event: dict[str, Any]) -> None:
    if kind in ("content_part.added", "reasoning_summary_part.added"):
        assert parts == []
        parts.append(event["part"])
    elif kind.endswith("part.done"):
        assert [event["part"]] == parts
    elif kind.endswith(".delta"):
        parts[0]["text"] += event["delta"]
        if "logprobs" in parts[0]:
            parts[0]["logprobs"] += event["logprobs"]
    else:
        assert kind in ("output_text.done", "reasoning_text.done", "reasoning_summary_text.done")
        assert event["text"] == parts[0]["text"]
        assert event.get("logprobs") == parts[0].get("logprobs")


def without_time(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "completed_at": None}


@settings(deadline=None, max_examples=200)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    thought=st.booleans(),
    cuts=st.lists(st.integers(1, 200), max_size=12),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    tools=st.booleans(),
    thinking=st.booleans(),
    logprobs=st.booleans(),
    summary=st.booleans(),
    many=st.booleans(),
)
def test_streamed_and_whole_are_one(
    tokenizer: Tokenizer,
    pieces: list[str],
    thought: bool,
    cuts: list[int],
    finish: FinishReason,
    tools: bool,
    thinking: bool,
    logprobs: bool,
    summary: bool,
    many: bool,
) -> None:
    text = THOUGHT * thought + "".join(pieces)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id or 0]
    plan = response_plan(tools=tools, thinking=thinking, logprobs=logprobs, many=many)
    told = whole(tokenizer, plan, deltas(tokens, [], finish), summary)
    in_parts = deltas(tokens, cuts, finish)
    assert without_time(whole(tokenizer, plan, in_parts, summary)) == without_time(told)
    events = streamed(tokenizer, plan, in_parts, summary)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    assert events[-1]["type"] == f"response.{told['status']}"
    assert without_time(events[-1]["response"]) == without_time(told)
    assert joined(events) == told["output"]


KINDS: list[tuple[str, FinishReason, list[tuple[str, str]]]] = [
    ("Hi", FinishReason.STOP, [("message", "completed")]),
    ("Hi", FinishReason.LENGTH, [("message", "incomplete")]),
    ("", FinishReason.STOP, [("message", "completed")]),
    (THOUGHT, FinishReason.LENGTH, [("reasoning", "incomplete")]),
    (THOUGHT + "Hi", FinishReason.LENGTH, [("reasoning", "completed"), ("message", "incomplete")]),
    (
        THOUGHT + "Hi" + CALL + OTHER,
        FinishReason.STOP,
        [("reasoning", "completed"), ("message", "completed"), *[("function_call", "completed")] * 2],
    ),
    (CALL, FinishReason.LENGTH, [("function_call", "completed")]),
    (CALL[:60], FinishReason.LENGTH, [("function_call", "incomplete")]),
    (CALL + "So. " + OTHER, FinishReason.STOP, [("function_call", "completed")] * 2 + [("message", "completed")]),
]


@pytest.mark.parametrize(("text", "finish", "items"), KINDS)
def test_items_and_how_they_end(
    tokenizer: Tokenizer, text: str, finish: FinishReason, items: list[tuple[str, str]]
) -> None:
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id or 0]
    plan = response_plan(tools=True, thinking=True, logprobs=False)
    for cuts in ([], range(len(tokens))):
        told = whole(tokenizer, plan, deltas(tokens, cuts, finish), summary=False)
        assert [(item["type"], item["status"]) for item in told["output"]] == items
        assert told["status"] == ("completed" if finish is FinishReason.STOP else "incomplete")
        assert (told["completed_at"] is None) == (told["status"] == "incomplete")
    ids = [item["id"] for item in told["output"]] + [item.get("call_id") for item in told["output"]]
    assert len({name for name in ids if name}) == len([name for name in ids if name])


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [(THOUGHT + "Yes.", THOUGHT.rstrip()), ("<think>a", "<think>a"), ("Yes. <think>", ""), ("", ""), ("<thin", "")],
)
def test_tokens_of_thoughts_are_counted(tokenizer: Tokenizer, text: str, thoughts: str) -> None:
    """Up to the token that the mark behind the thoughts ends in."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id or 0]
    plan = response_plan(tools=False, thinking=True, logprobs=False)
    counts = set()
    for cuts in ([], range(len(tokens)), [2, 5]):
        usage = whole(tokenizer, plan, deltas(tokens, cuts, FinishReason.STOP), summary=False)["usage"]
        counts.add(usage["output_tokens_details"]["reasoning_tokens"])
    (count,) = counts
    assert tokenizer.decode(tokens[:count]).startswith(thoughts)
    assert not thoughts or len(tokenizer.decode(tokens[: count - 1])) < len(thoughts)
    assert usage["output_tokens"] == len(tokens)
