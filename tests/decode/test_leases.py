"""The lease table against a model of what each lease may do next; whatever is refused must change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode.leases import Lease, LeaseState, LeaseTable
from serving.engine.sequence import SequenceState
from serving.errors import CorruptChunk, InvalidRequest, StaleLease
from serving.messages import LeaseId
from tests.fakes.sequences import lease_id, make_order, make_sequence

LEASES = st.sampled_from(["a", "b", "c"])
EPOCH = st.integers(0, 4)
INSTANCES = st.sampled_from(["now", "now", "now", "before"])


def make(tokens: int, computed: int) -> SequenceState:
    seq = make_sequence(None, range(tokens))
    seq.computed = min(computed, tokens - 1)
    return seq


@dataclass
class Expected:
    """What the model knows of a lease: `missing[layer]` are its tokens still to be handed over, in order."""

    epoch: int
    session: str
    seq: SequenceState
    missing: list[list[int]] = field(default_factory=list)
    running: bool = False
    begun: bool = False  # some KV was handed over, or some was left to the pool
    pooled: list[int] = field(default_factory=list)  # tokens still to come from the pool

    @property
    def whole(self) -> bool:
        return not any(self.missing) and not self.pooled


class LeaseMachine(RuleBasedStateMachine):
    @initialize(layers=st.integers(1, 3))
    def start(self, layers: int) -> None:
        self.table = LeaseTable("now", layers)
        self.layers = layers
        self.model: dict[str, Expected] = {}

    def expect(self, epoch: int, session: str, seq: SequenceState) -> Expected:
        return Expected(epoch, session, seq, [list(range(seq.computed, seq.start)) for _ in range(self.layers)])

    def known(self, fence: LeaseId) -> Expected | None:
        """The lease this fence should open."""
        entry = self.model.get(fence.lease)
        return entry if entry is not None and fence.instance == "now" and fence.epoch == entry.epoch else None

    @rule(name=LEASES, epoch=EPOCH, instance=INSTANCES, session=st.sampled_from("xy"), tokens=st.integers(1, 6))
    def open(self, name: str, epoch: int, instance: str, session: str, tokens: int) -> None:
        order = make_order([1], lease=lease_id(name, epoch, instance))
        seq = make(tokens, tokens // 2)
        if instance != "now":
            with pytest.raises(StaleLease):
                self.table.open(order, session, seq)
        elif name in self.model:
            with pytest.raises(InvalidRequest):
                self.table.open(order, session, seq)
        else:
            self.table.open(order, session, seq)
            self.model[name] = self.expect(epoch, session, seq)

    @rule(name=LEASES, epoch=EPOCH, instance=INSTANCES, data=st.data())
    def fill(self, name: str, epoch: int, instance: str, data: st.DataObject) -> None:
        fence = lease_id(name, epoch, instance)
        entry = self.known(fence)
        if entry is None:
            with pytest.raises(StaleLease):
                self.table.check(fence)
            return
        lease = self.table.check(fence)
        first = data.draw(st.integers(0, self.layers - 1))
        last = data.draw(st.integers(first + 1, self.layers))
        start = data.draw(st.integers(0, entry.seq.start))
        end = data.draw(st.integers(start + 1, entry.seq.start + 2))
        wanted = all(entry.missing[layer][: end - start] == list(range(start, end)) for layer in range(first, last))
        if entry.running:
            with pytest.raises(StaleLease):
                lease.accept(first, last, start, end)
        elif not wanted:
            with pytest.raises(CorruptChunk):
                lease.accept(first, last, start, end)
        else:
            lease.accept(first, last, start, end)
            with pytest.raises(CorruptChunk):
                lease.accept(first, last, start, end)
            lease.over(first, last)
            lease.fill(first, last, end)
            entry.begun = True
            for layer in range(first, last):
                del entry.missing[layer][: end - start]

    @rule(name=LEASES)
    def fill_all(self, name: str) -> None:
        entry = self.model.get(name)
        if entry is not None and not entry.running:
            entry.begun = True
            for layer, missing in enumerate(entry.missing):
                if missing:
                    lease = self.table.check(lease_id(name, entry.epoch, "now"))
                    lease.accept(layer, layer + 1, missing[0], missing[-1] + 1)
                    lease.over(layer, layer + 1)
                    lease.fill(layer, layer + 1, missing[-1] + 1)
                    missing.clear()

    @rule(name=LEASES, epoch=EPOCH, instance=INSTANCES)
    def commit(self, name: str, epoch: int, instance: str) -> None:
        fence = lease_id(name, epoch, instance)
        entry = self.known(fence)
        if entry is None or entry.running:
            with pytest.raises(StaleLease):
                self.table.commit(fence)
        elif not entry.whole:
            with pytest.raises(CorruptChunk):
                self.table.commit(fence)
        else:
            assert self.table.commit(fence).seq is entry.seq
            entry.running = True

    @precondition(lambda self: self.model)
    @rule(data=st.data(), early=st.sampled_from([0, 0, 0, 1]))
    def leave_to_pool(self, data: st.DataObject, early: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        entry, lease = self.model[name], self.table.leases[name]
        first = entry.seq.computed - early
        tokens = data.draw(st.integers(1, max(1, entry.seq.start - first)))
        fits = not early and not entry.begun and not entry.running and first + tokens < entry.seq.start
        assert lease.leave_to_pool(range(first, first + tokens)) == fits
        if fits:
            entry.begun = True
            entry.pooled = list(range(first, first + tokens))
            for missing in entry.missing:
                del missing[:tokens]

    @precondition(lambda self: any(entry.pooled for entry in self.model.values()))
    @rule(data=st.data())
    def settle_pool(self, data: st.DataObject) -> None:
        """The rest has been handed over, and some of what was left to the pool has come, or all."""
        name = data.draw(st.sampled_from(sorted(name for name, entry in self.model.items() if entry.pooled)))
        self.fill_all(name)
        entry = self.model[name]
        came = data.draw(st.integers(0, len(entry.pooled)))
        lacking = self.table.leases[name].settle_pool(entry.pooled[0] + came)
        assert list(lacking) == entry.pooled[came:]
        entry.missing = [list(lacking) for _ in range(self.layers)]
        entry.pooled = []

    @rule(name=LEASES, epoch=EPOCH, instance=INSTANCES)
    def adopt(self, name: str, epoch: int, instance: str) -> None:
        fence = lease_id(name, epoch, instance)
        entry = self.known(fence)
        if entry is None or entry.running:
            with pytest.raises(StaleLease):
                self.table.adopt(fence)
        else:
            assert self.table.adopt(fence).seq is entry.seq
            entry.running = True
            entry.pooled = []

    @rule(name=LEASES, epoch=EPOCH, instance=INSTANCES, tokens=st.integers(1, 6))
    def advance(self, name: str, epoch: int, instance: str, tokens: int) -> None:
        order = make_order([1], lease=lease_id(name, epoch, instance))
        seq = make(tokens, tokens // 3)
        entry = self.model.get(name)
        if entry is None or instance != "now" or epoch <= entry.epoch:
            with pytest.raises(StaleLease):
                self.table.advance(order, seq)
        else:
            self.table.advance(order, seq)
            self.model[name] = self.expect(epoch, entry.session, seq)

    @rule(name=LEASES)
    def end(self, name: str) -> None:
        gone = self.table.end(name)
        assert (gone is None) == (self.model.pop(name, None) is None)
        assert self.table.end(name) is None

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.table.leases.keys() == self.model.keys()
        for name, entry in self.model.items():
            lease = self.table.leases[name]
            assert lease.fence == lease_id(name, entry.epoch, "now")
            assert lease.seq is entry.seq and lease.session == entry.session
            assert (lease.state is LeaseState.RUNNING) == entry.running
            assert lease.complete == entry.whole
            assert list(lease.pooled) == entry.pooled
        for session in "xy":
            assert {lease.fence.lease for lease in self.table.of(session)} == {
                name for name, entry in self.model.items() if entry.session == session
            }


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def running_lease() -> tuple[LeaseTable, Lease, LeaseId]:
    table = LeaseTable("now", 1)
    fence = lease_id("a", 0, "now")
    lease = table.open(make_order([1], lease=fence), "x", make(1, 0))
    lease.accept(0, 1, 0, 1)
    lease.fill(0, 1, 1)
    table.commit(fence)
    return table, lease, fence


def test_a_finished_handoff_cannot_be_committed_twice() -> None:
    table, _, fence = running_lease()
    with pytest.raises(StaleLease) as refused:
        table.commit(fence)
    assert refused.value.code == "state"


def test_a_running_lease_cannot_be_adopted() -> None:
    """Its sequence would be queued for prefill while it decodes, or twice."""
    table, _, fence = running_lease()
    with pytest.raises(StaleLease):
        table.adopt(fence)


def test_a_lease_that_is_being_written_to_is_neither_adopted_nor_left_to_the_pool() -> None:
    """What computes its KV, or brings it, would write to the same blocks."""
    table, fence = LeaseTable("now", 1), lease_id("a", 0, "now")
    lease = table.open(make_order([1], lease=fence), "x", make(3, 0))
    lease.accept(0, 1, 0, 1)
    assert not lease.leave_to_pool(range(1))
    with pytest.raises(StaleLease) as refused:
        table.adopt(fence)
    assert refused.value.code == "state"
    lease.over(0, 1)  # the write has failed
    assert lease.leave_to_pool(range(1)) and table.adopt(fence) is lease


def test_why_a_fence_is_refused_is_said() -> None:
    table, _, fence = running_lease()
    wrong = {"instance": replace(fence, instance="before"), "lease": replace(fence, lease="b")}
    wrong["epoch"] = replace(fence, epoch=1)
    for code, other in wrong.items():
        with pytest.raises(StaleLease) as refused:
            table.check(other)
        assert refused.value.code == code
