"""The decode scheduler: one token for each sequence, oldest first; without blocks the youngest give way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.manager import KVCacheManager
from serving.engine.engine import Engine
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom, Preempted
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import ScriptedRunner, make_decoding, make_engine, make_kv, next_token, written_out


def handed_over(kv: KVCacheManager, runner: ScriptedRunner | None, seq: SequenceState) -> SequenceState:
    """What a decode worker does with a lease: its KV arrives, its first token is known."""
    kv.open(seq)
    if runner is not None:
        runner.write(seq.prefix.root, seq.tokens, seq.blocks, seq.computed)
    seq.computed = len(seq.tokens)
    kv.publish(seq)
    seq.tokens.append(next_token(seq.tokens))
    return seq


def test_every_sequence_advances_by_one_token_oldest_first() -> None:
    kv = make_kv(20, 4)
    scheduler = make_decoding(kv)
    sequences = [handed_over(kv, None, make_sequence(kv, [n] * (n + 1))) for n in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    plan = StepPlan(9, 9)
    scheduler.fill(plan, 0.0)
    assert [(work.seq, work.count) for work in plan.work] == [(seq, 1) for seq in sequences]


def test_budgets_go_to_the_oldest() -> None:
    kv = make_kv(20, 4)
    scheduler = make_decoding(kv)
    sequences = [handed_over(kv, None, make_sequence(kv, [n])) for n in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    for tokens, seqs in ((2, 9), (9, 2)):
        plan = StepPlan(tokens, seqs)
        scheduler.fill(plan, 0.0)
        assert [work.seq for work in plan.work] == sequences[:2]


def test_without_blocks_the_youngest_give_way() -> None:
    kv = make_kv(6, 2)
    scheduler = make_decoding(kv)
    old, middle, young = (handed_over(kv, None, make_sequence(kv, [n] * 3)) for n in range(3))
    for seq in (old, middle, young):
        scheduler.add(seq)
        seq.tokens += [0]  # the next step's KV needs a block more
        seq.computed += 1
    plan = StepPlan(9, 9)
    scheduler.fill(plan, 0.0)
    assert [work.seq for work in plan.work] == [old, middle]
    assert plan.preempted == [young] and scheduler.preemptions == 1
    assert young.blocks == [] and kv.unaccounted([old, middle]) == 0


def test_who_is_alone_gives_way_to_itself() -> None:
    kv = make_kv(2, 2)
    scheduler = make_decoding(kv)
    alone = handed_over(kv, None, make_sequence(kv, [0] * 3))
    scheduler.add(alone)
    alone.tokens += [0]
    alone.computed += 1
    plan = StepPlan(9, 9)
    scheduler.fill(plan, 0.0)
    assert plan.work == [] and plan.preempted == [alone] and scheduler.sequences() == []


def repeating(kv: KVCacheManager, number: int) -> SequenceState:
    """A sequence whose text so far says how it may go on."""
    return handed_over(kv, None, make_sequence(kv, [number, 1, 2, 3, number, 1, 2], max_tokens=20))


def test_drafts_come_from_the_text_and_stay_within_the_budgets() -> None:
    kv = make_kv(20, 32)
    scheduler = make_decoding(kv, drafts=3)
    seq = repeating(kv, 0)
    seq.tokens[-1] = 3
    scheduler.add(seq)
    for tokens, draft in ((9, (0, 1, 2)), (3, (0, 1)), (1, ())):
        plan = StepPlan(tokens, 9)
        scheduler.fill(plan, 0.0)
        assert [(work.count, work.draft) for work in plan.work] == [(1 + len(draft), draft)]


def test_drafts_end_where_the_request_does() -> None:
    kv = make_kv(20, 32)
    scheduler = make_decoding(kv, drafts=9)
    seq = handed_over(kv, None, make_sequence(kv, [0, 1, 2, 3, 0, 1, 2], max_tokens=3))
    seq.tokens[-1] = 3
    scheduler.add(seq)
    plan = StepPlan(99, 9)
    scheduler.fill(plan, 0.0)
    assert plan.work[0].draft == (0,), "one of its two tokens to go is drawn after the draft"


def test_drafts_leave_the_others_their_turn() -> None:
    kv = make_kv(20, 32)
    scheduler = make_decoding(kv, drafts=9)
    sequences = [repeating(kv, number) for number in (4, 5, 6)]
    for seq in sequences:
        seq.tokens[-1] = 3
        scheduler.add(seq)
    plan = StepPlan(5, 9)
    scheduler.fill(plan, 0.0)
    assert [work.count for work in plan.work] == [3, 1, 1]


def test_drafts_leave_prompts_some_tokens_of_the_step() -> None:
    kv = make_kv(20, 32)
    scheduler = make_decoding(kv, drafts=9)
    scheduler.for_prompts = 4
    for number in (4, 5, 6):
        seq = repeating(kv, number)
        seq.tokens[-1] = 3
        scheduler.add(seq)
    for tokens, counts in ((12, [5, 2, 1]), (6, [1, 1, 1]), (2, [1, 1])):
        plan = StepPlan(tokens, 9)
        scheduler.fill(plan, 0.0)
        assert [work.count for work in plan.work] == counts


def test_drafts_leave_the_others_their_blocks() -> None:
    kv = make_kv(5, 4, caching=False)
    scheduler = make_decoding(kv, drafts=3)
    old, young = repeating(kv, 4), repeating(kv, 5)
    assert kv.allocator.available == 1
    old.tokens[-1] = 3
    young.tokens.append(0)  # its next token is the first of a block
    young.computed += 1
    for seq in (old, young):
        scheduler.add(seq)
    plan = StepPlan(9, 9)
    scheduler.fill(plan, 0.0)
    assert plan.preempted == []


def test_a_sequence_without_its_kv_may_not_join() -> None:
    kv = make_kv(4, 2)
    scheduler = make_decoding(kv)
    with pytest.raises(AssertionError, match="without KV"):
        scheduler.add(make_sequence(kv, [1, 2]))


def test_removing_a_stranger_changes_nothing() -> None:
    kv = make_kv(4, 2)
    scheduler = make_decoding(kv)
    seq = handed_over(kv, None, make_sequence(kv, [1]))
    scheduler.add(seq)
    scheduler.remove(make_sequence(kv, [1]))
    assert scheduler.sequences() == [seq]


class Batch:
    """A decode worker under random load; what is preempted comes back with the tokens it has, as by a router."""

    def __init__(self, seed: int, size: int, blocks: int, tokens: int, seqs: int, drafts: int):
        self.choice = random.Random(seed)
        self.kv = make_kv(blocks, size)
        self.scheduler = make_decoding(self.kv, drafts=drafts)
        self.engine: Engine
        self.engine, self.runner = make_engine(self.kv, [self.scheduler], tokens=tokens, seqs=seqs)
        self.runner.during = self.meddle
        self.longest = size * blocks
        self.live: list[SequenceState] = []
        self.waiting = [self.new(n) for n in range(self.choice.randrange(1, 8))]
        self.outputs: dict[str, list[int]] = {seq.request.request_id: [] for seq in self.waiting}
        self.endings: dict[str, str] = {}

    def new(self, number: int) -> SequenceState:
        prompt = self.choice.choices((0, 1), k=self.choice.randrange(1, self.longest - 1))
        wanted = self.choice.randrange(2, 20)
        return make_sequence(self.kv, prompt, request_id=str(number), max_tokens=wanted, stays=True)

    def admit(self) -> None:
        if self.waiting and self.choice.random() < 0.5:
            seq = self.waiting[0]
            try:
                self.kv.open(seq, headroom=len(self.live))
            except NoRoom:
                return
            self.waiting.pop(0)
            self.kv.release(seq)
            handed_over(self.kv, self.runner, seq)
            self.outputs[seq.request.request_id] += [seq.tokens[-1]]
            if (finish := seq.finish_for(seq.tokens[-1], frozenset(), self.longest)) is not None:
                self.end(seq, finish)  # the prefill worker would have said so
                return
            self.live.append(seq)
            self.scheduler.add(seq)

    def end(self, seq: SequenceState, how: str) -> None:
        name = seq.request.request_id
        assert name not in self.endings, "a sequence ended twice"
        self.endings[name] = how
        self.engine.end(seq)
        self.engine.end(seq)
        if seq in self.live:
            self.live.remove(seq)

    def meddle(self, work: object) -> None:
        """While the model computes, somebody hangs up."""
        if self.live and self.choice.random() < 0.05:
            self.end(self.choice.choice(self.live), "abort")

    def step(self) -> None:
        order = list(self.scheduler.running)
        for output in self.engine.step() or []:
            seq, name = output.seq, output.seq.request.request_id
            if isinstance(output.error, Preempted):
                self.preempted(seq, order)
                continue
            assert output.delta is not None and name not in self.endings, "tokens of a sequence that has ended"
            assert output.delta.index == len(self.outputs[name]), "a token was skipped or repeated"
            self.outputs[name] += output.delta.tokens
            if output.delta.finish is not None:
                self.end(seq, output.delta.finish)
        assert self.kv.unaccounted(self.live) == 0

    def preempted(self, seq: SequenceState, order: list[SequenceState]) -> None:
        request = seq.request
        if request.request_id in self.endings:
            return  # hung up on while the step ran
        staying = [other for other in order if other in self.scheduler.running]
        assert all(order.index(other) < order.index(seq) for other in staying), (
            "an older sequence gave way to a younger"
        )
        self.live.remove(seq)
        fresh = make_sequence(
            self.kv,
            request.prompt,
            generated=self.outputs[request.request_id],
            request_id=request.request_id,
            max_tokens=request.sampling.max_tokens,
            stays=True,
        )
        self.waiting.insert(0, fresh)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    blocks=st.integers(3, 9),
    tokens=st.integers(1, 5),
    seqs=st.integers(1, 5),
    drafts=st.integers(0, 4),
)
def test_random_batches_end_every_sequence_once_with_its_own_tokens(
    seed: int, size: int, blocks: int, tokens: int, seqs: int, drafts: int
) -> None:
    batch = Batch(seed, size, blocks, tokens, seqs, drafts)
    prompts = {seq.request.request_id: seq for seq in batch.waiting}
    for _ in range(3000):
        batch.admit()
        batch.step()
        if not batch.waiting and not batch.live:
            break
    assert not batch.waiting and not batch.live, "somebody waits for ever"
    for name, seq in prompts.items():
        room = batch.longest - seq.prompt_len
        length = min(seq.request.sampling.max_tokens, room)
        expected = written_out(seq.request.prompt, length)
        assert batch.outputs[name] == expected[: len(batch.outputs[name])]
        assert batch.endings[name] == "abort" or len(batch.outputs[name]) == length
    assert all(sum(counts) <= tokens and len(counts) <= seqs for counts in batch.runner.counts)
    assert batch.kv.allocator.held == 0
