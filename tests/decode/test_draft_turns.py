"""Drafts are spent where slack pays: on sequences that lag, out of the slack of the others; else as ever."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from decode.scheduler import DecodeScheduler
from decode.speculation import DraftTurns, PromptLookup, Speculation
from serving.engine.objectives import Objectives
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.messages import Slo
from tests.decode.test_scheduler import handed_over
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_kv

BASE, SLOPE = 0.010, 0.001  # seconds of a step, and of each token in it
REPEATING = [1, 2, 3, 4] * 6
LIMIT = 4


def speculation(accepted: float = 0.5) -> Speculation:
    made = Speculation(LIMIT)
    for size in (1, 2, 8, 16, 32) * 3:
        made.cost.observe(size, BASE + SLOPE * size)
    return made


class Batch:
    """A decode scheduler over sequences that repeat themselves, with these TPOT objectives in milliseconds."""

    def __init__(self, *tpots_ms: float | None, accepted: float = 0.5, max_tokens: int = 200):
        self.kv = make_kv(40 * len(tpots_ms), 16, caching=False)
        self.scheduler = DecodeScheduler(self.kv, max_model_len=1000, speculation=speculation())
        self.rows: list[SequenceState] = []
        for tpot_ms in tpots_ms:
            fields: dict[str, Any] = {"slo": Slo(tpot_ms=tpot_ms)} if tpot_ms is not None else {}
            seq = handed_over(self.kv, None, make_sequence(self.kv, REPEATING, max_tokens=max_tokens, **fields))
            seq.tokens[-1] = 1  # as the text goes on
            seq.incoming.prefilled_here = True
            self.rows.append(seq)
            self.scheduler.add(seq)
            self.scheduler._drafts[seq] = PromptLookup(accepted)
        self.scheduler._begin(0.0)

    def drafts(self, now: float, tokens: int = 500) -> list[int]:
        """How many tokens each of them drafts in a step that begins now."""
        plan = StepPlan(tokens, 100)
        self.scheduler.fill(plan, now)
        return [len(work.draft) for work in plan.work]


def test_one_that_lags_drafts_although_that_does_not_pay_for_all() -> None:
    """16 tokens take 26 ms: a draft has to be right more often than 16/26 to pay, and twice in 100 for itself alone."""
    early, late = Batch(20.0, *[200.0] * 15), Batch(20.0, *[200.0] * 15)
    assert early.drafts(-1.0) == [0] + [0] * 15, "nobody lags"
    assert late.drafts(0.0) == [4] + [0] * 15


def test_those_that_are_in_time_lend_no_more_than_they_have() -> None:
    """The others are due in 28 ms: two tokens more, and no third."""
    batch = Batch(20.0, *[28.5] * 15)
    assert batch.drafts(0.0) == [2] + [0] * 15
    assert Batch(20.0, *[26.5] * 15).drafts(0.0)[0] <= 1


def test_while_one_lags_the_others_do_not_draft_even_where_that_would_pay() -> None:
    """Their drafts would make the late one later."""
    assert Batch(200.0, 200.0, accepted=0.9).drafts(0.0) == [4, 4]
    assert Batch(5.0, 200.0, accepted=0.9).drafts(0.0) == [4, 0]


def test_one_that_can_no_longer_be_in_time_takes_nothing_from_the_others() -> None:
    batch = Batch(5.0, 200.0, accepted=0.9, max_tokens=30)
    assert batch.drafts(0.1) == [4, 4], "it is given up: as if it had no objective"


def test_without_a_measured_step_nothing_is_known() -> None:
    batch = Batch(20.0, 200.0)
    assert DraftTurns.of(batch.rows, Speculation(LIMIT).cost, LIMIT, 0.0) is None


@given(
    st.lists(st.sampled_from([None, 5.0, 15.0, 25.0, 60.0, 500.0]), min_size=1, max_size=20),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.3),
)
def test_nobody_who_is_in_time_is_made_late_for_one_who_is_not(
    tpots: list[float | None], accepted: float, now: float
) -> None:
    batch = Batch(*tpots, accepted=accepted)
    made = batch.scheduler.speculation
    assert made is not None
    count = len(tpots)
    turns = DraftTurns.of(batch.rows, made.cost, LIMIT, now)
    share = made.needed(count)
    drafts = batch.drafts(now)
    if turns is None:
        return
    if not turns.lagging:
        assert sum(drafts) <= max(0, turns.spare), "all stay in time"
        return
    assert all(not drafted for seq, drafted in zip(batch.rows, drafts, strict=True) if seq not in turns.lagging)
    if accepted <= share and sum(drafts) > len(turns.lagging):  # more than trials
        step = BASE + SLOPE * (count + sum(drafts))
        in_time = [seq.objectives.slack(len(seq.tokens), now) for seq in batch.rows if seq not in turns.lagging]
        before = BASE + SLOPE * count
        assert all(slack >= step - SLOPE * len(turns.lagging) - 1e-9 for slack in in_time if slack >= before)


@given(st.integers(1, 12), st.floats(0.0, 1.0), st.floats(0.0, 9.0))
def test_without_objectives_drafts_are_what_they_were(count: int, accepted: float, now: float) -> None:
    made = speculation()
    batch = Batch(*[None] * count, accepted=accepted)
    plain = [len(made.draft(PromptLookup(accepted), seq.tokens, 5, count)) for seq in batch.rows]
    assert batch.drafts(now) == plain


def test_a_tight_objective_is_met_beside_a_large_batch() -> None:
    """Drafts that are right half of the time: the tight one is in time, which it is not by one token a step."""

    def tpot_with(goals: bool) -> float:
        batch, now = Batch(20.0, *[60.0] * 15), 0.0
        draws = {seq: random.Random(number) for number, seq in enumerate(batch.rows)}
        tight = batch.rows[0]
        if not goals:
            tight.objectives = Objectives()
        for _ in range(60):
            plan = StepPlan(500, 100)
            batch.scheduler.fill(plan, now)
            now += BASE + SLOPE * sum(work.count for work in plan.work)
            for work in plan.work:
                accepted, draw = 0, draws[work.seq]
                for drafted in (*work.draft, None):  # the text mostly goes round
                    goes_on = draw.random() < 0.72
                    work.seq.tokens.append(work.seq.tokens[-1] % 4 + 1 if goes_on else draw.randint(1, 4))
                    if work.seq.tokens[-1] != drafted:
                        break
                    accepted += 1
                work.seq.computed = len(work.seq.tokens) - 1
                if work.draft:
                    batch.scheduler.verified(work.seq, len(work.draft), accepted)
        return now / (len(tight.tokens) - tight.start - 1)

    assert tpot_with(goals=True) <= 0.020 < tpot_with(goals=False)
