"""A prompt that waits keeps what is cached of it, as long as that takes no room from one that goes before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.manager import KVCacheManager
from prefill.ordering import FirstComeFirstServed
from prefill.scheduler import PrefillScheduler
from serving.engine.plan import StepPlan, Work
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_engine, make_kv, next_token

SIZE = 4  # tokens of a block
ONE, OTHER = [1] * 8, [2] * 8  # prefixes of two blocks


class LastComeFirstServed(FirstComeFirstServed):
    def __init__(self) -> None:
        self.came: list[SequenceState] = []

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        self.came.append(seq)

    def sort(self, queue: list[SequenceState], chunk: int, beside: Sequence[Work], now: float) -> None:
        queue.sort(key=self.came.index, reverse=True)


class AnyOrder(FirstComeFirstServed):
    """Another one each time."""

    def __init__(self, seed: int):
        self.choice = random.Random(seed)

    def sort(self, queue: list[SequenceState], chunk: int, beside: Sequence[Work], now: float) -> None:
        self.choice.shuffle(queue)


def compute(kv: KVCacheManager, *prefixes: Sequence[int]) -> None:
    """Somebody has computed these, and left them in the cache."""
    for tokens in prefixes:
        seq = make_sequence(kv, tokens)
        kv.open(seq)
        seq.computed = len(tokens)
        kv.publish(seq)
        kv.release(seq)


def add(scheduler: PrefillScheduler, kv: KVCacheManager, prompt: Sequence[int]) -> SequenceState:
    seq = make_sequence(kv, prompt)
    scheduler.add(seq)
    return seq


def plan(scheduler: PrefillScheduler, tokens: int = 99) -> list[SequenceState]:
    made = StepPlan(tokens, 9)
    scheduler.fill(made, 0.0)
    return [work.seq for work in made.work]


def test_nobody_takes_what_a_waiting_prompt_will_find() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv)
    waiting = add(scheduler, kv, [*ONE, 9])
    assert waiting.computed == len(ONE) and scheduler.waiting_tokens == 1
    other = make_sequence(kv, [7] * 14)
    with pytest.raises(NoRoom):
        kv.open(other)
    assert plan(scheduler) == [waiting] and waiting.cached == len(ONE)


def test_nothing_is_reserved_for_a_prompt_of_which_nothing_is_cached() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv)
    add(scheduler, kv, [7, *ONE])
    assert kv.allocator.held == 0


def test_a_worker_that_decodes_keeps_nothing_but_for_leases() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv, then=lambda seq: None)
    add(scheduler, kv, [*ONE, 9])
    assert kv.allocator.held == 0


def test_who_waits_for_room_is_not_kept_from_it_by_who_comes_later() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv)
    leased = make_sequence(kv, [7] * 8)
    kv.open(leased)
    first = add(scheduler, kv, [8] * 10)  # three blocks, as many as are left
    later = add(scheduler, kv, [*ONE, 9])
    assert not later.opened
    assert plan(scheduler) == [first]


def test_prompts_let_go_for_one_that_passes_them_the_last_ones_first_and_no_more_than_it_takes() -> None:
    kv = make_kv(9, SIZE)
    compute(kv, ONE, OTHER)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    last = add(scheduler, kv, [*ONE, 9])
    last_but_one = add(scheduler, kv, [*OTHER, 9])
    assert last.opened and last_but_one.opened and kv.allocator.available == 3
    urgent = add(scheduler, kv, [7] * 19)  # five blocks
    assert plan(scheduler, tokens=19) == [urgent]
    assert last_but_one.opened and last_but_one.computed == len(OTHER)
    assert not last.opened and last.computed == 0
    assert kv.unaccounted([urgent, last_but_one]) == 0


def test_what_a_lease_was_promised_is_not_let_go() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv, then=lambda seq: None, order=LastComeFirstServed())
    leased = make_sequence(kv, [*ONE, 9], stays=True)
    kv.open(leased, waits=True)
    scheduler.add(leased)
    add(scheduler, kv, [7] * 14)
    assert plan(scheduler) == [leased]


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.integers(3, 12),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_whatever_passes_whom_all_are_served(blocks: int, tokens: int, seed: int) -> None:
    """Prompts that have much in common, in an order that changes with each step; some are cancelled."""
    choice = random.Random(seed)
    kv = make_kv(blocks, 2)
    scheduler = PrefillScheduler(kv, order=AnyOrder(seed))
    engine, _ = make_engine(kv, [scheduler], tokens=tokens, seqs=4)
    starts = [choice.choices((0, 1), k=blocks) for _ in range(2)]
    arriving = [
        make_sequence(kv, [*choice.choice(starts), *choice.choices((0, 1), k=choice.randrange(1, blocks))])
        for _ in range(choice.randrange(1, 9))
    ]
    arrived: list[SequenceState] = []
    leaving: list[SequenceState] = []
    for _ in range(1000):
        if arriving and choice.random() < 0.5:
            arrived.append(arriving.pop(0))
            scheduler.add(arrived[-1])
        if leaving and choice.random() < 0.5:
            engine.end(leaving.pop(0))
        if scheduler.queue and choice.random() < 0.1:
            engine.end(choice.choice(scheduler.queue))
        for output in engine.step() or []:
            assert output.delta is not None and output.delta.tokens == (next_token(output.seq.tokens[:-1]),)
            leaving.append(output.seq)
        assert kv.unaccounted(arrived) == 0
        if not arriving and not scheduler.queue and not leaving:
            break
    assert not arriving and not scheduler.queue and not leaving, "somebody waits for ever"
    assert kv.allocator.held == 0
