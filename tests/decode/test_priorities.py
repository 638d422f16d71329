"""Who goes first and who gives way in the running batch, by priority and objectives; and somebody always advances."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.manager import KVCacheManager
from serving.engine.engine import Engine
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom, Preempted
from serving.messages import Slo
from tests.decode.test_scheduler import handed_over
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import ScriptedRunner, make_decoding, make_engine, make_kv, written_out

PACED = Slo(tpot_ms=100.0)


def test_the_most_important_go_first_and_of_these_the_oldest() -> None:
    kv = make_kv(20, 4)
    scheduler = make_decoding(kv)
    rows = [handed_over(kv, None, make_sequence(kv, [n], priority=priority)) for n, priority in enumerate((1, 0, 1, 0))]
    for seq in rows:
        scheduler.add(seq)
    plan = StepPlan(3, 9)
    scheduler.fill(plan, 0.0)
    assert [work.seq for work in plan.work] == [rows[1], rows[3], rows[0]]


class Full:
    """A batch that needs a block more for each sequence, of which there is none left."""

    def __init__(self, *rows: dict[str, Any], needy: int):
        self.kv: KVCacheManager = make_kv(sum(fields.get("blocks", 2) for fields in rows), 2, caching=False)
        self.scheduler = make_decoding(self.kv)
        self.rows = []
        for number, stated in enumerate(rows):
            fields = dict(stated)
            tokens, late = 2 * fields.pop("blocks", 2) - 1, fields.pop("late", False)
            seq = handed_over(self.kv, None, make_sequence(self.kv, [number] * tokens, max_tokens=50, **fields))
            self.rows.append(seq)
            self.scheduler.add(seq)
            self.scheduler.fill(StepPlan(0, 9), -9.0 if late else 0.0)
        for place, seq in enumerate(self.rows):
            assert self.kv.allocator.available == 0
            if place == needy:
                seq.tokens.append(0)
                seq.computed += 1

    def preempted(self) -> list[int]:
        plan = StepPlan(9, 9)
        self.scheduler.fill(plan, 0.0)
        planned = [work.seq for work in plan.work]
        assert not set(map(id, planned)) & set(map(id, plan.preempted)) and plan.seqs == 9 - len(planned)
        assert plan.tokens == 9 - len(planned) and all(seq.blocks for seq in planned)
        return [self.rows.index(seq) for seq in plan.preempted]


def test_the_least_important_gives_way_though_it_is_older() -> None:
    assert Full({"priority": 2}, {"priority": 0}, {"priority": 1}, needy=1).preempted() == [0]


def test_it_gives_way_also_to_itself() -> None:
    assert Full({"priority": 2}, {"priority": 0}, {"priority": 1}, needy=0).preempted() == [0]


def test_the_least_important_gives_way_though_it_is_planned_already() -> None:
    """The youngest of equals needs a block after the older one was planned, which has the least to compute again."""
    rows = [{"slo": PACED, "blocks": 3}, {"slo": PACED, "blocks": 2}, {"slo": PACED, "blocks": 4}]
    assert Full(*rows, needy=2).preempted() == [1]


def test_of_equals_one_that_is_late_gives_way_first() -> None:
    rows = [{"slo": PACED, "blocks": 4}, {"slo": PACED, "blocks": 4, "late": True}, {"slo": PACED, "blocks": 2}]
    assert Full(*rows, needy=0).preempted() == [1]


def test_then_the_one_with_the_least_to_compute_again() -> None:
    rows = [{"slo": PACED, "blocks": 4}, {"slo": PACED, "blocks": 2}, {"slo": PACED, "blocks": 3}]
    assert Full(*rows, needy=0).preempted() == [1]


def test_one_that_states_no_objective_misses_none() -> None:
    assert Full({}, {"blocks": 5}, {"slo": PACED}, needy=2).preempted() == [1]


def test_the_oldest_of_the_most_important_gives_way_to_nobody() -> None:
    """Late, and with the least to compute again."""
    rows = [{"slo": PACED, "blocks": 2, "late": True}, {"slo": PACED, "blocks": 4}, {"slo": PACED, "blocks": 3}]
    assert Full(*rows, needy=2).preempted() == [2]


class Batch:
    """A decode worker under random load of several classes; what is preempted comes back with the tokens it has."""

    def __init__(self, seed: int, size: int, blocks: int, tokens: int, seqs: int, drafts: int):
        self.choice = random.Random(seed)
        self.kv = make_kv(blocks, size)
        self.scheduler = make_decoding(self.kv, drafts=drafts)
        self.engine: Engine
        self.runner: ScriptedRunner
        self.engine, self.runner = make_engine(self.kv, [self.scheduler], tokens=tokens, seqs=seqs)
        self.now = 0.0
        self.engine.clock = lambda: self.now
        self.longest = size * blocks
        self.outputs: dict[str, list[int]] = {}
        self.live: list[SequenceState] = []
        self.waiting = [self.new(number) for number in range(self.choice.randrange(2, 9))]
        self.prompts = {seq.request.request_id: seq for seq in self.waiting}

    def new(self, number: int) -> SequenceState:
        prompt = self.choice.choices((0, 1), k=self.choice.randrange(1, self.longest - 1))
        fields: dict[str, Any] = {"priority": self.choice.randrange(3)}
        if self.choice.random() < 0.7:
            fields |= {"slo": Slo(tpot_ms=self.choice.choice((0.5, 1500.0))), "first_token_in": self.choice.random()}
        self.outputs[str(number)] = []
        return self.made(prompt, str(number), self.choice.randrange(2, 20), **fields)

    def made(self, prompt: Any, name: str, wanted: int, **fields: Any) -> SequenceState:
        return make_sequence(
            self.kv, prompt, request_id=name, max_tokens=wanted, stays=True, generated=self.outputs[name], **fields
        )

    def admit(self) -> None:
        if not self.waiting or self.choice.random() < 0.5:
            return
        seq = self.waiting[0]
        try:
            self.kv.open(seq, headroom=len(self.live))
        except NoRoom:
            return
        self.waiting.pop(0)
        self.kv.release(seq)
        handed_over(self.kv, self.runner, seq)
        self.outputs[seq.request.request_id].append(seq.tokens[-1])
        if seq.finish_for(seq.tokens[-1], frozenset(), self.longest) is not None:
            self.engine.end(seq)
            return
        self.live.append(seq)
        self.scheduler.add(seq)

    def step(self) -> None:
        """The first of the batch advances, or was alone."""
        self.now += self.choice.random()
        running = list(self.scheduler.running)
        ranks = [(seq.objectives.priority, self.live.index(seq)) for seq in running]
        assert ranks == sorted(ranks), "by priority, then by age"
        outputs = self.engine.step() or []
        gone = [output.seq for output in outputs if output.error is not None]
        if running:
            assert any(output.seq is running[0] and output.delta is not None for output in outputs) or gone == running
        for output in outputs:
            seq, request = output.seq, output.seq.request
            if output.error is not None:
                assert isinstance(output.error, Preempted) and (seq is not running[0] or gone == running)
                staying = [other for other in self.scheduler.running[1:] if other not in gone]
                assert all(other.objectives.priority <= seq.objectives.priority for other in staying)
                self.live.remove(seq)
                fields: dict[str, Any] = {"priority": request.priority, "slo": request.slo}
                fresh = self.made(request.prompt, request.request_id, request.sampling.max_tokens, **fields)
                self.waiting.insert(self.choice.randrange(len(self.waiting) + 1), fresh)
                continue
            assert output.delta is not None
            self.outputs[request.request_id] += output.delta.tokens
            if output.delta.finish is not None:
                self.engine.end(seq)
                self.live.remove(seq)
        assert self.kv.unaccounted(self.live) == 0


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    blocks=st.integers(3, 9),
    tokens=st.integers(1, 5),
    seqs=st.integers(1, 5),
    drafts=st.integers(0, 4),
)
def test_whatever_the_classes_somebody_advances_and_all_end_with_their_own_tokens(
    seed: int, size: int, blocks: int, tokens: int, seqs: int, drafts: int
) -> None:
    batch = Batch(seed, size, blocks, tokens, seqs, drafts)
    for _ in range(3000):
        batch.admit()
        batch.step()
        if not batch.waiting and not batch.live:
            break
    assert not batch.waiting and not batch.live, "somebody waits for ever"
    for name, seq in batch.prompts.items():
        length = min(seq.request.sampling.max_tokens, batch.longest - seq.prompt_len)
        assert batch.outputs[name] == written_out(seq.request.prompt, length)
    assert batch.kv.allocator.held == 0
