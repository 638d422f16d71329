"""Room for more important requests that came lately: kept where there is any, and as far as such requests take it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.tpot_bound import DECODE_SHARE, HORIZON, LATELY, MIXED_SHARE, YIELD_SHARE, TpotBound
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from serving.messages import Role, Slo
from serving.step_cost import StepCost
from tests.decode.test_tpot_bound import row
from tests.decode.workers import Worker
from tests.fakes.sequences import make_order

COST = StepCost(fixed=0.012, token=0.0001, sequence=0.0005, samples=50)  # 12 + 0.6·rows ms
ALONE = 12.6
MOST = 40


def bound_of(share: float = DECODE_SHARE, cost: StepCost = COST) -> TpotBound:
    return TpotBound(lambda: cost, share, prompts=True)


def decoding(tpot_ms: float | None = None, priority: int = 0, tokens: int = 1) -> SequenceState:
    """A text of so many tokens so far."""
    seq = row(tpot_ms, priority=priority, max_tokens=1000)
    seq.tokens += [0] * tokens
    return seq


def asks(
    bound: TpotBound,
    held: list[SequenceState],
    now: float,
    tpot_ms: float | None = None,
    priority: int = 0,
    max_tokens: int = 200,
) -> bool:
    order = make_order([1] * 10, slo=Slo(tpot_ms=tpot_ms), priority=priority, max_tokens=max_tokens)
    try:
        bound.check(order, held, now)
    except NoRoom:
        return False
    return True


def admitted(bound: TpotBound, now: float, max_tokens: int = 200) -> int:
    """Of MOST leases of no importance, one after the other."""
    held: list[SequenceState] = []
    while len(held) < MOST and asks(bound, held, now, 100.0, max_tokens=max_tokens):
        held.append(decoding(100.0))
    return len(held)


def comes_and_goes(bound: TpotBound, now: float, tokens: int, tpot_ms: float = 25.0, claims: int = 200) -> None:
    """A more important request, on a worker that is idle."""
    assert asks(bound, [], now, tpot_ms, priority=-1, max_tokens=claims)
    bound.ended(decoding(tpot_ms, priority=-1, tokens=tokens), now + tokens * tpot_ms / 1e3)


@settings(max_examples=150, deadline=None)
@given(
    share=st.sampled_from([DECODE_SHARE, MIXED_SHARE]),
    tpot_ms=st.floats(5.0, 90.0),
    tokens=st.integers(1, 1000),
    claims=st.integers(1, 1000),
    after=st.floats(0.0, 2 * LATELY),
)
def test_one_request_closes_nothing_once_it_is_over(
    share: float, tpot_ms: float, tokens: int, claims: int, after: float
) -> None:
    """It says of no other that it will come; while it runs it is counted as what it is."""
    bound = bound_of(share)
    comes_and_goes(bound, 0.0, tokens, tpot_ms, claims)
    assert admitted(bound, tokens * tpot_ms / 1e3 + after) == MOST


def test_room_is_kept_in_proportion_to_what_such_requests_took() -> None:
    for tokens, seconds in ((2, 2 / HORIZON), (HORIZON // 4, 0.25), (HORIZON, 1.0), (10 * HORIZON, 1.0)):
        bound, over = bound_of(), 0.001
        for _ in range(2):
            assert asks(bound, [], 0.0, 25.0, priority=-1)
        for _ in range(2):
            bound.ended(decoding(25.0, priority=-1, tokens=tokens), 0.0)
        assert admitted(bound, LATELY * seconds - over) < MOST
        assert admitted(bound, LATELY * seconds + over) == MOST


def test_what_they_took_is_forgotten() -> None:
    """Two tokens whenever the room kept for the last would be over come to no more in the end."""
    bound, now = bound_of(), 0.0
    for _ in range(500):
        comes_and_goes(bound, now, tokens=2)
        now += 0.95 * LATELY
    assert admitted(bound, now - 0.95 * LATELY + 1.0) == MOST


def test_a_stream_of_them_finds_room() -> None:
    bound = bound_of()
    for second in range(20):
        comes_and_goes(bound, float(second), tokens=30, tpot_ms=30.0)
    assert 1 <= admitted(bound, 25.0) < 12


@pytest.mark.parametrize("share", [DECODE_SHARE, MIXED_SHARE])
def test_room_is_kept_only_where_there_is_any(share: float) -> None:
    """At the threshold less important leases are held to, not at the objective itself."""
    least = ALONE / (share * YIELD_SHARE)
    for tpot_ms, kept in ((0.99 * least, False), (1.01 * least, True)):
        bound = bound_of(share)
        for second in range(20):
            comes_and_goes(bound, float(second), tokens=HORIZON // 2, tpot_ms=tpot_ms, claims=1)
        assert (admitted(bound, 20.0, max_tokens=1) < MOST) is kept


def test_beside_one_that_runs_its_whole_objective_counts_where_there_is_none_to_keep() -> None:
    bound, tight, wide = bound_of(), decoding(15.0, -1), decoding(30.0, -1)
    assert asks(bound, [tight], 0.0), "13.2 ms of 13.5"
    assert not asks(bound, [tight, decoding()], 0.0), "which it is due"
    assert asks(bound, [wide, *[decoding()] * 9], 0.0) and not asks(bound, [wide, *[decoding()] * 12], 0.0)
    assert asks(bound, [wide, *[decoding()] * 12], 0.0, priority=-1)


def test_who_is_refused_for_the_sake_of_its_equals_counts_for_nothing() -> None:
    bound, peers = bound_of(), [decoding(30.0, -1) for _ in range(30)]
    assert not asks(bound, peers, 0.0, 30.0, priority=-1)
    assert admitted(bound, 0.1, max_tokens=1) == MOST


def test_who_is_kept_out_waits_in_proportion_to_what_it_asks_for() -> None:
    """However often it asks."""
    bound, batch = bound_of(), [decoding(None) for _ in range(30)]
    for _ in range(200):
        assert not asks(bound, batch, 0.0, 25.0, priority=-1, max_tokens=2)
    assert not asks(bound, batch, 0.29) and asks(bound, batch, 0.31)
    assert not asks(bound, batch, 0.31, max_tokens=2)
    assert asks(bound, [], 1.0, 25.0, priority=-1, max_tokens=2), "it has found room"
    assert asks(bound, batch, 1.1, max_tokens=2)


async def test_a_worker_tells_what_leases_took_and_not_what_it_refused() -> None:
    worker = Worker(Role.DECODE, blocks=8)
    worker.decode.room.bound = bound = bound_of()
    session, slo = await worker.session(), Slo(tpot_ms=25.0)
    await worker.lease(session, [1] * 20, "r/0")
    with pytest.raises(NoRoom, match="blocks"):
        await worker.lease(session, [1] * 20, "r/1", slo=slo)
    session.cancel("r/0")
    await worker.lease(session, [1] * 20, "r/2", slo=slo)
    (held,) = worker.decode.sequences()
    held.tokens += [0] * 7
    assert bound._lately[0, 0.025].drawn == 0.0
    session.cancel("r/2")
    assert bound._lately[0, 0.025].drawn == 7.0
    await session.close()
    assert worker.idle()


def test_without_room_for_a_longer_context_none_is_kept() -> None:
    for context, kept in ((1e-5, True), (2e-5, False)):
        bound = bound_of(cost=replace(COST, context=context))
        usually = admitted(bound, 0.0)
        for second in range(20):
            comes_and_goes(bound, float(second), tokens=HORIZON, claims=200)
        assert (admitted(bound, 21.0) < usually) is kept
