"""A mixed engine whose steps take what a cost model says, on a clock of its own: chunks by slack against fixed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from prefill.chunking import Chunking, FixedChunks, SlackChunks
from prefill.ordering import SlackOrder
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import Engine
from serving.engine.plan import Work
from serving.engine.run import LayerDone, RunResult
from serving.engine.sequence import SequenceState
from serving.messages import Slo
from serving.sampling.sampler import Sampled, SamplingFailed
from serving.step_cost import GAP, StepCost, StepLoad
from tests.fakes.clock import ManualClock
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import ScriptedRunner, make_decoding, make_kv, next_token, step_limits, written_out

COST = StepCost(fixed=0.01, token=0.001, sequence=0.0005, context=1e-6, error=0.05, samples=100)


class TimedRunner(ScriptedRunner):
    """Every step takes what the cost model says."""

    def __init__(self, clock: ManualClock):
        super().__init__(16)
        self.clock = clock

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        load = StepLoad()
        for item in work:
            load += StepLoad.of(item.seq.computed, item.count)
        self.clock.now += COST.seconds(load)
        return super().run(work, layer_done)

    def _advance(self, work: Work) -> list[Sampled | SamplingFailed]:
        """Whose KV lies where is not looked at: this is about time."""
        return [Sampled(next_token(work.seq.tokens))] if work.completes else []


@dataclass
class Story:
    """What came of a sequence: when each of its tokens was drawn."""

    seq: SequenceState
    arrived: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    @property
    def longest_pause(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


class Mixed:
    def __init__(self, chunks: Chunking, budget: int):
        self.clock = ManualClock()
        self.kv = make_kv(4000, 16, caching=False)
        self.decode = make_decoding(self.kv)
        order = SlackOrder(lambda: COST)
        self.prefill = PrefillScheduler(self.kv, then=self.decode.add, order=order, chunks=chunks)
        self.runner = TimedRunner(self.clock)
        limits = step_limits(self.kv, budget, 64, 4000)
        self.engine = Engine(self.runner, self.kv, [self.decode, self.prefill], limits, clock=self.clock)
        self.stories: dict[SequenceState, Story] = {}

    def add(self, tokens: int, *, outputs: int, tpot_ms: float | None, due: float | None = None) -> Story:
        seq = make_sequence(
            self.kv,
            [len(self.stories) % 3] * tokens,
            stays=True,
            max_tokens=outputs,
            slo=Slo(tpot_ms=tpot_ms),
            first_token_in=due,
            now=self.clock.now,
        )
        self.kv.open(seq)
        self.prefill.add(seq)
        self.stories[seq] = Story(seq, self.clock.now)
        return self.stories[seq]

    def step(self) -> None:
        for output in self.engine.step() or []:
            assert output.delta is not None
            story = self.stories[output.seq]
            story.times += [self.clock.now] * len(output.delta.tokens)
            story.tokens += output.delta.tokens

    def run(self, until: float) -> None:
        """Steps until this second, or until nothing is left to do."""
        while self.clock.now < until and (self.prefill.queue or self.decode.running):
            self.step()


def chats_beside_long_prompts(chunks: Chunking, budget: int, tpot_ms: float) -> tuple[list[Story], list[Story]]:
    """Four chats of a hundred tokens each, beside prompts of 700 that never end."""
    mixed = Mixed(chunks, budget)
    chats = [mixed.add(30, outputs=100, tpot_ms=tpot_ms, due=1.0) for _ in range(4)]
    while len(mixed.decode.running) < 4:
        mixed.step()
    prompts = []
    while mixed.decode.running and not all(story.seq.ended for story in chats):
        if not mixed.prefill.queue:
            prompts.append(mixed.add(700, outputs=2, tpot_ms=None, due=30.0))
        mixed.step()
    for story in chats:
        assert story.tokens == written_out(story.seq.request.prompt, 100), "chunks change no text"
    return chats, [story for story in prompts if story.times]


def slack() -> Chunking:
    return SlackChunks(lambda: COST)


@pytest.mark.parametrize("tpot_ms", [40.0, 60.0, 120.0])
def test_chunks_by_slack_keep_a_tpot_that_a_fixed_budget_breaks(tpot_ms: float) -> None:
    kept, prompts = chats_beside_long_prompts(slack(), 512, tpot_ms)
    assert all(story.tpot <= tpot_ms / 1e3 for story in kept) and len(prompts) >= 2
    assert all(story.longest_pause <= GAP * tpot_ms / 1e3 for story in kept)
    broken, _ = chats_beside_long_prompts(FixedChunks(), 512, tpot_ms)
    assert all(story.tpot > tpot_ms / 1e3 for story in broken)


def test_chunks_by_slack_use_what_a_fixed_budget_leaves() -> None:
    """A fixed budget that keeps the tightest TPOT is the smaller for all others."""
    tight, _ = chats_beside_long_prompts(FixedChunks(), 32, 60.0)
    assert all(story.tpot <= 0.06 for story in tight)
    _, lean = chats_beside_long_prompts(FixedChunks(), 32, 250.0)
    loose, rich = chats_beside_long_prompts(slack(), 512, 250.0)
    assert all(story.tpot <= 0.25 for story in loose)
    per_second = [len(prompts) / (prompts[-1].times[0] - prompts[0].arrived) for prompts in (lean, rich)]
    assert per_second[1] > 1.2 * per_second[0]


def test_without_objectives_both_take_the_same_steps() -> None:
    steps = []
    for chunks in (FixedChunks(), slack()):
        mixed = Mixed(chunks, 256)
        for number in range(12):
            mixed.add(30 + 97 * number % 600, outputs=5 + number, tpot_ms=None)
            mixed.step()
        mixed.run(1e9)
        steps.append(mixed.runner.counts)
    assert steps[0] == steps[1]


def test_urgent_prompts_pass_long_ones_and_these_end_as_well() -> None:
    mixed = Mixed(slack(), 256)
    long = mixed.add(2500, outputs=2, tpot_ms=None, due=20.0)
    mixed.step()
    urgent = [mixed.add(50, outputs=2, tpot_ms=None, due=0.8) for _ in range(3)]
    mixed.run(1e9)
    assert all(story.times[0] - story.arrived <= 0.8 for story in urgent)
    assert long.times[0] - long.arrived <= 20.0
