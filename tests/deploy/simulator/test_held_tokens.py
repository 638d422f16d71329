"""Tokens held back on the simulated wire: nothing is lost or changes its turn, and no outcome is another for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.drafts import DraftModel
from deploy.simulator.held_tokens import HeldDelta, HeldTokens
from deploy.simulator.network import NetworkModel
from deploy.simulator.run import simulate
from deploy.simulator.traffic import TRAFFIC, Lengths, Traffic, TrafficClass, trace
from serving.errors import Preempted
from serving.links import LeaseEvent
from serving.messages import Delta, FinishReason, Role
from tests.deploy.simulator.test_run import PLACEMENTS, PROFILE, SMALL, run, told, written_out

GROWS = Traffic(name="grows", classes=(TrafficClass(prompt=Lengths(30), output=Lengths(120)),))


class Wire:
    """HeldTokens on a clock that is set by hand; `come` has what was delivered, and when."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.now = 0.0
        self.come: list[tuple[float, LeaseEvent]] = []
        self.due: list[tuple[float, Sequence[LeaseEvent]]] = []
        self.held = HeldTokens(self.deliver, seconds, lambda: self.now, self.later)

    def later(self, seconds: float, deliver: object, events: Sequence[LeaseEvent]) -> None:
        self.due.append((self.now + seconds, events))

    def deliver(self, events: Sequence[LeaseEvent]) -> None:
        self.come += [(self.now, event) for event in events]

    def pass_to(self, now: float) -> None:
        for at, events in [each for each in self.due if each[0] <= now]:
            self.now = at
            self.deliver(events)
        self.due = [each for each in self.due if each[0] > now]
        self.now = now

    def send(self, *events: LeaseEvent) -> None:
        self.held.send(events)


def token(index: int, lease: str = "a", *, last: bool = False, epoch: int = 0) -> LeaseEvent:
    finish = FinishReason.STOP if last else None
    return LeaseEvent(lease, epoch, Delta(index=index, tokens=(100 + index,), finish=finish))


STEPS = st.lists(st.lists(st.sampled_from("abc"), unique=True, max_size=3), max_size=25)


@given(STEPS, st.sampled_from([0.05, 0.1]), st.sets(st.integers(0, 25)))
def test_no_token_is_lost_to_whoever_counts_them(steps: list[list[str]], seconds: float, counted: set[int]) -> None:
    """Those that are on their way then come later; what has come is not told twice."""
    wire, sent = Wire(seconds), Counter[str](chain(*steps))
    indices = {lease: count() for lease in "abc"}
    for number, step in enumerate(steps):
        wire.pass_to(number)
        made = [(lease, next(indices[lease])) for lease in step]
        wire.send(*(token(index, lease, last=index == sent[lease] - 1) for lease, index in made))
        if number in counted:
            wire.pass_to(number + 0.07)
            wire.held.flush()
    wire.pass_to(len(steps) + 1)
    for lease, tokens in sent.items():
        come = [event.delta for _, event in wire.come if event.lease == lease and event.delta is not None]
        assert [token for delta in come for token in delta.tokens] == [100 + index for index in range(tokens)]
        assert sum(delta.steps for delta in come) == tokens


@given(STEPS, st.sampled_from([0.0, 0.1]))
def test_every_token_comes_once_in_its_order_the_first_and_the_last_in_time(
    steps: list[list[str]], seconds: float
) -> None:
    wire, sent = Wire(seconds), defaultdict[str, list[tuple[float, LeaseEvent]]](list)
    left = {lease: sum(lease in step for step in steps) for lease in "abc"}
    for number, step in enumerate(steps):
        wire.pass_to(number)
        events = []
        for lease in step:
            left[lease] -= 1
            events.append(token(len(sent[lease]), lease, last=not left[lease]))
            sent[lease].append((number + seconds, events[-1]))
        wire.send(*events)
    wire.pass_to(len(steps) + 1)
    for lease, mine in sent.items():
        come = [(at, event.delta) for at, event in wire.come if event.lease == lease and event.delta is not None]
        assert [token for _, delta in come for token in delta.tokens] == [100 + index for index in range(len(mine))]
        assert sum(delta.steps for _, delta in come) == len(mine) and len(come) <= 3
        assert [delta.index for _, delta in come] == sorted({delta.index for _, delta in come})
        assert (come[0][0], come[-1][0]) == (mine[0][0], mine[-1][0])
        assert come[-1][1].finish is FinishReason.STOP


def test_before_an_error_all_tokens_come_and_the_last_says_when_it_was_there() -> None:
    wire = Wire()
    for index in range(4):
        wire.pass_to(index)
        wire.send(token(index))
    wire.pass_to(7.0)
    wire.send(LeaseEvent("a", 0, error=Preempted("no blocks")))
    wire.pass_to(8.0)
    first, held, failed = (event for _, event in wire.come)
    assert first.delta is not None and first.delta.tokens == (100,) and failed.error is not None
    assert isinstance(held.delta, HeldDelta) and held.delta.tokens == (101, 102, 103)
    assert (held.delta.steps, held.delta.came_at) == (3, pytest.approx(3.1))


def test_what_has_come_is_seen_before_a_worker_is_given_up() -> None:
    wire = Wire()
    for index in range(4):
        wire.pass_to(index)
        wire.send(token(index))
    wire.pass_to(3.05)  # the last is on its way
    wire.held.flush()
    wire.held.flush()
    assert [event.delta.tokens for _, event in wire.come if event.delta is not None] == [(100,), (101, 102)]


def test_nothing_is_kept_of_a_lease_that_was_left() -> None:
    wire = Wire(0.0)
    wire.send(token(0), token(0, "b"))
    wire.send(token(1), token(1, "b"))
    wire.held.forget("a")
    wire.send(token(2, "b", last=True))
    assert not wire.held._held
    assert [event.lease for _, event in wire.come] == ["a", "b", "b", "b"]


@pytest.mark.parametrize("case", ["handed over", "preempted", "given up", "drafted"])
def test_no_outcome_is_another_for_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case run twice: with tokens held back by worker and wire, and with every token in a message of its own."""
    engine = ClusterPlan.of(PROFILE, (), "least_loaded").engine
    little = dataclasses.replace(engine, num_kv_blocks=30)
    router = dataclasses.replace(ClusterPlan.of(PROFILE, (), "least_loaded").router, patience=0.3, max_failures=2)
    asked: dict[str, tuple[tuple[Role, ...], dict[str, object]]] = {
        "handed over": (PLACEMENTS["both"], {"policy": "goodput", "traffic": TRAFFIC["shared-prefix"]}),
        "preempted": ((Role.MIXED,), {"traffic": GROWS, "requests": 10, "rate": 60.0, "engine": little}),
        "given up": (
            PLACEMENTS["both"],
            {"traffic": GROWS, "requests": 20, "rate": 60.0, "engine": little, "router": router},
        ),
        "drafted": (
            PLACEMENTS["mixed"],
            {
                "policy": "goodput",
                "drafts": DraftModel(right=0.6),
                "engine": dataclasses.replace(engine, num_speculative_tokens=4),
            },
        ),
    }
    roles, fields = asked[case]
    held, _ = run(roles, **fields)  # type: ignore[arg-type]
    sent: list[int] = []

    def each_alone(self: HeldTokens, events: Sequence[LeaseEvent]) -> None:
        sent.append(len(events))
        self.later(self.seconds, self.deliver, events)

    monkeypatch.setattr(HeldTokens, "send", each_alone)
    monkeypatch.setattr("deploy.simulator.cluster.AT_THE_END", 1)
    alone, _ = run(roles, **fields)  # type: ignore[arg-type]
    assert sent
    assert told(held) == told(alone)
    assert [outcome.tokens for outcome in held.outcomes] == [outcome.tokens for outcome in alone.outcomes]
    if case == "preempted":
        assert any(len(outcome.placed) > 2 for outcome in held.outcomes), "nothing was placed again"
    if case == "given up":
        assert any(outcome.error is not None and outcome.tokens for outcome in held.outcomes), "none failed half-way"


def test_watching_a_run_loses_none_of_its_tokens() -> None:
    """As the simulated autoscaler watches: on the wire there are tokens at any time."""

    async def watch(cluster: SimulatedCluster) -> None:
        while True:
            await asyncio.sleep(0.013)
            await cluster.catch_up()

    arrivals = trace(SMALL, PROFILE, 20, 1)
    plan = ClusterPlan.of(PROFILE, PLACEMENTS["both"], "least_loaded", network=NetworkModel(message_seconds=0.01))
    done = simulate(plan, arrivals, 10.0, watch=watch)
    assert [outcome.tokens for outcome in done.outcomes] == written_out(arrivals)
