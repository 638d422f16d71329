"""What is read of a router's answers, and what lies between two of them."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from deploy.autoscaler.observation import MetricsMissing, merged, observed, read_sample
from router.offered import OfferedWork
from tests.deploy.autoscaler.figures import COST, offered

WORKER: dict[str, Any] = {
    "name": "p",
    "role": "prefill",
    "state": "live",
    "heard_seconds": 0.1,
    "running": 0,
    "leases": 0,
    "max_seqs": 8,
    "queued_tokens": 40,
    "kv_usage": 0.5,
    "steps_seconds": 100.0,
    "measured": {"cost": asdict(COST), "kv_tokens": 1000, "max_num_batched_tokens": 256},
}


def answer(at: float, work: OfferedWork, tokens: int = 0, **worker: Any) -> dict[str, Any]:
    return {
        "at": at,
        "tokens": tokens,
        "requests_waiting": 2,
        "waiting_tokens": 90,
        "classes": {"standard": {"work": asdict(work)}},
        "workers": [{**WORKER, **worker}],
    }


def test_an_interval_has_what_came_between_two_answers() -> None:
    before = read_sample(answer(50.0, offered(10)))
    now = read_sample(answer(60.0, offered(25), tokens=300, steps_seconds=107.5))
    seen = observed(before, now, at=1000.0)
    assert (seen.at, seen.seconds, seen.tokens, seen.waiting, seen.waiting_tokens) == (1000.0, 10.0, 300, 2, 90)
    assert seen.work == {"standard": offered(15)} and seen.offered == offered(15)
    assert seen.workers[0].busy == 0.75 and seen.workers[0].cost == COST


def test_a_worker_that_came_or_began_anew_has_no_busy_share() -> None:
    before = read_sample(answer(50.0, offered(10)))
    for changed in ({"name": "q"}, {"steps_seconds": 1.0}, {"role": "decode"}):
        now = read_sample(answer(60.0, offered(10), **changed))
        assert observed(before, now, at=1.0).workers[0].busy is None


@pytest.mark.parametrize(
    ("at", "work", "tokens", "why"),
    [
        (50.0, offered(30), 500, "has not gone on"),
        (60.0, offered(30), 499, "begun anew"),
        (60.0, offered(30, answered=19), 500, "begun anew"),
    ],
)
def test_answers_of_two_lives_have_nothing_between_them(at: float, work: OfferedWork, tokens: int, why: str) -> None:
    before = read_sample(answer(50.0, offered(20), tokens=500))
    with pytest.raises(MetricsMissing, match=why):
        observed(before, read_sample(answer(at, work, tokens)), at=1.0)


@pytest.mark.parametrize("lacking", ["at", "waiting_tokens", "classes", "workers"])
def test_an_answer_that_lacks_something_is_refused(lacking: str) -> None:
    told = answer(1.0, offered(1))
    del told[lacking]
    with pytest.raises(MetricsMissing, match=lacking):
        read_sample(told)


@pytest.mark.parametrize("broken", [None, [], "text", {"at": "soon"}])
def test_what_is_no_answer_is_refused(broken: Any) -> None:
    with pytest.raises(MetricsMissing):
        read_sample(broken)


def test_a_worker_without_a_step_has_no_cost() -> None:
    assert read_sample(answer(1.0, offered(1), measured=None)).workers[0].cost is None


def test_merged_intervals_add_up_and_end_with_the_last() -> None:
    samples = [read_sample(answer(10.0 * n, offered(n * n), tokens=7 * n)) for n in range(4)]
    parts = [observed(before, now, now.at) for before, now in pairwise(samples)]
    whole = merged(parts)
    assert (whole.at, whole.seconds, whole.tokens, whole.offered.arrived) == (30.0, 30.0, 21, 9)
