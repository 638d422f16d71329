"""The default policy against the others on multi-turn chats: the choice holds on a small version of the trace."""

from __future__ import annotations

import pytest

from bench.chats import ChatTraceOptions, Turn, chat_turns
from bench.eviction import footprint, hit_rate, main
from bench.lengths import sharegpt_pairs
from kvcache.pool.eviction import DEFAULT_POLICY, POLICIES

MARGIN = 0.005  # of the hit rate; what a small trace can tell apart


@pytest.fixture(scope="module")
def turns() -> list[Turn]:
    return chat_turns(sharegpt_pairs(512, 3), ChatTraceOptions(conversations=150, hours=0.5, systems=8), 3)


def test_the_trace_is_of_growing_chats_with_shared_beginnings(turns: list[Turn]) -> None:
    assert all(turn.context[: len(turn.prompt)] == turn.prompt for turn in turns)
    everything = hit_rate(turns, "lru", footprint(turns))
    assert 0.5 < everything < 0.99
    assert turns == chat_turns(sharegpt_pairs(512, 3), ChatTraceOptions(conversations=150, hours=0.5, systems=8), 3)


@pytest.mark.parametrize("share", [0.03, 0.1, 0.3])
def test_the_default_finds_at_least_as_much_as_any_other(turns: list[Turn], share: float) -> None:
    capacity = round(share * footprint(turns))
    rates = {policy: hit_rate(turns, policy, capacity) for policy in POLICIES}
    assert rates[DEFAULT_POLICY] >= max(rates.values()) - MARGIN
    assert rates[DEFAULT_POLICY] >= hit_rate(turns, DEFAULT_POLICY, capacity, last_first=False) - MARGIN


def test_the_command_prints_a_line_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--conversations", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["lru,", *POLICIES]
