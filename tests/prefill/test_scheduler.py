"""The prefill scheduler: first come, first served, in chunks within the step's budgets, and nobody waits for ever."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.scheduler import PrefillScheduler
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_engine, make_kv, next_token


def planned(scheduler: PrefillScheduler, tokens: int, seqs: int, now: float = 0.0) -> list[tuple[SequenceState, int]]:
    plan = StepPlan(tokens, seqs)
    scheduler.fill(plan, now)
    return [(work.seq, work.count) for work in plan.work]


def test_a_long_prompt_goes_in_chunks_and_the_rest_of_the_step_to_the_next() -> None:
    kv = make_kv(20, 4)
    scheduler = PrefillScheduler(kv)
    engine, runner = make_engine(kv, [scheduler], tokens=8)
    first, second = make_sequence(kv, [1] * 12), make_sequence(kv, [2] * 6)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.waiting_tokens == 18
    while engine.step() is not None:
        pass
    assert runner.counts == [[8], [4, 4], [2]]
    assert [seq.tokens[-1] for seq in (first, second)] == [next_token([1] * 12), next_token([2] * 6)]


def test_budgets_hold() -> None:
    kv = make_kv(20, 4)
    scheduler = PrefillScheduler(kv)
    sequences = [make_sequence(kv, [n] * 3) for n in range(4)]
    for seq in sequences:
        scheduler.add(seq)
    assert planned(scheduler, 4, 9) == [(sequences[0], 3), (sequences[1], 1)]
    assert planned(scheduler, 99, 2) == [(sequences[0], 3), (sequences[1], 3)]
    assert planned(scheduler, 0, 9) == [] == planned(scheduler, 9, 0)


def test_the_first_that_waits_for_blocks_gets_the_next_ones() -> None:
    """A short prompt does not slip past a long one for ever; prompts that hold their blocks go on."""
    kv = make_kv(4, 4)
    scheduler = PrefillScheduler(kv)
    running, long, short = (make_sequence(kv, [n] * length) for n, length in enumerate((4, 12, 1)))
    for seq in (running, long, short):
        scheduler.add(seq)
    assert planned(scheduler, 99, 9) == [(running, 4)]
    assert not long.blocks and not short.blocks
    scheduler.remove(running)
    kv.release(running)
    assert planned(scheduler, 99, 9) == [(long, 12)]


def test_sequences_with_blocks_pass_those_that_wait_for_some() -> None:
    kv = make_kv(4, 4)
    scheduler = PrefillScheduler(kv)
    waiting, leased = make_sequence(kv, [0] * 12), make_sequence(kv, [1] * 4, stays=True)
    kv.open(leased)
    scheduler.add(waiting)
    scheduler.add(leased)
    assert planned(scheduler, 99, 9) == [(leased, 4)]


def test_a_prompt_takes_up_what_others_computed_while_it_waited() -> None:
    kv = make_kv(20, 4)
    scheduler = PrefillScheduler(kv)
    first, second = make_sequence(kv, range(10)), make_sequence(kv, range(10), stays=True)
    kv.open(second)
    first.prefill.scheduled_at = 0.0
    kv.open(first)
    first.computed = 10
    kv.publish(first)
    scheduler.add(second)
    assert planned(scheduler, 99, 9, now=3.0) == [(second, 2)]
    assert (second.cached, second.prefill.scheduled_at) == (8, 3.0)


def test_who_stays_goes_on_to_decode_and_who_does_not_is_forgotten() -> None:
    kv = make_kv(20, 4)
    staying: list[SequenceState] = []
    scheduler = PrefillScheduler(kv, then=staying.append)
    engine, _ = make_engine(kv, [scheduler])
    leased, passing = make_sequence(kv, [1, 2], stays=True), make_sequence(kv, [3])
    kv.open(leased)
    scheduler.add(leased)
    scheduler.add(passing)
    engine.step()
    assert scheduler.sequences() == [] and staying == [leased]
    assert passing.blocks, "its KV is still to be handed over"
    engine.end(passing)
    engine.end(leased)
    assert kv.allocator.held == 0


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 4),
    blocks=st.integers(2, 8),
    caching=st.booleans(),
    tokens=st.integers(1, 9),
    seqs=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_random_prompts_are_all_served_in_order(
    size: int, blocks: int, caching: bool, tokens: int, seqs: int, seed: int
) -> None:
    """A tiny pool, random chunking, random cancellation, handoffs that take a while."""
    choice = random.Random(seed)
    kv = make_kv(blocks, size, caching=caching)
    scheduler = PrefillScheduler(kv)
    engine, runner = make_engine(kv, [scheduler], tokens=tokens, seqs=seqs)
    lengths = [choice.randrange(1, size * blocks) for _ in range(choice.randrange(1, 9))]
    arriving = [make_sequence(kv, choice.choices((0, 1), k=length)) for length in lengths]
    arrived: list[SequenceState] = []
    leaving: list[SequenceState] = []
    started: list[SequenceState] = []
    drawn: list[SequenceState] = []
    for _ in range(1000):
        if arriving and choice.random() < 0.5:
            arrived.append(arriving.pop(0))
            scheduler.add(arrived[-1])
        if leaving and choice.random() < 0.5:
            engine.end(leaving.pop(0))  # handed over
        if scheduler.queue and choice.random() < 0.1:
            engine.end(choice.choice(scheduler.queue))
        for output in engine.step() or []:
            assert output.delta is not None and output.prefilled
            assert output.delta.tokens == (next_token(output.seq.tokens[:-1]),)
            drawn.append(output.seq)
            leaving.append(output.seq)
        started += [seq for seq in arrived if seq.prefill.scheduled_at is not None and seq not in started]
        assert kv.unaccounted(arrived) == 0
        if not arriving and not scheduler.queue and not leaving:
            break
    assert not arriving and not scheduler.queue and not leaving, "somebody waits for ever"
    assert started == [seq for seq in arrived if seq in started], "a later prompt got blocks before an earlier one"
    assert len(set(map(id, drawn))) == len(drawn) and all(seq.ended for seq in arrived)
    assert all(sum(counts) <= tokens and len(counts) <= seqs for counts in runner.counts)
    assert kv.allocator.held == 0
