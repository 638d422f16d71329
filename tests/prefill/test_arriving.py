"""Prompts whose prefix is still coming: they run when nobody else could, and a step that leaves has done nothing."""

from __future__ import annotations

from collections.abc import Sequence

from prefill.scheduler import PrefillScheduler
from serving.batch.layer_barrier import LayerBarrier
from serving.engine.plan import StepPlan, StepRecord, Work
from serving.engine.run import LayerDone, RunResult, RunTimes
from serving.engine.sequence import SequenceState
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import ScriptedRunner, make_engine, make_kv, next_token

LAYERS = 2
PROMPT = list(range(12))


class Arriving:
    """The first `tokens` of a sequence on their way (serving.engine.sequence.ArrivingKV)."""

    def __init__(self, seq: SequenceState, tokens: int):
        self.seq = seq
        self.tokens = tokens
        self.barrier = LayerBarrier()
        self.left = 0
        seq.incoming.arrival = self

    def enter(self) -> None:
        self.barrier.begin()
        self.seq.computed = self.tokens

    def leave(self) -> None:
        self.left += 1
        self.seq.computed = 0

    def all_comes(self, runner: ScriptedRunner) -> None:
        runner.write(self.seq.prefix.root, self.seq.tokens[: self.tokens], self.seq.blocks, 0)
        self.seq.incoming.arrival = None
        self.seq.computed = self.tokens
        self.barrier.open(LAYERS)


class WaitingRunner(ScriptedRunner):
    """Waits at the barrier for the last layer before it reads anything; `before` is called when it has come there."""

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        barrier = work[0].barrier
        if barrier is not None:
            self.during(work)
            if not barrier.passes(LAYERS - 1):
                return RunResult([[]], {}, RunTimes(0.0, 0.0, 0.0))
        return super().run(work, layer_done)


class World:
    def __init__(self) -> None:
        self.kv = make_kv(20, 4)
        self.measured: list[StepRecord] = []
        self.scheduler = PrefillScheduler(self.kv, measured=self.measured.append)
        self.engine, _ = make_engine(self.kv, [self.scheduler])
        self.runner = self.engine.runner = WaitingRunner(4, LAYERS)

    def add(self, prompt: Sequence[int]) -> SequenceState:
        seq = make_sequence(self.kv, prompt)
        self.scheduler.add(seq)
        return seq

    def add_arriving(self, tokens: int = 8) -> tuple[SequenceState, Arriving]:
        seq = make_sequence(self.kv, PROMPT)
        self.kv.open(seq)
        arriving = Arriving(seq, tokens)
        self.scheduler.add(seq)
        return seq, arriving

    def planned(self) -> list[tuple[SequenceState, int, bool]]:
        plan = StepPlan(8, 4)
        self.scheduler.fill(plan, 0.0)
        return [(work.seq, work.count, work.barrier is not None) for work in plan.work]


def test_it_runs_alone_and_only_when_nobody_else_could() -> None:
    world = World()
    seq, _ = world.add_arriving()
    another, _ = world.add_arriving()
    ordinary = world.add([1, 2, 3])
    assert world.planned() == [(ordinary, 3, False)]
    world.scheduler.remove(ordinary)
    assert world.planned() == [(seq, 4, True)]
    seq.incoming.arrival = None
    assert world.planned() == [(seq, 4, False)], "once all has come it is an ordinary one"
    assert another.computed == 0


def test_decoding_does_not_wait_for_it() -> None:
    world = World()
    world.add_arriving()
    plan = StepPlan(8, 4)
    plan.add(make_sequence(world.kv, [1]), 1, world.scheduler)
    world.scheduler.fill(plan, 0.0)
    assert len(plan.work) == 1


def test_a_step_that_passes_is_an_ordinary_one() -> None:
    world = World()
    seq, arriving = world.add_arriving()
    world.runner.during = lambda work: arriving.all_comes(world.runner)
    [output] = world.engine.step() or []
    assert output.delta is not None and output.delta.tokens == (next_token(PROMPT),)
    assert seq.computed == len(PROMPT) and seq.prefix.published == 3 and world.engine.totals.tokens == 4


def test_a_step_that_leaves_has_computed_nothing() -> None:
    world = World()
    seq, arriving = world.add_arriving()
    world.runner.during = lambda work: arriving.barrier.fail()
    assert world.engine.step() == []
    assert (seq.computed, seq.prefix.published, arriving.left, len(seq.tokens)) == (0, 0, 1, len(PROMPT))
    assert world.engine.totals.tokens == 0 and not world.measured and not seq.in_flight and world.engine.barrier is None
    seq.incoming.arrival = None
    world.runner.during = lambda work: None
    while not (outputs := world.engine.step()):
        pass
    assert outputs[0].delta is not None and outputs[0].delta.tokens == (next_token(PROMPT),)
    assert world.runner.counts == [[8], [4]]


def test_a_step_that_leaves_as_all_has_come_keeps_what_came() -> None:
    world = World()
    seq, arriving = world.add_arriving()

    def leave_then_arrive(work: Sequence[Work]) -> None:
        world.engine.hurry()
        assert not arriving.barrier.passes(LAYERS - 1)
        arriving.all_comes(world.runner)
        arriving.barrier.fail()

    world.runner.during = leave_then_arrive
    assert world.engine.step() == []
    assert seq.computed == 8 and arriving.left == 0


def test_new_work_makes_the_waiting_step_leave() -> None:
    world = World()
    seq, arriving = world.add_arriving()
    added = []

    def add(work: Sequence[Work]) -> None:
        added.append(world.add([1, 2, 3]))
        world.engine.hurry()

    world.runner.during = add
    assert world.engine.step() == [] and arriving.left == 1
    world.runner.during = lambda work: None
    [output] = world.engine.step() or []
    assert output.seq is added[0], "others do not wait for the pool"
    assert seq.incoming.arrival is arriving and world.planned()[0][0] is seq


def test_a_sequence_that_ends_while_its_step_waits_is_gone_with_the_step() -> None:
    world = World()
    seq, _ = world.add_arriving()
    world.runner.during = lambda work: world.engine.end(seq)
    assert world.engine.step() == []
    assert not seq.blocks and world.kv.allocator.held == 0 and world.scheduler.sequences() == []


def test_waiting_is_no_stall_while_layers_come() -> None:
    world = World()
    _, arriving = world.add_arriving()
    now = [0.0]
    world.engine.clock = arriving.barrier.clock = lambda: now[0]
    ages = []

    def layers_come(work: Sequence[Work]) -> None:
        now[0] += 5.0
        ages.append(world.engine.stalled_seconds)
        arriving.barrier.open(1)
        ages.append(world.engine.stalled_seconds)
        arriving.all_comes(world.runner)
        now[0] += 1.0
        ages.append(world.engine.stalled_seconds)

    arriving.barrier.moved_at = 0.0
    world.runner.during = layers_come
    world.engine.step()
    assert ages[:2] == [5.0, 0.0] and ages[2] == 1.0
