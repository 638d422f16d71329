"""Why requests missed: what the client saw and what the server explains, put together."""

from __future__ import annotations

from typing import Any

import pytest

from bench.misses import FAILED, PARTS, REFUSED, TPOT, UNEXPLAINED, TimeSpent, counted, time_spent
from bench.sse import Outcome
from bench.summary import SloTargets

SLO = SloTargets(ttft_ms=1000.0, tpot_ms=60.0)


def outcome(ttft: float = 0.5, tpot: float = 0.02, **fields: Any) -> Outcome:
    times = {"scheduled": 1.0, "sent": 1.1, "first": 1.1 + ttft, "last": 1.1 + ttft + 10 * tpot, "finished": 9.0}
    return Outcome(prompt_tokens=9, max_tokens=11, kind="quick", reported=11, **{**times, **fields})


def told(*attempts: dict[str, Any], queued: float = 0.1, ttft: float = 0.45) -> dict[str, Any]:
    refused = [{"worker": "mixed-0", "error": "NoRoom"}]
    one = {"queued_seconds": queued, "ttft_seconds": ttft, "passed_over": refused, "attempts": attempts}
    return {"sequences": [one]}


def attempt(queue: float, compute: float, ttft: float | None, **fields: Any) -> dict[str, Any]:
    where = {"prefill": "mixed-1", "decode": "mixed-1"}
    return {**where, "actual": {"queue": queue, "prefill": compute, "ttft": ttft}, **fields}


def test_the_parts_make_up_the_time_from_when_it_was_to_be_sent() -> None:
    spent = time_spent(outcome(), told(attempt(0.0, 0.0, None), attempt(0.05, 0.2, 0.27)), at=3.0)
    assert spent.parts == pytest.approx(
        {
            "send": 0.1,
            "client": 0.05,
            "queue": 0.1,
            "retries": 0.08,
            "link": 0.02,
            "prefill queue": 0.05,
            "prefill": 0.2,
        }
    )
    assert set(spent.parts) == set(PARTS) and sum(spent.parts.values()) == pytest.approx(0.6)
    assert (spent.at, spent.placement, spent.passed_over, spent.missed(SLO)) == (3.0, "mixed-1", 1, None)


def test_two_workers_are_named_both() -> None:
    assert time_spent(outcome(), told(attempt(0.1, 0.1, 0.2, prefill="p", decode="d")), 0.0).placement == "p → d"


@pytest.mark.parametrize(
    ("spent", "why"),
    [
        (time_spent(outcome(ttft=1.2, scheduled=-9.0), told(attempt(0.6, 0.4, 1.0), ttft=1.15), 0.0), "prefill queue"),
        (time_spent(outcome(ttft=1.2), told(attempt(0.1, 0.1, 0.2), queued=0.9, ttft=1.15), 0.0), "queue"),
        (time_spent(outcome(ttft=1.2), told(attempt(0.1, 0.1, 0.2), ttft=0.3), 0.0), "client"),
        (time_spent(outcome(ttft=1.2), None, 0.0), UNEXPLAINED),
        (time_spent(outcome(tpot=0.07), told(attempt(0.1, 0.1, 0.2)), 0.0), TPOT),
        (time_spent(outcome(error="HTTP 429", first=None, last=None), None, 0.0), REFUSED),
        (time_spent(outcome(error="connection lost"), None, 0.0), FAILED),
    ],
    ids=["in the worker", "in the router", "before the router", "unexplained", "slow tokens", "refused", "broken"],
)
def test_a_miss_is_put_down_to_the_largest_part_of_what_came_too_late(spent: TimeSpent, why: str) -> None:
    assert spent.missed(SLO) == why
    assert counted([spent, time_spent(outcome(), None, 0.0), spent], SLO) == {why: 2}
