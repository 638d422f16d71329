"""Breakers: a failure opens, a trial decides, pauses grow and are forgiven, and nothing shuts a worker out for good."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.breaker import Breaker, BreakerConfig, Breakers, BreakerState, Links
from router.candidate import Candidate
from router.trust import Trust
from serving.messages import Role
from tests.router.scripted import make_status

CONFIG = BreakerConfig(first_pause=1.0, longest_pause=8.0, jitter=0.25, forgive_after=60.0)


class BreakerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 100))
    def start(self, seed: int) -> None:
        self.breaker = Breaker(replace(CONFIG, seed=seed), "w")
        self.now = 100.0
        self.begun: list[float] = []  # when calls were begun since it last opened
        self.opened_at = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.9, 1.5, 5.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call(self) -> None:
        if self.breaker.allows(self.now):
            self.breaker.begin(self.now)
            self.begun.append(self.now)

    @rule()
    def fail(self) -> None:
        was_open = self.breaker.state is BreakerState.OPEN
        if self.breaker.failed(self.now):
            self.begun, self.opened_at = [], self.now
        assert self.breaker.state is BreakerState.OPEN
        assert was_open or not self.breaker.allows(self.now), "whoever has just failed is left alone"

    @rule()
    def succeed(self) -> None:
        trial = self.breaker.state is BreakerState.HALF_OPEN
        assert self.breaker.succeeded(self.now) == trial
        if trial:
            assert self.breaker.state is BreakerState.CLOSED

    @invariant()
    def a_trial_at_a_time(self) -> None:
        if self.breaker.state is not BreakerState.CLOSED:
            trials = self.begun
            assert all(later - earlier >= CONFIG.first_pause for earlier, later in pairwise(trials))

    @invariant()
    def never_shut_out_for_good(self) -> None:
        longest = CONFIG.longest_pause * (1 + CONFIG.jitter)
        assert self.breaker.allows(self.now + longest)
        if self.breaker.state is BreakerState.OPEN:
            assert self.breaker.retry_at - self.opened_at >= CONFIG.first_pause
        if self.breaker.state is BreakerState.CLOSED:
            assert self.breaker.allows(self.now)


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def pauses(breaker: Breaker, count: int) -> list[float]:
    """The pauses of trials that fail one after another."""
    now, found = 0.0, []
    for _ in range(count):
        breaker.begin(now)
        breaker.failed(now)
        found.append(breaker.retry_at - now)
        now = breaker.retry_at
    return found


def test_pauses_double_up_to_the_longest() -> None:
    plain = pauses(Breaker(replace(CONFIG, jitter=0.0), "w"), 6)
    assert plain == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


@given(seed=st.integers(0, 2**32), name=st.text(max_size=8))
def test_jitter_spreads_pauses_and_is_the_same_for_a_seed(seed: int, name: str) -> None:
    config = replace(CONFIG, seed=seed)
    found = pauses(Breaker(config, name), 5)
    assert found == pauses(Breaker(config, name), 5)
    for pause, plain in zip(found, [1.0, 2.0, 4.0, 8.0, 8.0], strict=True):
        assert plain <= pause <= plain * 1.25


def test_routers_of_other_seeds_do_not_come_back_together() -> None:
    firsts = {pauses(Breaker(replace(CONFIG, seed=seed), "w"), 1)[0] for seed in range(10)}
    assert len(firsts) == 10


def test_failures_of_calls_begun_before_count_once() -> None:
    breaker = Breaker(replace(CONFIG, jitter=0.0), "w")
    assert [breaker.failed(10.0) for _ in range(100)] == [True] + [False] * 99
    assert breaker.retry_at == 11.0


def test_a_late_success_does_not_close_what_has_just_opened() -> None:
    breaker = Breaker(CONFIG, "w")
    breaker.failed(10.0)
    assert not breaker.succeeded(10.1) and breaker.state is BreakerState.OPEN


def test_one_trial_at_a_time_and_another_when_it_has_no_end() -> None:
    breaker = Breaker(replace(CONFIG, jitter=0.0), "w")
    breaker.failed(10.0)
    assert not breaker.allows(10.9) and breaker.allows(11.0)
    breaker.begin(11.0)
    assert breaker.state is BreakerState.HALF_OPEN and not breaker.allows(11.5)
    assert breaker.allows(12.0), "the client of the first trial left"


def test_who_works_for_a_moment_between_failures_is_not_forgiven() -> None:
    breaker = Breaker(replace(CONFIG, jitter=0.0), "w")
    for now, pause in ((0.0, 1.0), (3.0, 2.0), (8.0, 4.0)):
        breaker.failed(now)
        assert breaker.retry_at == now + pause
        breaker.begin(breaker.retry_at)
        assert breaker.succeeded(breaker.retry_at)
    breaker.failed(200.0)
    assert breaker.retry_at == 201.0


def test_breakers_exist_only_for_what_failed_and_are_forgotten() -> None:
    breakers: Breakers[str] = Breakers(CONFIG)
    breakers.begin("a", 0.0)
    assert breakers.allows("a", 0.0) and not breakers.succeeded("a", 0.0) and len(breakers) == 0
    breakers.failed("a", 0.0)
    breakers.failed("b", 0.0)
    assert not breakers.allows("a", 0.0) and breakers.allows("c", 0.0) and breakers.retry_at("c") == 0.0
    breakers.retain(lambda key: key == "a", 1.0)
    assert len(breakers) == 1 and breakers.allows("b", 0.0)
    breakers.begin("a", 2.0)
    breakers.succeeded("a", 2.0)
    breakers.retain(lambda key: True, 100.0)
    assert len(breakers) == 0


def test_a_link_says_nothing_about_other_links_of_its_ends() -> None:
    links = Links(CONFIG)
    assert links.failed("p0", "d0", 5.0)
    assert not links.allows("p0", "d0", 5.0)
    assert links.allows("p1", "d0", 5.0) and links.allows("p0", "d1", 5.0)
    links.retain({"p0", "d1"}.__contains__, 5.0)
    assert links.allows("p0", "d0", 5.0), "forgotten with its worker"


def test_a_worker_always_reaches_itself() -> None:
    links = Links(CONFIG)
    assert not links.failed("m", "m", 5.0) and links.allows("m", "m", 5.0)


def test_who_is_reached_is_found_in_one_pass_over_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every prefill worker is left alone, the breakers of all are not asked for each decode worker."""
    asked: list[str] = []

    def allows(breakers: Breakers[str], key: str, now: float) -> bool:
        asked.append(key)
        return not key.startswith("p")

    monkeypatch.setattr(Breakers, "allows", allows)
    trust, count = Trust(BreakerConfig(), 10.0), 50
    trust.workers.failed("p0-life", 0.0)
    workers = [
        Candidate(make_status(f"{role.value[0]}{number}", role))
        for role in (Role.PREFILL, Role.DECODE)
        for number in range(count)
    ]
    able = [worker for worker in workers if worker.decodes]
    assert trust.decoders(able, workers, 1.0) == able and len(asked) == 2 * count
    assert trust.fed(able, workers, 1.0) == []
    monkeypatch.undo()
    trust.links.failed("p1-life", "d1-life", 0.0)
    assert trust.fed(able, workers[1:2], 0.1) == [each for each in able if each.instance != "d1-life"]
