"""The registry: who is there, who is believed, who is forgotten; and the policy's order over what it says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.policy import Candidate, LeastLoaded
from router.registry import Registry
from serving.messages import Role
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


ROLE = st.sampled_from(list(Role))
WORKERS = st.lists(
    st.builds(
        lambda n, role, running, free, draining, model, paired, leases, tokens, waiting: Candidate(
            make_status(
                n,
                role,
                running=running,
                free_blocks=free,
                draining=draining,
                fingerprint=model,
                pairing=paired,
                waiting_tokens=waiting,
            ),
            leases,
            tokens,
        ),
        st.sampled_from("abcdefgh"),
        ROLE,
        st.integers(0, 8),
        st.integers(0, 100),
        st.booleans(),
        st.sampled_from(["model", "another"]),
        st.sampled_from(["model", "another"]),
        st.integers(0, 8),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.status.name,
)


@settings(max_examples=200, deadline=None)
@given(WORKERS, st.sampled_from([None, "model"]))
def test_decode_goes_to_able_workers_by_load(workers: list[Candidate], fingerprint: str | None) -> None:
    order = LeastLoaded().decode_order(1, workers, fingerprint)
    able = [
        worker
        for worker in workers
        if worker.status.role is not Role.PREFILL
        and not worker.status.draining
        and fingerprint in (None, worker.status.fingerprint)
    ]
    assert sorted(order, key=id) == sorted(able, key=id)
    loads = [max(max(w.leases, w.status.running) / 8, 1 - w.status.free_blocks / 100) for w in order]
    assert loads == sorted(loads)


@settings(max_examples=200, deadline=None)
@given(WORKERS, st.sampled_from([None, "model"]), st.sets(st.sampled_from([f"{n}-life" for n in "abcd"])))
def test_prefill_goes_to_able_workers_by_queue(workers: list[Candidate], pairing: str | None, avoid: set[str]) -> None:
    order = LeastLoaded().prefill_order(1, workers, pairing, avoid)
    able = [
        worker
        for worker in workers
        if worker.status.role is not Role.DECODE
        and not worker.status.draining
        and pairing in (None, worker.status.pairing)
        and worker.status.instance not in avoid
    ]
    assert sorted(order, key=id) == sorted(able, key=id)
    queues = [max(worker.prefill_tokens, worker.status.waiting_tokens) for worker in order]
    assert queues == sorted(queues)


def test_equal_workers_are_told_apart_by_name() -> None:
    workers = [Candidate(make_status(name)) for name in "cab"]
    order = LeastLoaded().decode_order(1, workers, None)
    assert [worker.status.name for worker in order] == ["a", "b", "c"]


SIZES = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 20)), min_size=1, max_size=6)  # context, device blocks


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, tokens=st.integers(1, 400), decodes=st.booleans())
def test_a_long_request_goes_where_it_fits_and_first_where_the_device_holds_it(
    sizes: list[tuple[int, int]], tokens: int, decodes: bool
) -> None:
    workers = [
        Candidate(make_status(f"w{n}", max_model_len=limit, block_size=16, total_blocks=blocks, free_blocks=blocks))
        for n, (limit, blocks) in enumerate(sizes)
    ]
    policy = LeastLoaded()
    order = policy.decode_order(tokens, workers, None) if decodes else policy.prefill_order(tokens, workers, None, ())
    able = [worker for worker in workers if tokens < worker.status.max_model_len]
    assert sorted(worker.status.name for worker in order) == [worker.status.name for worker in able or workers]
    on_device = [tokens < worker.status.total_blocks * 16 for worker in order]
    assert on_device == sorted(on_device, reverse=True)
