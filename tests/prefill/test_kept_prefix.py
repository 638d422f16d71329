"""A prompt that waits keeps what is cached of it, until one that has its turn needs the room."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadPlan
from prefill.ordering import FirstComeFirstServed
from prefill.scheduler import PrefillScheduler
from serving.engine.plan import StepPlan, Work
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from serving.grammar.grammars import GrammarState
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
    other = make_sequence(kv, [7] * 18)  # five blocks
    with pytest.raises(NoRoom):
        kv.open(other)
    assert plan(scheduler) == [waiting] and waiting.cached == len(ONE)
    assert (kv.queries, kv.hits) == (len(ONE) + len(waiting.tokens), len(ONE))


def test_nothing_is_kept_of_a_prompt_of_which_nothing_is_cached() -> None:
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


def test_nothing_is_reserved_beside_what_is_kept() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv)
    waiting = add(scheduler, kv, [*ONE, *range(4)])
    assert kv.allocator.held == 2 and not waiting.opened
    kv.open(make_sequence(kv, [7] * 14))
    assert plan(scheduler) == [], "it waits for the blocks of the rest"
    assert waiting.computed == len(ONE) and kv.allocator.available == 0


def test_prompts_let_go_for_one_that_passes_them_the_last_ones_first_and_no_more_than_it_takes() -> None:
    kv = make_kv(9, SIZE)
    compute(kv, ONE, OTHER)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    last = add(scheduler, kv, [*ONE, 9])
    last_but_one = add(scheduler, kv, [*OTHER, 9])
    assert kv.allocator.available == 5
    urgent = add(scheduler, kv, [7] * 23)  # six blocks
    assert plan(scheduler, tokens=23) == [urgent]
    assert last_but_one.computed == len(OTHER) and last.computed == 0
    assert kv.unaccounted([urgent, last_but_one]) == 0


@pytest.mark.parametrize(("free", "let_go"), [(0, 2), (1, 1), (2, 0)])
@pytest.mark.parametrize("known", [False, True])
def test_exactly_as_many_let_go_as_it_takes(free: int, let_go: int, known: bool) -> None:
    """Two blocks are needed; where the prefix is `known`, a third one that somebody who is gone has left cached."""
    kv = make_kv(5 + free, SIZE)
    prefixes = [[number] * SIZE for number in (2, 3, 4)]
    compute(kv, *prefixes)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    kept = [add(scheduler, kv, [*prefix, 9]) for prefix in prefixes]
    urgent = add(scheduler, kv, [*ONE[:SIZE], 5, 6, 7, 8, 9] if known else [5, 6, 7, 8, 9])
    if known:
        compute(kv, ONE[:SIZE])
    kv.open(make_sequence(kv, [6] * (1 if known else SIZE)))  # a block, or two
    assert plan(scheduler, tokens=1) == [urgent]
    assert [seq.waits_kept for seq in kept] == [False] * let_go + [True] * (3 - let_go)


def test_nobody_lets_go_for_one_that_has_its_blocks() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    kept = add(scheduler, kv, [*ONE, 9])
    fetched = make_sequence(kv, [7] * 14)
    kv.begin(fetched)  # all that are left
    scheduler.add(fetched)
    assert plan(scheduler, tokens=1) == [fetched] and kept.waits_kept and not fetched.waits_kept


def test_one_that_finds_no_room_keeps_nothing_on_a_worker_that_decodes() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv, then=lambda seq: None)
    text = make_sequence(kv, [7] * 15)
    kv.open(text)
    add(scheduler, kv, [*ONE, *range(4)])
    assert plan(scheduler) == [] and kv.allocator.held == len(text.blocks)


def test_what_a_prompt_kept_and_finds_is_found() -> None:
    kv = make_kv(9, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv)
    waiting = add(scheduler, kv, [*ONE, 9])
    now = kv.allocator._cached._now
    assert plan(scheduler) == [waiting]
    assert sum(kv.allocator._cached._kinds) == len(ONE) // SIZE
    kv.release(waiting)
    assert kv.allocator._cached._now > now, "others have waited longer since"


def test_what_finds_no_room_ages_nobody() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    now = kv.allocator._cached._now
    kv.open(make_sequence(kv, [7] * 14))
    with pytest.raises(NoRoom):
        kv.open(make_sequence(kv, [*ONE, *range(4)]))
    assert kv.allocator._cached._now == now


def test_what_is_being_fetched_or_computed_is_not_let_go() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    arriving = make_sequence(kv, [*ONE, *range(12)])
    kv.begin(arriving)
    scheduler.add(arriving)
    add(scheduler, kv, [7] * 14)
    assert plan(scheduler, tokens=1) == [arriving]
    assert arriving.opened and arriving.computed == len(ONE) and len(arriving.blocks) == 6


@pytest.mark.parametrize(("taken", "begins"), [(0, True), (4, True), (6, True), (8, False)])
def test_one_that_is_too_long_for_the_device_is_made_way_for_unless_it_is_the_host_that_is_full(
    taken: int, begins: bool
) -> None:
    host = OffloadPlan(block_size=SIZE, device_blocks=8, extent_blocks=2, extents=8, segment_extents=4)
    kv = make_kv(8, SIZE, host=host)
    prefixes = [ONE, OTHER, [3] * 8, [4] * 4]
    compute(kv, *prefixes)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    kept = [add(scheduler, kv, [*prefix, 9]) for prefix in prefixes]
    kv.listener = stores = Stores(kv)
    assert kv.host is not None and kv.allocator.available == 1
    extents = kv.host.extents.allocate(taken)
    long = add(scheduler, kv, [7] * 36)  # ten blocks
    assert plan(scheduler, tokens=1) == ([long] if begins else [])
    assert kept[0].waits_kept is not begins
    assert bool(stores.given_up) is not begins, "what is to be stored is dropped in vain"
    kv.host.extents.release(extents)


@pytest.mark.parametrize("known", [0, SIZE])
def test_who_lets_go_of_what_the_one_that_begins_will_find_is_not_taken_for_room(known: int) -> None:
    """It keeps less itself: it came before anybody had computed all of its prefix."""
    kv = make_kv(10, SIZE)
    compute(kv, ONE[:known])
    scheduler = PrefillScheduler(kv)
    first = add(scheduler, kv, [*ONE, *[7] * 27])  # nine blocks
    compute(kv, ONE, OTHER)
    for prefix in (OTHER, ONE, ONE):
        add(scheduler, kv, [*prefix, 9])
    assert plan(scheduler, tokens=1) == [first] and first.cached == len(ONE)


class Stores:
    """Holds blocks, and extents of the host, until they are stored elsewhere."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.given_up = 0
        self.blocks: list[int] = []
        self.extents: list[int] = []

    def offer(self, seq: SequenceState, first: int, last: int) -> None:
        for index in range(first, last):
            block = seq.block(index)
            if seq.offload is not None:
                assert self.kv.host is not None
                self.extents.append(block // seq.offload.extent_blocks)
                self.kv.host.extents.acquire(self.extents[-1:])
            elif len(self.blocks) < self.kv.allocator.num_blocks // 4:
                self.blocks.append(block)
                self.kv.allocator.acquire([block])

    def give_up(self) -> None:
        self.given_up += 1
        self.kv.allocator.release(self.blocks)
        if self.kv.host is not None:
            self.kv.host.extents.release(self.extents)
        self.blocks, self.extents = [], []


def test_prompts_let_go_before_blocks_are_not_stored_elsewhere() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    kv.listener = stores = Stores(kv)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    add(scheduler, kv, [*ONE, 9])
    urgent = add(scheduler, kv, [7] * 18)
    assert plan(scheduler, tokens=18) == [urgent] and not stores.given_up


def test_one_that_is_too_long_for_the_device_begins_at_once_if_the_host_is_full_of_what_is_to_be_stored() -> None:
    host = OffloadPlan(block_size=SIZE, device_blocks=8, extent_blocks=2, extents=4, segment_extents=4)
    kv = make_kv(8, SIZE, host=host)
    prefixes = [ONE, OTHER, [3] * 8, [4] * 4]
    compute(kv, *prefixes)
    kv.listener = stores = Stores(kv)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    kept = [add(scheduler, kv, [*prefix, 9]) for prefix in prefixes]
    assert kv.host is not None
    stores.extents = kv.host.extents.allocate(4)
    long = add(scheduler, kv, [7] * 36)  # ten blocks
    assert plan(scheduler, tokens=1) == [long] and stores.given_up
    assert [seq.waits_kept for seq in kept] == [False, True, True, True], "no more let go than it takes"


class Uncompiled:
    ready = False


def test_one_that_cannot_go_on_lets_go_for_those_behind_it() -> None:
    kv = make_kv(6, SIZE)
    compute(kv, ONE)
    scheduler = PrefillScheduler(kv)
    first = add(scheduler, kv, [*ONE, 9])
    first.grammar = cast(GrammarState, Uncompiled())
    second = add(scheduler, kv, [7] * 18)
    assert plan(scheduler) == [second] and first.computed == 0


@pytest.mark.parametrize("waiting", [2, 40])
def test_letting_go_takes_no_look_at_the_own_prefix_for_each_that_does(
    waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv(2 + 2 * waiting, SIZE)
    prefixes = [[10 + number] * 8 for number in range(waiting)]
    compute(kv, *prefixes)
    scheduler = PrefillScheduler(kv, order=LastComeFirstServed())
    for prefix in prefixes:
        add(scheduler, kv, [*prefix, 9])
    add(scheduler, kv, [7] * (8 * waiting + 7))  # all blocks there are
    looked, match = [], kv.allocator.match
    monkeypatch.setattr(kv.allocator, "match", lambda keys: looked.append(keys) or match(keys))
    assert len(plan(scheduler, tokens=1)) == 1
    assert len(looked) <= 4


def test_what_was_kept_in_vain_was_neither_asked_for_nor_found() -> None:
    kv = make_kv(9, SIZE)
    compute(kv, ONE)
    asked, now = kv.queries, kv.allocator._cached._now
    waiting = add(PrefillScheduler(kv), kv, [*ONE, 9])
    kv.release(waiting)
    assert (kv.queries, kv.hits, kv.allocator._cached._now) == (asked, 0, now)
    assert not any(kv.allocator._cached._kinds)


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
    with_host=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_passes_whom_all_are_served(blocks: int, tokens: int, with_host: bool, seed: int) -> None:
    """Prompts that have much in common, in an order that changes with each step; some are cancelled.

    The engine sleeps when it has found nothing to do, until one comes or ends.
    """
    choice = random.Random(seed)
    host = OffloadPlan(block_size=2, device_blocks=blocks, extent_blocks=2, extents=4, segment_extents=2)
    kv = make_kv(blocks, 2, host=host if with_host else None)
    kv.listener = stores = Stores(kv)
    scheduler = PrefillScheduler(kv, order=AnyOrder(seed))
    most = host.tokens if with_host else 2 * blocks
    engine, _ = make_engine(kv, [scheduler], tokens=tokens, seqs=4, max_model_len=most)
    starts = [choice.choices((0, 1), k=blocks) for _ in range(2)]
    arriving = [
        make_sequence(kv, [*choice.choice(starts), *choice.choices((0, 1), k=choice.randrange(1, most - blocks))])
        for _ in range(choice.randrange(1, 9))
    ]
    arrived: list[SequenceState] = []
    leaving: list[SequenceState] = []
    awake = True
    for _ in range(1000):
        if arriving and choice.random() < 0.5:
            arrived.append(arriving.pop(0))
            scheduler.add(arrived[-1])
            awake = True
        if leaving and choice.random() < 0.5:
            engine.end(leaving.pop(0))
            awake = True
        if scheduler.queue and choice.random() < 0.1:
            engine.end(choice.choice(scheduler.queue))
            awake = True
        outputs = engine.step() if awake else None
        awake = outputs is not None
        for output in outputs or []:
            assert output.delta is not None and output.delta.tokens == (next_token(output.seq.tokens[:-1]),)
            leaving.append(output.seq)
        assert kv.unaccounted(arrived, stores.blocks) == 0
        assert awake or arriving or leaving or not scheduler.queue, "somebody waits for ever"
        if not arriving and not scheduler.queue and not leaving:
            break
    stores.give_up()
    assert not arriving and not scheduler.queue and not leaving and kv.allocator.held == 0
