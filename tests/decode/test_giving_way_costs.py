"""What leases that give way must not cost: nothing is ended for a newcomer that gets no room, or for one behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from decode.giving_way import giving_way
from decode.leases import Lease
from serving.engine.ageing import level_of
from serving.errors import DeadlineExceeded, InvalidRequest, MillraceError, NoRoom, Retryable, WorkerLost
from serving.messages import PrefillOrder, Role
from tests.decode.workers import Worker
from tests.fakes.sequences import lease_id, make_order, make_sequence

PROMPT = list(range(10))  # three blocks with the token that follows
LATE = {"first_token_in": -1.0}


def lease(name: str, reserved: int, first_token_in: float | None = -1.0, now: float = 0.0, **fields: object) -> Lease:
    seq = make_sequence(None, PROMPT, stays=True, first_token_in=first_token_in, now=now, **fields)
    seq.reserved = reserved
    return Lease(lease_id(name), "session", seq, [0])


# ---- ended for nothing ---------------------------------------------------------------------------------------------


async def test_nobody_is_ended_for_one_that_finds_no_blocks_all_the_same() -> None:
    """All sequences are taken, and one place would do; but its blocks would not."""
    worker = Worker(Role.DECODE, blocks=12, seqs=3)
    session = await worker.session()
    await worker.lease(session, PROMPT, "r/1", **LATE)
    for name in ("r/2", "r/3"):
        await worker.lease(session, PROMPT, name, first_token_in=1.0)
    with pytest.raises(NoRoom):
        await worker.lease(session, list(range(100, 126)), "r/4", first_token_in=1.0)  # seven blocks; six are to be had
    assert worker.decode.counters()["leases_gave_way"] == 0.0 and not worker.events
    assert "r/1" in worker.decode.table.leases


@pytest.mark.parametrize(
    "prompt, name, fields, error",
    [
        (list(range(100, 110)), "r/4", {"ends_in": 0.0}, DeadlineExceeded),
        (list(range(100, 260)), "r/4", {}, MillraceError),  # longer than the context
        (list(range(100, 110)), "r/2", {}, InvalidRequest),  # a lease that is open
    ],
    ids=["deadline", "context", "open"],
)
async def test_nobody_is_ended_for_an_order_that_is_refused(
    prompt: list[int], name: str, fields: dict[str, float], error: type[MillraceError]
) -> None:
    worker = Worker(Role.DECODE, seqs=2)
    session = await worker.session()
    await worker.lease(session, PROMPT, "r/1", **LATE)
    await worker.lease(session, PROMPT, "r/2", first_token_in=1.0)
    with pytest.raises(error):
        await worker.lease(session, prompt, name, first_token_in=1.0, **fields)
    assert "r/1" in worker.decode.table.leases and not worker.events


# ---- who -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective, now", [(6.0, 34.0), (35.0, 36.0)])
def test_a_prompt_that_goes_before_the_newcomer_does_not_give_way_to_it(objective: float, now: float) -> None:
    """It has waited AGE: the order of prompts has raised it by a class, so that nobody starves."""
    old = lease("old", 3, objective, now=0.0)
    order = make_order(PROMPT, lease=lease_id("new"), first_token_in=objective)
    new = make_sequence(None, PROMPT, first_token_in=objective, now=now)
    assert old.seq.objectives.due < now and level_of(old.seq, now) < level_of(new, now)
    assert giving_way(order, [old], 3, now) == []


@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_nobody_gives_way_to_what_is_due_at_no_time(left: float) -> None:
    assert giving_way(make_order(PROMPT, first_token_in=left), [lease("late", 3)], 3, 0.0) == []


# ---- a prefill of the lease, in this worker ------------------------------------------------------------------------


class Asking:
    """A KV pool that has not answered yet (prefill.worker.Prefixes)."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def bring(self, seq: object, begun: Callable[[], None]) -> None:
        self.asked.set()
        await self.answer.wait()


async def test_a_prefill_whose_lease_gave_way_does_not_say_that_its_worker_is_lost() -> None:
    worker = Worker(Role.MIXED, blocks=4)
    worker.prefill.prefixes = asking = Asking()
    session = await worker.session()
    order = make_order(PROMPT, lease=worker.fence("r/1"), **LATE)
    grant = await session.open(order)
    running = asyncio.create_task(anext(worker.prefill.run(PrefillOrder(order=order, grant=grant))))
    await asking.asked.wait()
    await worker.lease(session, PROMPT, "r/2", first_token_in=1.0)
    assert [event.lease for event in worker.events] == ["r/1"]
    asking.answer.set()
    with pytest.raises(Retryable) as told:
        await running
    assert not isinstance(told.value, WorkerLost), "routers suspect the worker, and the request of having killed it"


async def test_a_worker_never_holds_more_sequences_than_it_may_though_time_passes_meanwhile() -> None:
    """The one that may give way has been late for LONGEST just between the first look and the second."""
    worker = Worker(Role.DECODE, seqs=2)
    session = await worker.session()
    await worker.lease(session, PROMPT, "r/1", **LATE)
    await worker.lease(session, PROMPT, "r/2", first_token_in=100.0)
    times = iter([28.999999] + [29.0] * 100)  # the first was due at -1
    worker.engine.clock = lambda: next(times)
    with suppress(NoRoom):
        await worker.lease(session, PROMPT, "r/3", first_token_in=1.0)
    assert len(worker.decode.table.leases) <= 2


async def test_a_late_request_of_one_router_keeps_no_one_in_time_of_another_back() -> None:
    """What is refused claims the next room (decode.turns): late leases' room was never to be that."""
    worker = Worker(Role.DECODE, seqs=3)
    one, other = await worker.session(), await worker.session()
    for number in range(3):
        await worker.lease(one, PROMPT, f"a/{number}", **LATE)
    with pytest.raises(NoRoom):
        await worker.lease(other, PROMPT, "b/1", **LATE)
    await worker.lease(one, PROMPT, "a/4", first_token_in=1.0)
    assert "a/4" in worker.decode.table.leases
