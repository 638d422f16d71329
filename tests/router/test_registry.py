"""The registry: who is there, who is believed, who is forgotten; and the policy's order over what it says."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.policy import Candidate
from router.registry import Registry
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


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


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


def test_what_this_router_sent_is_kept_across_heartbeats() -> None:
    registry = Registry()
    registry.heartbeat(make_status("a"), 0.0)
    worker = registry.get("a-life")
    assert worker is not None
    worker.leases, worker.prefill_tokens = 3, 40
    registry.heartbeat(make_status("a", running=2), 1.0)
    assert registry.candidates() == [Candidate(make_status("a", running=2), 3, 40)]
