"""Sequences without objectives pause where a more important prompt is late beside them and in time without them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.chunking import LEAN_STEPS
from prefill.pauses import LONGEST, MOST_PRIORITIES, MOST_PROMPTS, DecodePauses
from prefill.scheduler import PrefillScheduler
from serving.engine.sequence import SequenceState
from serving.grammar.grammars import GrammarState
from serving.messages import Slo
from serving.step_cost import StepCost
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_decoding, make_engine, make_kv, written_out
from tests.prefill.test_arriving import Arriving
from tests.prefill.test_chunking import BUDGET, Step, row

# Beside a TPOT of 60 ms a second has 17 steps, 34 ms each with six sequences and a prompt, 9 with one of them.
COST = StepCost(fixed=0.0, token=0.001, pair=0.0, sequence=0.004, context=0.0, error=0.0, samples=100)
TPOT_MS, TTFT = 60.0, 1.0
IMPORTANT, STANDARD, BATCH = -100, 0, 100
FITS_ALONE = 700  # prompt tokens: 0.85 s beside the one that matters, 1.26 s beside all six


class Pausing(Step):
    """A mixed worker whose decodes pause for prompts."""

    def __init__(self, *running: SequenceState, cost: StepCost | None = COST, blocks: int = 1000):
        super().__init__(cost=cost, kv=make_kv(blocks, 16, caching=False))
        self.decode.pauses = DecodePauses(lambda: cost, self.prefill.pressing, BUDGET)
        for seq in running:
            self.join(seq)

    def ask(self, seq: SequenceState) -> None:
        """A prompt that has its blocks, as those of leases have."""
        self.kv.open(seq)
        self.prefill.add(seq)

    def paused(self, now: float) -> list[SequenceState]:
        """Who runs and is not in the step."""
        decoding = [work.seq for work in self.plan(now)[0]]
        return [seq for seq in self.decode.running if seq not in decoding]


def others(count: int = 5, tpot_ms: float | None = None, priority: int = BATCH) -> list[SequenceState]:
    return [row(tpot_ms, priority=priority) for _ in range(count)]


def urgent(tokens: int = FITS_ALONE, now: float = 0.0, **fields: Any) -> SequenceState:
    known: dict[str, Any] = {"priority": IMPORTANT, "first_token_in": TTFT} | fields
    return make_sequence(None, [1] * tokens, now=now, slo=Slo(ttft_ms=1e3 * TTFT), stays=True, **known)


def test_those_without_objectives_pause_for_a_prompt_that_is_late_beside_them() -> None:
    paced, batch = row(TPOT_MS, priority=IMPORTANT), others()
    step = Pausing(paced, *batch)
    assert step.paused(0.0) == [], "nobody waits"
    step.ask(urgent())
    decoding, prompts = step.plan(0.0)
    assert [work.seq for work in decoding] == [paced]
    assert prompts[0].count > 45
    step.prefill.remove(prompts[0].seq)
    assert step.paused(0.1) == []


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        (200, {}),
        (900, {}),
        (FITS_ALONE, {"priority": BATCH}),
        (FITS_ALONE, {"first_token_in": None}),
        (FITS_ALONE, {"first_token_in": -0.1}),
    ],
    ids=["in time beside all", "late in any case", "no more important", "due at no time", "late already"],
)
def test_nobody_pauses_for_a_prompt(tokens: int, fields: dict[str, Any]) -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    step.ask(urgent(tokens, **fields))
    assert step.paused(0.0) == []


def test_only_who_has_no_objective_to_meet_pauses() -> None:
    """A text whose first token came too late has none any more; one that is as important as the prompt goes on."""
    late = row(TPOT_MS, priority=BATCH, ttft_ms=1.0, first_token_in=-1.0)
    goes_on = [row(TPOT_MS, priority=IMPORTANT), row(500.0, priority=BATCH), *others(1, priority=IMPORTANT)]
    pausing = [late, *others(5), *others(1, priority=STANDARD)]
    step = Pausing(*goes_on, *pausing)
    assert late.objectives.missed
    step.ask(urgent(400))
    assert set(step.paused(0.0)) == set(pausing)


@pytest.mark.parametrize("cost", [None, replace(COST, samples=0)])
def test_nobody_pauses_by_a_model_that_knows_nothing(cost: StepCost | None) -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others(), cost=cost)
    step.ask(urgent())
    assert step.paused(0.0) == []


def test_prompts_that_are_in_time_each_are_late_together() -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    for expected in (0, 5):
        step.ask(urgent(250))
        assert len(step.paused(0.0)) == expected


def test_prompts_are_counted_in_the_order_they_are_due() -> None:
    """The second takes 0.35 s beside all; behind the first, which has time, it would be late."""
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    step.ask(urgent(250))
    step.ask(urgent(100, first_token_in=0.45))
    assert step.paused(0.0) == []


def test_nobody_pauses_for_a_prompt_that_is_late_behind_others_in_any_case() -> None:
    """Two are in time beside all; the third is not in time either way."""
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    for tokens, due in ((150, 0.97), (150, 0.98), (560, 1.0)):
        step.ask(urgent(tokens, first_token_in=due))
    assert step.paused(0.0) == []


@pytest.mark.parametrize(
    ("early", "tokens", "paused"), [(0.0, 500, 5), (0.6, 500, 0), (-0.25, 500, 5), (-30.0, 880, 5)]
)
def test_what_sequences_are_early_or_late_by_counts(early: float, tokens: int, paused: int) -> None:
    """500 tokens: 1.07 s beside all, 0.73 with ten steps less. Who cannot catch up bounds pauses."""
    paced = row(TPOT_MS, priority=IMPORTANT, max_tokens=100)
    step = Pausing(paced, *others())
    paced.objectives.origin += early
    step.ask(urgent(tokens))
    assert len(step.paused(0.0)) == paused


def test_of_sequences_with_one_objective_the_latest_counts() -> None:
    late, early = (row(TPOT_MS, priority=IMPORTANT) for _ in range(2))
    step = Pausing(late, early, *others())
    early.objectives.origin += 0.6
    step.ask(urgent(500))
    assert len(step.paused(0.0)) == 5


def test_an_objective_that_nothing_can_meet_bounds_pauses_by_the_step_itself() -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), row(1.0, priority=IMPORTANT), *others())
    step.ask(urgent(500))
    assert len(step.paused(0.0)) == 5


@pytest.mark.parametrize(("tokens", "paused"), [(400, 5), (500, 0)])
def test_who_is_as_important_goes_on_and_counts(tokens: int, paused: int) -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others(priority=IMPORTANT), *others())
    step.ask(urgent(tokens))
    assert len(step.paused(0.0)) == paused


def test_who_has_an_objective_goes_on_and_counts() -> None:
    step = Pausing(*others(5, TPOT_MS), *others(1))
    step.ask(urgent())
    assert step.paused(0.0) == []


def test_where_nothing_is_due_there_is_a_step_all_the_same() -> None:
    step = Pausing(*others(6))
    step.ask(urgent(20, first_token_in=0.05))
    assert len(step.paused(0.0)) == 6


@pytest.mark.parametrize(("tokens", "paused"), [(700, 0), (900, 5)])
def test_what_has_missed_its_objectives_bounds_pauses_alone(tokens: int, paused: int) -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT, ttft_ms=1.0, first_token_in=-1.0), *others())
    step.ask(urgent(tokens))
    assert len(step.paused(0.0)) == paused


def test_nobody_pauses_for_a_prompt_whose_prefix_is_still_coming() -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    step.ask(seq := urgent())
    Arriving(seq, 16)
    assert step.paused(0.0) == []


def test_the_models_error_is_left_as_room() -> None:
    """250 tokens take 0.82 s beside all of them."""
    for error, expected in ((0.0, 0), (0.08, 0), (0.12, 5)):
        step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others(), cost=replace(COST, error=error))
        step.ask(urgent(250))
        assert len(step.paused(0.0)) == expected


def test_one_step_in_some_has_them_all_the_same() -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    step.ask(urgent())
    assert [len(step.paused(0.0)) for _ in range(2 * LEAN_STEPS)] == [*[5] * (LEAN_STEPS - 1), 0] * 2


def test_nobody_pauses_for_a_prompt_that_lacks_blocks() -> None:
    """They come free when others end."""
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others(), blocks=14)
    step.prefill.add(urgent())
    assert step.paused(0.0) == []


def test_nobody_pauses_for_a_prompt_whose_grammar_is_being_compiled() -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    step.ask(seq := urgent())
    seq.grammar = GrammarState(Future())
    assert step.paused(0.0) == []


def test_nobody_pauses_for_a_prompt_that_is_gone() -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    step.ask(seq := urgent())
    step.prefill.remove(seq)
    assert step.paused(0.0) == []


def test_nobody_pauses_for_longer_than_a_while() -> None:
    """However long steps are: 13,700 tokens take 14.6 s beside all, and 13.8 without them."""
    step, found = Pausing(*others(6)), []
    step.ask(seq := urgent(13_700))
    for now in (10.0, 10.0 + 0.9 * LONGEST, 10.0 + LONGEST, 10.0 + LONGEST):
        seq.objectives.due = now + 14.5
        found.append(len(step.paused(now)))
    assert found == [6, 6, 0, 6]


def test_a_steps_tokens_bound_how_quickly_prompts_are_computed() -> None:
    """3,000 tokens take six steps beside six: 3.2 s, and 3.03 without them."""
    step = Pausing(*others(6))
    step.ask(seq := urgent(3000))
    for left, paused in ((3.0, 0), (3.1, 6), (3.25, 0)):
        seq.objectives.due = left
        assert len(step.paused(0.0)) == paused


def test_nobody_pauses_where_that_brings_next_to_nothing() -> None:
    """The model's error alone would have it: one sequence more is 5 ms of a second."""
    cost = replace(COST, error=0.3)
    step = Pausing(*others(1), cost=cost)
    step.ask(urgent(700))
    assert step.paused(0.0) == []


def test_the_most_important_prompts_are_looked_at_and_no_others() -> None:
    """What runs is not compared with each that waits."""
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    for _ in range(MOST_PROMPTS):
        step.ask(urgent(1, first_token_in=0.9))
    step.ask(urgent())
    assert step.paused(0.0) == []
    for priority in range(IMPORTANT, IMPORTANT + MOST_PRIORITIES):
        step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
        for other in range(priority, IMPORTANT + MOST_PRIORITIES):
            step.ask(urgent(1, priority=other))
        step.ask(urgent(priority=IMPORTANT + MOST_PRIORITIES))
        assert len(step.paused(0.0)) == (0 if priority == IMPORTANT else 5)


def test_prompts_that_take_too_long_by_themselves_hide_none() -> None:
    step = Pausing(row(TPOT_MS, priority=IMPORTANT), *others())
    for _ in range(MOST_PROMPTS):
        step.ask(urgent(700, first_token_in=0.3))
    step.ask(urgent(700))
    assert len(step.paused(0.0)) == 5


class PausesAlways:
    """Everybody pauses for ever."""

    def beyond(self, running: Sequence[SequenceState], now: float) -> float:
        return -inf


@pytest.mark.parametrize("why", ["a grammar is compiled", "a prefix is coming"])
def test_an_engine_that_has_work_has_a_step(why: str) -> None:
    """Nobody wakes it after an empty one, though all that runs pauses and no prompt can be computed.

    Nor does it wait for a prefix instead.
    """
    kv = make_kv(200, 16, caching=False)
    decoding = make_decoding(kv)
    prefilling = PrefillScheduler(kv, decoding.add)
    engine, _ = make_engine(kv, [decoding, prefilling])
    texts = [make_sequence(kv, [1] * 20, stays=True, request_id=str(number), max_tokens=9) for number in range(3)]
    for seq in texts:
        kv.open(seq)
        prefilling.add(seq)
    while len(decoding.running) < len(texts):
        engine.step()
    kv.open(seq := make_sequence(kv, [1] * 20, stays=True, request_id="waits"))
    if why == "a prefix is coming":
        Arriving(seq, 16)
    else:
        seq.grammar = GrammarState(Future())
    prefilling.add(seq)
    decoding.pauses = PausesAlways()
    while decoding.running:
        before = engine.totals.paused, seq.computed
        assert engine.step() is not None
        assert (engine.totals.paused > before[0]) == (seq.computed > before[1]), "it is counted where it is not in vain"
    assert not seq.computed or why == "a grammar is compiled"
    assert all(list(text.output) == written_out([1] * 20, 9) for text in texts)


ROWS = st.tuples(st.sampled_from([None, 50.0, 200.0]), st.sampled_from([IMPORTANT, STANDARD, BATCH]))
PROMPTS = st.tuples(st.integers(1, 900), st.sampled_from([IMPORTANT, STANDARD, BATCH]), st.sampled_from([None, 0.5, 2]))


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(ROWS, max_size=8), prompts=st.lists(PROMPTS, max_size=4))
def test_whoever_pauses_is_less_important_than_a_prompt_and_soon_has_a_token(
    rows: list[tuple[float | None, int]], prompts: list[tuple[int, int, float | None]]
) -> None:
    step = Pausing(*(row(tpot_ms, priority=priority) for tpot_ms, priority in rows))
    for tokens, priority, due in prompts:
        step.ask(urgent(tokens, priority=priority, first_token_in=due))
    hurried = [priority for _, priority, due in prompts if due is not None]
    last = dict.fromkeys(step.decode.running, 0)
    for number in range(1, 3 * LEAN_STEPS):
        paused = step.paused(0.0)
        for seq in step.decode.running:
            if seq in paused:
                assert seq.objectives.origin == inf and seq.objectives.priority > min(hurried)
                assert number - last[seq] < LEAN_STEPS
            else:
                last[seq] = number
