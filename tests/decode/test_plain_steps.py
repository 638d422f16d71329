"""A step that drafts nothing is planned and accounted for at once: as one sequence after the other would be."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import DecodeScheduler
from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadPlan
from serving.engine.engine import Engine
from serving.engine.plan import StepPlan, Work
from serving.engine.run import LayerDone, RunResult, RunTimes
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.errors import NoRoom
from serving.grammar.grammars import GrammarState
from serving.messages import Slo, TokenLogprob
from serving.sampling.sampler import Sampled, SamplingFailed
from tests.decode.test_scheduler import handed_over
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import EOS, make_kv, step_limits

BLOCK = 2


class OneByOne(DecodeScheduler):
    """Plans each sequence for itself, as where blocks run out."""

    def _grown(self, rows: Sequence[SequenceState], plan: StepPlan) -> list[SequenceState] | None:
        return None


class AppendingAll(Engine):
    """Takes what was drawn as it takes what was drafted and drawn."""

    def _append_one(self, work: Work, sample: Sampled | SamplingFailed) -> SequenceOutput:
        work.seq.computed += 1
        return self._append(work, [sample])


@dataclass(frozen=True)
class Row:
    """What one sequence is like."""

    tokens: int
    priority: int = 0
    paced: bool = False
    compiling: bool = False
    max_tokens: int = 6


ROWS = st.builds(
    Row,
    tokens=st.integers(1, 30),
    priority=st.integers(-1, 1),
    paced=st.booleans(),
    compiling=st.booleans(),
    max_tokens=st.integers(1, 6),
)
DRAWN = st.sampled_from([0, 1, 2, 3, EOS, None])  # None: no token can be drawn


@dataclass
class Drawing:
    """A runner that draws these, one after the other, and some with their probability."""

    tokens: Sequence[int | None]
    drawn: list[int] = field(default_factory=list)

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        for item in work:
            if item.seq.offload is not None:
                item.seq.offload.settle()
        return RunResult([self._draw(item) for item in work], {}, RunTimes(0.0, 0.0, 0.0))

    def _draw(self, work: Work) -> list[Sampled | SamplingFailed]:
        if not work.completes:
            return []
        token = self.tokens[len(self.drawn) % len(self.tokens)]
        self.drawn.append(len(self.drawn))
        if token is None:
            return [SamplingFailed("no token can be drawn")]
        return [Sampled(token, TokenLogprob(-float(token)) if len(self.drawn) % 2 else None)]


class Side:
    """The batch of one of the two schedulers, with KV of its own."""

    def __init__(self, scheduler: type[DecodeScheduler], rows: Sequence[Row], blocks: int, host: OffloadPlan | None):
        self.kv: KVCacheManager = make_kv(blocks, BLOCK, host=host)
        self.scheduler = scheduler(self.kv, max_model_len=50)
        self.rows: list[SequenceState] = []
        for number, row in enumerate(rows):
            slo = Slo(tpot_ms=100.0) if row.paced else Slo()
            fields: dict[str, Any] = {"priority": row.priority, "max_tokens": row.max_tokens, "slo": slo}
            seq = make_sequence(self.kv, [number] * row.tokens, request_id=str(number), stays=True, **fields)
            try:
                handed_over(self.kv, None, seq)
            except NoRoom:
                continue
            if seq.offload is not None:
                seq.offload.arrive()
            if row.compiling:
                seq.grammar = GrammarState(Future())
            self.rows.append(seq)
            self.scheduler.add(seq)

    def told(self) -> list[object]:
        """All that a sequence is, and the KV."""
        kept = [
            (seq.request.request_id, seq.tokens, seq.computed, seq.blocks, seq.prefix.published, seq.ended)
            for seq in self.rows
        ]
        running = [seq.request.request_id for seq in self.scheduler.running]
        return [kept, running, self.kv.allocator.available, self.scheduler.preemptions]


def of(plan: StepPlan) -> list[object]:
    work = [(item.seq.request.request_id, item.count, item.draft, item.barrier) for item in plan.work]
    return [work, plan.tokens, plan.seqs, [seq.request.request_id for seq in plan.preempted]]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=7),
    blocks=st.integers(4, 60),
    on_host=st.booleans(),
    budgets=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=8),
)
def test_a_batch_is_planned_as_each_of_it_would_be(
    rows: list[Row], blocks: int, on_host: bool, budgets: list[tuple[int, int]]
) -> None:
    """Order, budgets, blocks taken, who gives way: step after step, each sequence one token longer."""
    host = None
    if on_host:
        host = OffloadPlan(block_size=BLOCK, device_blocks=blocks, extent_blocks=2, extents=12, segment_extents=2)
    at_once, one_by_one = (Side(each, rows, blocks, host) for each in (DecodeScheduler, OneByOne))
    for now, (tokens, seqs) in enumerate(budgets):
        plans = [StepPlan(tokens, seqs), StepPlan(tokens, seqs)]
        for side, plan in zip((at_once, one_by_one), plans, strict=True):
            side.scheduler.fill(plan, float(now))
            for item in plan.work:
                if item.seq.offload is not None:
                    item.seq.offload.settle()
                item.seq.computed += 1
                item.seq.tokens.append(now)
        assert of(plans[0]) == of(plans[1])
        assert at_once.told() == one_by_one.told()


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=5),
    drawn=st.lists(DRAWN, min_size=1, max_size=9),
    steps=st.integers(1, 6),
)
def test_one_token_is_taken_as_any_number_are(rows: list[Row], drawn: list[int | None], steps: int) -> None:
    """What comes out, what the sequence holds then, which blocks others may share."""
    found = []
    for kind in (Engine, AppendingAll):
        side = Side(DecodeScheduler, rows, 60, None)
        limits = step_limits(side.kv, 8, 4, None)
        engine = kind(Drawing(drawn), side.kv, [side.scheduler], limits, clock=lambda: 0.0)
        outputs = [engine.step() for _ in range(steps)]
        came = [
            [(out.seq.request.request_id, out.delta, str(out.error), out.prefilled) for out in each or []]
            for each in outputs
        ]
        found.append([came, side.told(), [seq.prefix.keys for seq in side.rows]])
    assert found[0] == found[1]
