"""Thoughts are split from answers the same however the text is cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.reasoning import MOST_LEAD, ReasoningForm, ReasoningSplitter, reasoning_form

FORM = ReasoningForm(name="qwen3")


def split(parts: Sequence[str], *, begun: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(FORM, begun=begun)
    found = [*map(splitter.push, parts), splitter.finish()]
    return "".join(thought for thought, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "answer"),
    [
        ("<think>\nI wonder. \n</think>\n\nYes. ", False, "I wonder.", "Yes. "),
        ("\n<think>a\n\nb</think>Yes", False, "a\n\nb", "Yes"),
        ("I wonder.\n</think>\n\nYes.", True, "I wonder.", "Yes."),
        ("\n\n</think>\n\nYes.", True, "", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("I wonder </thin", True, "I wonder </thin", ""),
        ("<think>\nI wonder.</think>Yes.", True, "I wonder.", "Yes."),  # though the prompt has the mark
        ("<think></think>Yes.", True, "", "Yes."),
        ("<thin", True, "<thin", ""),
        ("a <think>b</think>c", True, "a <think>b", "c"),
        ("<think>I wonder \n", False, "I wonder", ""),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        (" <thin", False, "", " <thin"),
        (" Yes.\n", False, "", " Yes.\n"),
        ("", True, "", ""),
        (" " * (MOST_LEAD + 1) + "<think>a</think>b", False, "", " " * (MOST_LEAD + 1) + "<think>a</think>b"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_thoughts_and_answers(text: str, begun: bool, thoughts: str, answer: str) -> None:
    for cut in range(len(text) + 1):
        assert split([text[:cut], text[cut:]], begun=begun) == (thoughts, answer)
    assert split(list(text), begun=begun) == (thoughts, answer)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "é", "<"]), max_size=12
    ),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    begun=st.booleans(),
)
def test_cuts_change_nothing(pieces: list[str], cuts: list[int], begun: bool) -> None:
    text = "".join(pieces)
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(ends)]
    assert split(parts, begun=begun) == split(list(text), begun=begun) == split([text], begun=begun)


@pytest.mark.parametrize("unit", [" ", "<think>", "</think", "a "])
def test_splitting_takes_linear_time(unit: str) -> None:
    def seconds(count: int) -> float:
        began = time.process_time()
        split([unit] * count, begun=True)
        split([unit] * count, begun=False)
        return time.process_time() - began

    short = min(seconds(2_000) for _ in range(3))
    assert min(seconds(16_000) for _ in range(2)) < 8 * 4 * short + 0.01


def test_the_form_is_the_templates() -> None:
    assert reasoning_form("auto", "{{ '</think>' }}") == FORM
    assert reasoning_form("auto", "{{ messages }}") is None
    assert reasoning_form("none", "{{ '</think>' }}") is None
    deepseek = reasoning_form("deepseek_r1", "")
    assert deepseek is not None
    for prompt, qwen, always in (
        ("a<think>\n", True, True),
        ("a", False, True),
        ("<think>\n\n</think>\n\n", False, False),
    ):
        assert (FORM.begun(prompt), deepseek.begun(prompt)) == (qwen, always)
