"""The registry: who is there, who is believed, who is forgotten; and the policy's order over what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.candidate import NOTHING, Candidate, Dispatched
from router.registry import FLIGHT_SECONDS, Registry, Reservation
from tests.router.scripted import make_status

NAMES = st.sampled_from(["a", "b", "c"])
SILENCE = 5.0


class RegistryMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.registry = Registry(SILENCE)
        self.now = 0.0
        self.seen: dict[str, float] = {}
        self.suspected: set[str] = set()
        self.draining: dict[str, bool] = {}
        self.given: list[tuple[Sequence[Candidate], list[Candidate]]] = []  # by candidates(), and what was in it then

    @rule(name=NAMES, draining=st.booleans())
    def report(self, name: str, draining: bool) -> None:
        instance = f"{name}-life"
        news = instance not in self.seen or instance in self.suspected or self.draining[instance] != draining
        assert self.registry.heartbeat(make_status(name, draining=draining), self.now) == news
        self.seen[instance] = self.now
        self.suspected.discard(instance)
        self.draining[instance] = draining

    @rule(name=NAMES)
    def break_a_call(self, name: str) -> None:
        self.registry.suspect(f"{name}-life")
        if f"{name}-life" in self.seen:
            self.suspected.add(f"{name}-life")

    @rule(seconds=st.sampled_from([0.5, 4.9, 5.1, 16.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        silent = {name for name, at in self.seen.items() if self.now - at > SILENCE}
        assert set(self.registry.expire(self.now)) == silent - self.suspected, "each falls silent once"
        self.suspected |= silent
        for name in [name for name, at in self.seen.items() if self.now - at > 3 * SILENCE]:
            del self.seen[name]
            self.suspected.discard(name)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.registry.workers.keys() == self.seen.keys()
        believed = {candidate.status.instance for candidate in self.registry.candidates()}
        assert believed == self.seen.keys() - self.suspected

    @rule(name=NAMES, slow=st.booleans(), work=st.integers(-2, 2))
    def change(self, name: str, slow: bool, work: int) -> None:
        self.registry.mark_slow(f"{name}-life", slow)
        Reservation(self.registry.get(f"{name}-life"), Dispatched(leases=work), lambda: self.now)

    @rule(name=NAMES)
    def say_that_it_leaves(self, name: str) -> None:
        self.registry.leaves(f"{name}-life")
        if f"{name}-life" in self.seen:
            self.draining[f"{name}-life"] = True

    @invariant()
    def candidates_are_as_they_are_now(self) -> None:
        """In the order of the registry, and a list that was given never changes."""
        listed = self.registry.candidates()
        entries = [entry for entry in self.registry.workers.values() if not entry.suspect]
        assert list(listed) == [entry.candidate for entry in entries]
        for candidate, entry in zip(listed, entries, strict=True):
            assert (candidate.leases, candidate.slow) == (entry.leases, entry.slow)
            assert candidate.status is entry.status and candidate.made_at == entry.made_at
        assert [list(each) for each, _ in self.given] == [then for _, then in self.given]
        self.given = [*self.given[-3:], (listed, list(listed))]


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_what_a_last_life_has_sent_late_does_not_take_the_place_of_the_new_one() -> None:
    """As where a worker flips: its last heartbeat and the first of its next life may be under way together."""
    registry = Registry(SILENCE)
    last, new = (replace(make_status("a"), instance=instance) for instance in ("last", "new"))
    registry.heartbeat(last, 0.0)
    assert registry.heartbeat(new, 1.0)
    assert not registry.heartbeat(last, 1.1)
    assert list(registry.workers) == ["new"]


def test_a_new_life_takes_the_place_of_the_last() -> None:
    registry = Registry()
    registry.heartbeat(make_status("a"), 0.0)
    registry.heartbeat(make_status("a", instance="next"), 1.0)
    assert list(registry.workers) == ["next"]


def test_workers_that_share_a_name_or_an_address_are_two() -> None:
    registry = Registry()
    registry.heartbeat(make_status("a"), 0.0)
    registry.heartbeat(make_status("a", instance="2", address="elsewhere:1"), 0.0)
    registry.heartbeat(make_status("b", instance="3", address="local:a"), 0.0)
    assert len(registry.workers) == 3


def test_what_was_sent_counts_until_a_status_that_was_made_after_it() -> None:
    registry = Registry()
    registry.heartbeat(make_status("a"), 0.0)
    worker = registry.get("a-life")
    assert worker is not None
    worker.sent(Dispatched(leases=1, context_tokens=40, prompt_tokens=40, prompt_seconds=0.5), now=1.0)
    registry.heartbeat(make_status("a"), 1.2, made_at=0.9)
    assert worker.candidate.queued_tokens == 40 and worker.candidate.held_leases == 1
    registry.heartbeat(make_status("a", waiting_tokens=30, leases=1), 1.6, made_at=1.5)
    assert worker.candidate.queued_tokens == 30 and worker.candidate.held_leases == 1
    worker.sent(-Dispatched(prompt_tokens=40, prompt_seconds=0.5), now=1.7)
    assert worker.candidate.queued_tokens == 0, "more has ended than is left"
    worker.sent(-Dispatched(leases=1, context_tokens=40), now=1.8)
    assert worker.leases == 0 and worker.candidate.held_leases == 0


@given(st.lists(st.tuples(st.sampled_from(["send", "end", "beat"]), st.floats(0.0, 0.5)), max_size=40))
def test_a_worker_that_reports_what_it_has_is_never_counted_twice_nor_forgotten(steps: list[tuple[str, float]]) -> None:
    """The router's number lies within what was in flight while the status was made."""
    registry, now, open_now, sent_at = Registry(1e9), 0.0, 0, [-1.0]
    registry.heartbeat(make_status("a"), now)
    worker = registry.get("a-life")
    assert worker is not None
    for what, wait in steps:
        now += wait
        if what == "send":
            worker.sent(Dispatched(leases=1), now)
            open_now, sent_at = open_now + 1, [*sent_at, now]
        elif what == "end" and open_now:
            worker.sent(Dispatched(leases=-1), now)
            open_now, sent_at = open_now - 1, [*sent_at, now]
        elif what == "beat":
            registry.heartbeat(make_status("a", leases=open_now), now, made_at=now)
        assert worker.leases == open_now
        recent = sum(now - at <= 2 * FLIGHT_SECONDS for at in sent_at) if what == "beat" else 0
        assert open_now <= worker.candidate.held_leases <= open_now + max(recent, len(sent_at) - 1)
    registry.heartbeat(make_status("a", leases=open_now), now + 1.0)
    assert worker.candidate.held_leases == open_now and worker.newer == NOTHING


def test_a_prompt_that_is_not_sent_leaves_the_queue_of_others_as_it_was() -> None:
    registry, now = Registry(5.0), [100.0]
    registry.heartbeat(make_status("a", waiting_seconds=10.0), now[0])
    worker = registry.get("a-life")

    def prompt() -> Reservation:
        return Reservation(worker, Dispatched(prompt_tokens=100, prompt_seconds=1.0), lambda: now[0])

    assert worker is not None
    prompt().release()
    assert worker.candidate.prompts_left_at == pytest.approx(110.0)
    refused, kept = prompt(), prompt()
    refused.release()
    assert worker.candidate.prompts_left_at == kept.until == pytest.approx(111.0)


def test_what_one_prompt_was_late_by_counts_once() -> None:
    registry, now = Registry(5.0), [100.0]
    registry.heartbeat(make_status("a"), now[0])
    worker = registry.get("a-life")
    prompts = [Reservation(worker, Dispatched(prompt_seconds=1.0), lambda: now[0]) for _ in range(4)]
    assert worker is not None and worker.busy_until == 104.0
    now[0] = 102.0  # the first took two seconds
    prompts[0].release(computed=True)
    assert worker.busy_until == 105.0
    now[0] = 103.0  # the second one, as predicted
    prompts[1].release(computed=True)
    assert worker.busy_until == 105.0


def test_prompts_that_share_steps_take_as_long_as_the_worker_says() -> None:
    """Until their first tokens come, however old its heartbeat is; others that were sent since count whole."""
    registry, now = Registry(5.0), [100.0]
    registry.heartbeat(make_status("a"), now[0])
    worker = registry.get("a-life")
    assert worker is not None
    sent = [Reservation(worker, Dispatched(prompt_seconds=0.027), lambda: now[0], (0, inf)) for _ in range(50)]
    waits = lambda: sum(prompt.seconds * prompt.share for prompt in worker.candidate.queued)  # noqa: E731
    assert waits() == pytest.approx(1.35)
    now[0] = 100.5
    registry.heartbeat(make_status("a", waiting_seconds=0.315), now[0])
    assert waits() == pytest.approx(0.315)
    now[0] = 101.4
    assert waits() == pytest.approx(0.315)
    Reservation(worker, Dispatched(prompt_seconds=1.0), lambda: now[0], (0, inf))
    for prompt in sent[:25]:
        prompt.release(computed=True)
    assert waits() == pytest.approx(1.0 + 0.315 / 2)
    registry.heartbeat(make_status("a", waiting_seconds=0.315), now[0], made_at=100.6)
    assert waits() == pytest.approx(1.0 + 0.315 / 2), "first tokens that came since it was made"
    registry.heartbeat(make_status("a", waiting_seconds=9.0), now[0])
    assert waits() == pytest.approx(1.0 + 25 * 0.027), "others have sent the rest"


def test_a_time_that_cannot_be_right_counts_as_now() -> None:
    for made_at in (-1e9, 1e9, float("nan")):
        registry = Registry(5.0)
        registry.heartbeat(make_status("a"), 100.0, made_at=made_at)
        assert registry.candidates()[0].made_at == 100.0
