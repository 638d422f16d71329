"""Leases that would make steps too long for a TPOT objective are refused, for others' sake and never in vain."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.tpot_bound import HORIZON, LATELY, MOST_REMEMBERED, LeaseBound, TpotBound
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from serving.messages import Role, Slo
from serving.step_cost import StepCost, StepLoad
from tests.decode.workers import Worker
from tests.fakes.sequences import make_order, make_sequence

COST = StepCost(fixed=0.01, token=0.001, sequence=0.001, samples=50)  # 10 + 2·rows ms


def row(tpot_ms: float | None = None, tokens: int = 10, **fields: Any) -> SequenceState:
    return make_sequence(None, [1] * tokens, slo=Slo(tpot_ms=tpot_ms), stays=True, **fields)


def refused(
    held: list[SequenceState],
    tpot_ms: float | None = None,
    cost: StepCost | None = COST,
    prompts: bool = False,
    **fields: Any,
) -> bool:
    bound: LeaseBound = TpotBound(lambda: cost, share=1.0, prompts=prompts)
    try:
        bound.check(make_order([1] * 10, slo=Slo(tpot_ms=tpot_ms), **fields), held, now=0.0)
    except NoRoom as error:
        assert error.code == "tpot"
        return True
    return False


@pytest.mark.parametrize(("rows", "expected"), [(9, False), (10, True)])
def test_a_lease_is_refused_that_would_break_those_who_run(rows: int, expected: bool) -> None:
    """Thirty milliseconds are ten sequences."""
    assert refused([row(30.0), *(row() for _ in range(rows - 1))]) is expected


def test_its_own_objective_counts_too() -> None:
    held = [row() for _ in range(10)]
    assert refused(held, tpot_ms=30.0) and not refused(held, tpot_ms=40.0) and not refused(held)


def test_its_own_objective_does_not_count_where_it_could_not_be_met_at_all() -> None:
    assert not refused([row()], tpot_ms=5.0)
    assert refused([row(5.0), *(row(30.0) for _ in range(10))]), "as for others"
    assert not refused([row(5.0)])


def test_nobody_is_refused_by_a_worker_that_holds_nothing() -> None:
    assert not refused([], tpot_ms=1.0)


def test_room_is_kept_for_more_important_requests_like_those_that_came_lately() -> None:
    bound, batch = TpotBound(lambda: COST, share=1.0), [row(priority=1) for _ in range(10)]

    def asks(now: float, priority: int, tpot_ms: float | None = None) -> bool:
        try:
            bound.check(make_order([1] * 10, slo=Slo(tpot_ms=tpot_ms), priority=priority), batch, now)
        except NoRoom:
            return False
        return True

    assert asks(0.0, 1), "nobody was there whom it could break"
    assert not asks(1.0, 0, 30.0), "ten are too many for this one"
    assert not asks(2.0, 1), "and the next of its kind is to find room"
    assert asks(2.0, 0) and asks(2.0, -1), "but not at the cost of those as important"
    assert not asks(LATELY + 0.9, 1) and asks(LATELY + 1.1, 1)


def test_room_is_left_beside_more_important_requests_that_run() -> None:
    """Else the next of them would have to wait until a text ends."""
    held = [row(30.0) for _ in range(6)]
    assert not refused(held, tpot_ms=30.0) and not refused(held)
    assert refused(held, priority=1) and not refused(held[:4], priority=1)


def test_what_is_remembered_of_them_is_bounded() -> None:
    bound = TpotBound(lambda: COST, share=1.0)
    for number in range(10 * MOST_REMEMBERED):
        bound.check(make_order([1] * 10, slo=Slo(tpot_ms=30.0 + number), priority=-number), [], now=float(number))
    assert len(bound._lately) == MOST_REMEMBERED


def test_a_text_that_has_begun_is_not_refused() -> None:
    held = [row(30.0) for _ in range(20)]
    assert refused(held) and not refused(held, generated=[1, 2])


@pytest.mark.parametrize("cost", [None, replace(COST, samples=0)])
def test_without_a_model_nobody_is(cost: StepCost | None) -> None:
    assert not refused([row(30.0) for _ in range(20)], cost=cost)


def test_nobody_is_refused_for_the_sake_of_the_less_important() -> None:
    held = [row(30.0, priority=1) for _ in range(20)]
    assert not refused(held) and refused(held, priority=1) and refused(held, priority=2)


def test_nor_for_who_has_missed_its_objectives_already() -> None:
    held = [row(30.0, first_token_in=1.0) for _ in range(20)]
    for seq in held:
        seq.tokens.append(0)
        seq.objectives.begin(11, 0, 0.9)
    assert refused(held)
    for seq in held:
        seq.objectives.begin(11, 0, 1.1)
    assert not refused(held)


def test_prompts_that_are_late_elsewhere_keep_nobody_out_until_they_decode() -> None:
    """A queue of late prompts, computed last of all, would keep a decode worker idle for as long as it lasts."""
    waiting = [row(30.0, first_token_in=left) for left in [1.0] * 20]
    assert refused(waiting, tpot_ms=30.0)
    late = [row(30.0, first_token_in=-1.0) for _ in range(20)]
    assert not refused(late, tpot_ms=30.0)
    for seq in late:
        seq.tokens.append(0)
    assert refused(late, tpot_ms=30.0)
    moved = [row(30.0, first_token_in=-1.0, generated=[1]) for _ in range(20)]
    assert refused(moved, tpot_ms=30.0), "texts that go on are due at every moment, and soon run"


def test_their_kv_is_taken_to_grow() -> None:
    cost = replace(COST, context=1e-5)
    assert not refused([row(25.0, max_tokens=1)], cost=cost, max_tokens=1)
    assert not refused([row(25.0, tokens=700, max_tokens=1)], cost=cost, max_tokens=1)
    assert refused([row(25.0, tokens=700, max_tokens=2000)], cost=cost, max_tokens=2000)
    assert not refused([row(25.0, tokens=700, max_tokens=2000)], cost=cost, max_tokens=1), "but not without end"
    assert HORIZON < 2000


def test_prompts_that_are_computed_here_wait_for_their_turn() -> None:
    held = [row(30.0) for _ in range(20)]
    assert refused(held) and not refused(held, prompts=True)
    for seq in held[:10]:
        seq.tokens.append(0)
    assert refused(held, prompts=True) and not refused(held[1:], prompts=True)


def test_prompts_that_are_computed_elsewhere_count_by_the_share_of_leases_that_decode() -> None:
    """Thirty milliseconds are ten sequences: five that decode and ten that wait, of which a third would at a time."""
    held = [row(30.0) for _ in range(15)]
    for seq in held[:5]:
        seq.tokens.append(0)
    assert refused(held), "nothing is known of their share yet"
    bound, order = TpotBound(lambda: COST, share=1.0), make_order([1] * 10, slo=Slo(tpot_ms=30.0))
    for second in range(60):
        with suppress(NoRoom):
            bound.check(order, held, float(second))
    bound.check(order, held, 60.0)
    with pytest.raises(NoRoom):
        bound.check(order, held * 2, 60.0)


@settings(max_examples=200, deadline=None)
@given(
    tpots=st.lists(st.one_of(st.none(), st.floats(5.0, 200.0)), min_size=1, max_size=20),
    own=st.one_of(st.none(), st.floats(5.0, 200.0)),
    context=st.sampled_from([0.0, 1e-6, 1e-5]),
)
def test_whoever_is_admitted_leaves_every_objective_that_can_be_met(
    tpots: list[float | None], own: float | None, context: float
) -> None:
    cost = replace(COST, context=context)
    held = [row(tpot, tokens=10 * n + 1, max_tokens=1) for n, tpot in enumerate(tpots)]
    lengths = [len(seq.tokens) + 1 for seq in held] + [11]
    step = cost.seconds(StepLoad(len(lengths), sum(lengths), len(lengths), sum(lengths)))
    met = [
        tpot is None or cost.seconds(StepLoad(1, length, 1, length)) > tpot / 1e3 or step <= tpot / 1e3
        for tpot, length in zip([*tpots, own], lengths, strict=True)
    ]
    assert refused(held, own, cost=cost, max_tokens=1) is not all(met)


async def test_a_worker_counts_whom_it_refuses_and_takes_them_once_there_is_room() -> None:
    worker = Worker(Role.DECODE)
    worker.decode.room.bound = TpotBound(lambda: COST, share=1.0)
    session = await worker.session()
    await worker.lease(session, [1], "r/0", slo=Slo(tpot_ms=14.5))
    await worker.lease(session, [1], "r/1")
    with pytest.raises(NoRoom, match="it may take 14 ms"):
        await worker.lease(session, [1], "r/2")
    assert worker.decode.counters()["leases_refused/tpot"] == 1.0
    session.cancel("r/1")
    await worker.lease(session, [1], "r/2")
    await session.close()
    assert worker.idle()
