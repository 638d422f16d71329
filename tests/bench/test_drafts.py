"""What drafts bring, without servers: prompts are what they are called, and a table tells of texts that differ."""

from __future__ import annotations

from typing import Any

import pytest

from bench.drafts import COPY, KINDS, PASSAGE, QUESTIONS, Cell, ComparedServer, cells, length, prompts, ratio, table


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_kind_are_all_different(kind: str) -> None:
    made = prompts(kind)
    assert len(set(made)) == len(QUESTIONS)
    assert made == prompts(kind), "the same in every run"


def test_code_is_quoted_from_the_beginning_of_a_line() -> None:
    for prompt in prompts("code"):
        assert prompt.endswith(COPY) and len(prompt) == PASSAGE + len(COPY) + 2


def asked_server(name: str, tpot: float, texts: str) -> ComparedServer:
    nobody: Any = None
    server = ComparedServer(name, nobody)
    for cell in cells(("chat", "code"), (1, 8)):
        server.tpots[cell], server.texts[cell] = [tpot, 9.0, 0.0], list(texts)
    return server


def test_a_ratio_is_of_the_time_without_drafts() -> None:
    without, drafting = asked_server("without", 0.010, "abc"), asked_server("with", 0.004, "abc")
    assert ratio(Cell(1, 0.0, "chat"), without, drafting) == pytest.approx(0.4)
    shown = table(cells(("chat", "code"), (1, 8)), without, drafting)
    assert shown.count("10.00 -> 4.00: 0.40") == 8 and shown.count("6 of 6 the same") == 4


def test_the_table_tells_of_texts_that_differ() -> None:
    shown = table(cells(("chat",), (1,)), asked_server("without", 0.01, "abc"), asked_server("with", 0.01, "abd"))
    assert shown.count("2 of 3 the same") == 2


def test_at_full_concurrency_there_are_more_requests_than_go_on_at_once() -> None:
    assert [Cell(count, 0.0, "chat").requests() for count in (1, 8, 32)] == [12, 36, 80]


def test_answers_are_of_all_lengths_around_the_mean() -> None:
    found = [length(number, 80) for number in range(200)]
    assert min(found) < 44 and max(found) > 116 and abs(sum(found) / len(found) - 80) < 2
