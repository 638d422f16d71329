"""Whether a model drafts: it pays for its own time, for what it has to catch up on, and for no one's patience."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.model_drafts import BELIEVED, COSTS, FEWEST_COSTS, AcceptedShare, ModelDrafts, ProposingCost
from decode.scheduler import DraftOrOverlap
from decode.speculation import RARE, Speculation
from serving.engine.plan import StepPlan, StepRecord, Work
from serving.engine.proposed import CLOSE, PROMISED, Proposing
from serving.engine.proposer import Proposer
from serving.engine.sequence import SequenceState
from serving.step_cost import StepLoad
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_decoding, make_kv

BASE, SLOPE = 0.010, 0.0001  # seconds of a step, and of a token in it


class Told(Proposer):
    """Has so much to catch up on, and room for so many."""

    method = "told"

    def __init__(self, behind: int = 0, room: int = 8):
        self._behind, self._room = behind, room

    def behind(self, seq: SequenceState) -> int:
        return self._behind

    def room(self, seq: SequenceState) -> int:
        return self._room

    def propose(self, work: Sequence[Work]) -> Proposing:
        raise AssertionError("a scheduler only reserves")


def speculation(proposer: Told, draft: float = 0.0, backlog: float = 0.0) -> Speculation:
    made = Speculation(4, proposer)
    for size in (1, 2, 8, 32):
        made.cost.observe(size, BASE + SLOPE * size)
    for _ in range(FEWEST_COSTS):
        made.proposing.observe(Proposing(draft, 1, backlog, 1))
    return made


def drafts_of(proposer: Told, accepted: float, max_tokens: int = 200) -> ModelDrafts:
    seq = make_sequence(make_kv(8, 4), [1, 2, 3], max_tokens=max_tokens)
    return ModelDrafts(seq, proposer, accepted)


@given(st.floats(0.0, 1.0), st.floats(1e-6, 0.1), st.integers(1, 64))
def test_a_draft_pays_for_the_model_that_makes_it(accepted: float, draft: float, batch: int) -> None:
    """A token drafted and accepted saves a token's worth of a step; drafting one costs `draft` and a token more."""
    proposer = Told()
    made, drafts = speculation(proposer, draft), drafts_of(proposer, accepted)
    drafts.rest = RARE
    step = BASE + SLOPE * batch
    gain = accepted * step / batch - SLOPE - draft
    if abs(gain) > 1e-6:
        assert bool(made.draft(drafts, [1, 2, 3], 4, batch)) == (gain > 0)


def test_places_are_promised_as_far_as_there_is_room() -> None:
    proposer = Told(room=2)
    assert speculation(proposer).draft(drafts_of(proposer, 1.0), [1], 9, 1) == [PROMISED] * 2


@pytest.mark.parametrize(("left", "drafted"), [(20, 0), (400, 4)])
def test_a_backlog_is_computed_only_where_the_text_can_still_repay_it(left: int, drafted: int) -> None:
    """1,000 tokens at 1 ms are a second; at 0.9 accepted, drafts save 9 ms each."""
    proposer = Told(behind=1000)
    made = speculation(proposer, backlog=0.001)
    assert len(made.draft(drafts_of(proposer, 0.9, left), [1], 9, 1)) == drafted
    close = Told(behind=CLOSE)
    assert len(made.draft(drafts_of(close, 0.9, left), [1], 9, 1)) == 4, "what goes with the draft is no backlog"


def test_trials_are_as_rare_as_they_are_dear() -> None:
    proposer = Told(behind=1000)
    made, drafts = speculation(proposer, draft=0.02, backlog=0.0001), drafts_of(proposer, 0.0)
    tried = [i for i in range(1000) if made.draft(drafts, [1], 9, 1)]
    trial, step = 1000 * 0.0001 + 0.02, BASE + SLOPE
    assert tried == [i for i in range(1000) if i % int(RARE * trial / step) == 0]


def test_a_new_sequence_expects_what_others_have_seen() -> None:
    proposer = Told()
    made = speculation(proposer, draft=0.005)
    known = drafts_of(proposer, 0.5)
    for _ in range(400):
        made.verified(known, 4, 0)
    fresh = made.begin(known.seq, 1)
    assert fresh.accepted < 0.02 and fresh.rest == RARE
    assert made.draft(fresh, [1], 9, 1) == [], "not even at first"


def test_what_the_model_takes_is_no_part_of_what_a_step_takes() -> None:
    made = Speculation(4, Told())
    for size in (1, 2, 8, 32):
        took = Proposing(drafting_seconds=0.5, drafted=5)
        step = BASE + SLOPE * size + 0.5
        made.measured(StepRecord(began=0.0, load=StepLoad(size), step_seconds=step, proposing=took, **ZEROS))
    assert made.cost.seconds(4) == pytest.approx(BASE + 4 * SLOPE)
    assert made.proposing.draft == pytest.approx(0.1)


ZEROS = {"schedule_seconds": 0.0, "batch_seconds": 0.0, "forward_seconds": 0.0, "sample_seconds": 0.0}


@pytest.mark.parametrize(("seconds", "gain"), [(0.0, 1.0), (0.01, 0.0), (0.03, -0.5)])
def test_overlapping_is_weighed_against_drafts_with_their_cost(seconds: float, gain: float) -> None:
    """Each of four sequences has one draft accepted: twice the tokens, in steps that last so much longer."""
    choice = DraftOrOverlap()
    for _ in range(200):
        choice.began(4)
        choice.accepted = 4
        took = Proposing(drafting_seconds=seconds, drafted=4)
        record = StepRecord(began=0.0, load=StepLoad(8), step_seconds=0.01 + seconds, proposing=took, **ZEROS)
        choice.measured(record)
    assert choice.gain == pytest.approx(gain, abs=1e-6)


def test_the_scheduler_plans_promises_and_counts_them() -> None:
    kv = make_kv(16, 4)
    scheduler = make_decoding(kv, drafts=3)
    assert scheduler.speculation is not None
    scheduler.speculation.proposer = Told()
    seq = make_sequence(kv, [1, 2, 3, 4, 5], max_tokens=50)
    kv.open(seq)
    seq.computed, seq.prefill.handoff = 4, None
    scheduler.add(seq)
    plan = StepPlan(64, 8)
    scheduler.fill(plan, 0.0)
    (work,) = plan.work
    assert work.promised and work.count == 1 + len(work.draft) == 4
    work.fill_in((7,))
    assert (work.count, work.tokens, work.promised) == (2, [5, 7], False)


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.0, 1.0)), max_size=40), st.floats(0.0, 1.0))
def test_a_share_lies_between_what_was_expected_and_what_was_seen(seen: list[tuple[int, float]], prior: float) -> None:
    share = AcceptedShare(0.9, prior)
    for drafted, right in seen:
        share.observe(drafted, round(drafted * right))
    rights = [(drafted, round(drafted * right)) for drafted, right in seen]
    rates = [prior, *(right / min(drafted, right + 1) for drafted, right in rights)]
    assert min(rates) - 1e-9 <= share.value <= max(rates) + 1e-9


def test_a_few_right_trials_are_enough_to_draft() -> None:
    """Drafts pay from 0.75 accepted on: three single tokens, all of them right, tell that they do."""
    proposer = Told()
    made, drafts = speculation(proposer, draft=0.0075), drafts_of(proposer, 0.5)
    trials = 0
    while not made.depth(drafts.accepted, 1, 4):
        if made.draft(drafts, [1], 9, 1):
            trials += 1
            made.verified(drafts, 1, 1)
    assert 3 <= trials <= 5


@given(st.lists(st.floats(0.001, 0.002), min_size=2, max_size=3 * COSTS), st.data())
def test_one_slow_step_does_not_end_drafts(seconds: list[float], data: st.DataObject) -> None:
    """Neither the first, in which much is made ready, nor one that the machine held up."""
    seconds.insert(data.draw(st.integers(0, len(seconds))), 10.0)
    cost = ProposingCost()
    for number, took in enumerate(seconds, 1):
        cost.observe(Proposing(took, 1, 2 * took, 1))
        known = number >= FEWEST_COSTS
        assert 0.001 * known <= cost.draft <= 0.002 and 0.002 * known <= cost.backlog <= 0.004


def test_what_was_too_dear_to_catch_up_on_is_looked_at_again() -> None:
    """The machine was busy when it was measured; as drafts did not pay then, nothing is measured any more."""
    proposer = Told(behind=1000)
    made, drafts = speculation(proposer, backlog=0.01), drafts_of(proposer, 0.9, 400)
    steps = 0
    while not made.draft(drafts, [1], 9, 1):
        took = BASE + SLOPE
        made.measured(StepRecord(began=0.0, load=StepLoad(1), step_seconds=took, **ZEROS))
        steps += 1
        assert steps * took < BELIEVED * 0.01 + 2 * took
    assert steps * took >= BELIEVED * 0.01
