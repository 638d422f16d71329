"""What the engine records of a step: its load as it was when the step began, and its cadence on the engine's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from prefill.scheduler import PrefillScheduler
from serving.engine.engine import Engine
from serving.engine.plan import StepPlan, StepRecord, StepTotals, Work
from serving.engine.run import RunResult, RunTimes
from serving.step_cost import StepLoad
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import ScriptedRunner, make_decoding, make_engine, make_kv
from tests.serving.engine.scripted_overlap import make_ahead_engine


class Recorded:
    """An engine of a mixed worker, a clock that its steps move, and what it has recorded."""

    def __init__(self, *, ahead: bool = False, drafts: int = 0):
        self.kv = make_kv(60, 4)
        self.decode = make_decoding(self.kv, drafts=drafts)
        self.records: list[StepRecord] = []
        self.prefill = PrefillScheduler(self.kv, self.decode.add, self.records.append)
        self.engine: Engine
        self.runner: ScriptedRunner
        make = make_ahead_engine if ahead else make_engine
        self.engine, self.runner = make(self.kv, [self.decode, self.prefill])
        self.now = 100.0
        self.engine.clock = lambda: self.now
        self.runner.during = lambda work: self.passes(1.0)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def add(self, length: int, max_tokens: int = 4) -> None:
        seq = make_sequence(self.kv, range(length), stays=True, max_tokens=max_tokens, request_id=f"r{length}")
        self.kv.open(seq)
        self.prefill.add(seq)

    def drain(self, between: Callable[[], None] = lambda: None) -> list[StepRecord]:
        while self.engine.step() is not None:
            between()
        return self.records


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def test_each_chunk_counts_the_context_it_reads_and_not_the_whole_prompt(recorded: Recorded) -> None:
    recorded.add(20)
    loads = [record.load for record in recorded.drain()]
    chunks = [StepLoad.of(0, 8), StepLoad.of(8, 8), StepLoad.of(16, 4)]
    assert loads == [*chunks, StepLoad.of(20, 1), StepLoad.of(21, 1), StepLoad.of(22, 1)]
    assert [record.prompt_tokens for record in recorded.records] == [8, 8, 4, 0, 0, 0]


def test_a_mixed_step_sums_its_sequences(recorded: Recorded) -> None:
    recorded.add(3, max_tokens=3)
    recorded.engine.step()
    recorded.add(20)
    recorded.engine.step()
    assert recorded.records[-1].load == StepLoad.of(3, 1) + StepLoad.of(0, 7)
    assert recorded.records[-1].prompt_tokens == 7


def test_drafted_tokens_count_as_new_and_not_as_prompt() -> None:
    recorded = Recorded(drafts=3)
    recorded.add(8, max_tokens=40)
    drafted = [record for record in recorded.drain() if record.new_tokens > 1 and not record.prompt_tokens]
    assert drafted and all(record.load.sequences == 1 for record in drafted)


def test_steps_that_overlap_have_the_loads_of_those_that_do_not(recorded: Recorded) -> None:
    ahead = Recorded(ahead=True)
    for one in (recorded, ahead):
        one.add(5, max_tokens=7)
        one.add(6, max_tokens=7)
        one.drain()
    assert [record.load for record in ahead.records] == [record.load for record in recorded.records]
    assert any(record.hidden_seconds == 0.0 for record in recorded.records)


@pytest.mark.parametrize("ahead", [False, True])
def test_cadence_is_from_end_to_end_while_the_engine_is_busy(ahead: bool) -> None:
    recorded = Recorded(ahead=ahead)
    recorded.add(20)
    recorded.drain(between=lambda: recorded.passes(0.25))
    first, *others = [record.cadence_seconds for record in recorded.records]
    assert first == pytest.approx(1.0)
    assert sum(others) == pytest.approx(recorded.now - 0.25 - 101.0), "every second of a busy engine is some step's"
    assert min(others) >= 1.0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_after_sleep_has_its_own_seconds(ahead: bool) -> None:
    recorded = Recorded(ahead=ahead)
    recorded.add(2)
    recorded.drain()
    recorded.passes(50.0)
    recorded.add(3)
    recorded.drain()
    assert max(record.cadence_seconds for record in recorded.records) <= 3.0
    assert all(record.cadence_seconds == pytest.approx(record.step_seconds) for record in recorded.records)


class Waiting:
    """A barrier at which a step has waited."""

    left = False
    waited_seconds = 3.0
    moved_at = 0.0


@pytest.mark.parametrize("left", [False, True])
def test_what_a_step_waited_for_kv_is_no_cost(recorded: Recorded, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = Waiting()
    barrier.left = left

    class Arriving(PrefillScheduler):
        def fill(self, plan: StepPlan, now: float) -> None:
            if self.queue:
                plan.add(self.queue[0], 8, self, barrier=barrier)  # type: ignore[arg-type]

    recorded.engine.schedulers = [Arriving(recorded.kv, None, recorded.records.append)]
    recorded.prefill = recorded.engine.schedulers[0]  # type: ignore[assignment]
    recorded.runner.run = run_for(recorded, 4.0)  # type: ignore[method-assign]
    seq = make_sequence(recorded.kv, range(20), stays=True)
    recorded.kv.open(seq)
    recorded.prefill.add(seq)
    measured: list[StepRecord] = []
    monkeypatch.setattr(StepTotals, "add", lambda self, record: measured.append(record))
    recorded.engine.step()
    (record,) = measured
    assert (record.step_seconds, record.waited_seconds) == (pytest.approx(4.0), 3.0)
    assert record.cadence_seconds == pytest.approx(1.0)
    assert record.load == (StepLoad() if left else StepLoad.of(0, 8))


def run_for(recorded: Recorded, seconds: float) -> Callable[[Sequence[Work], object], RunResult]:
    def run(work: Sequence[Work], layer_done: object) -> RunResult:
        recorded.passes(seconds)
        return RunResult([[] for _ in work], {}, RunTimes(0.0, seconds, 0.0))

    return run
