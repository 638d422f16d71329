"""A scripted runner whose device is as late as can be: a launched step computes when its tokens are asked for.

Everything that happens between the two, to blocks above all, has happened before the step reads and writes its KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvcache.blocks.manager import KVCacheManager
from serving.engine.overlap import Launched, OverlapEngine, OverlapRunner
from serving.engine.plan import Scheduler, Work
from serving.engine.run import RunResult, RunTimes
from serving.engine.sequence import SequenceState
from serving.sampling.sampler import Sampled, SamplingFailed
from tests.prefill.scripted import ScriptedRunner, next_token, step_limits


@dataclass
class Row:
    """What a launch gives the device of one sequence: nothing of it is looked up again later."""

    seq: SequenceState
    tokens: list[int]  # known at the launch
    blocks: list[int]
    start: int  # position that is computed
    source: int | None  # row of the step before that draws the token at this position
    drawn: int = -1


class LateStep(Launched):
    def __init__(self, runner: LateRunner, number: int, work: Sequence[Work], rows: list[Row], before: LateStep | None):
        self.runner = runner
        self.number = number
        self.work = work
        self.rows = rows
        self.before = before
        self.computed = False

    def collect(self) -> RunResult:
        runner = self.runner
        runner.during(self.work)
        runner.events.append(("collect", self.number))
        self.compute()
        drawn: list[list[Sampled | SamplingFailed]] = [
            [Sampled(row.drawn) if row.drawn >= 0 else SamplingFailed("no token can be drawn")] for row in self.rows
        ]
        return RunResult(drawn, {}, RunTimes(0.0, 0.0, 0.0))

    def compute(self) -> None:
        assert not self.computed, "a step's tokens are asked for once"
        self.computed = True
        for row in self.rows:
            known = row.tokens[: row.start]
            if row.source is None:
                known.append(row.tokens[row.start])
            else:
                assert self.before is not None and self.before.computed, "steps are computed in order"
                known.append(max(0, self.before.rows[row.source].drawn))
            self.runner.attend(row.seq.prefix.root, row.blocks, known, row.start)
            row.drawn = -1 if row.seq.request.request_id in self.runner.broken else next_token(known)


class LateRunner(ScriptedRunner, OverlapRunner):
    """Sequences in `opaque` are not overlappable; `events` are the launches and collections by number, in order."""

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self.opaque: set[str] = set()
        self.events: list[tuple[str, int]] = []
        self.numbers = count()

    def can_overlap(self, seq: SequenceState) -> bool:
        return seq.request.request_id not in self.opaque

    def launch(self, work: Sequence[Work], after: Launched | None) -> Launched:
        assert after is None or isinstance(after, LateStep)
        self.counts.append([item.count for item in work])
        number = next(self.numbers)
        self.events.append(("launch", number))
        before = {} if after is None else {id(row.seq): place for place, row in enumerate(after.rows)}
        rows = []
        for item in work:
            seq, source = item.seq, before.get(id(item.seq))
            start = seq.computed + (source is not None)
            assert start == len(seq.tokens) - (source is None), "one token, the first without KV"
            rows.append(Row(seq, list(seq.tokens), list(seq.blocks), start, source))
        step = LateStep(self, number, work, rows, after)
        self.during(work)
        return step

    def attend(self, root: bytes, blocks: Sequence[int], known: Sequence[int], start: int) -> None:
        """Write the KV of known[start:], and see that all up to it is the sequence's own."""
        for position in range(len(known)):
            slot = blocks[position // self.block_size] * self.block_size + position % self.block_size
            content = (root, tuple(known[: position + 1]))
            if position >= start:
                self.kv[slot] = content
            assert self.kv.get(slot) == content, "a sequence would attend to KV that is not its own"


def make_ahead_engine(
    kv: KVCacheManager,
    schedulers: Sequence[Scheduler],
    *,
    tokens: int = 8,
    seqs: int = 4,
    max_model_len: int | None = None,
) -> tuple[OverlapEngine, LateRunner]:
    """As tests.prefill.scripted.make_engine."""
    runner = LateRunner(kv.block_size)
    limits = step_limits(kv, tokens, seqs, max_model_len)
    engine = OverlapEngine(runner, kv, schedulers, limits, clock=lambda: 0.0)
    return engine, runner
