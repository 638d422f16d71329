"""What has passed its deadline is ended, wherever in a worker it is, and nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from decode.deadlines import Deadlines
from kvcache.handoff.chunk import sealed_commit
from serving.errors import DeadlineExceeded, StaleLease
from serving.links import LeaseEvent
from serving.messages import LeaseGrant, PrefillOrder, Role
from tests.decode.test_worker import PROMPT, chunk, hand_over
from tests.decode.workers import Worker
from tests.fakes.sequences import lease_id, make_order
from tests.prefill.test_worker import Prefill, order

SOON = 0.05  # seconds


class Told:
    """Waits for what a session is told."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[LeaseEvent] = asyncio.Queue()

    def __call__(self, events: Sequence[LeaseEvent]) -> None:
        for event in events:
            self.events.put_nowait(event)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker(Role.DECODE)
    yield made
    for session in list(made.decode.sessions.values()):
        await session.close()
    assert made.idle() and made.kv.unaccounted([]) == 0 and made.decode.deadlines.watched == 0


@pytest.mark.parametrize("decoding", [False, True])
async def test_a_lease_ends_with_its_deadline_be_it_filling_or_running(worker: Worker, decoding: bool) -> None:
    told = Told()
    session = await worker.decode.connect("router", told, lambda error: None)
    grant = await worker.lease(session, PROMPT, ends_in=SOON, max_tokens=99)
    if decoding:
        await hand_over(worker, grant, PROMPT)
        worker.step()
        assert (await told.events.get()).delta is not None
    else:
        await worker.decode.receive(chunk(grant.lease, 0, 4))
    event = await told.events.get()
    assert isinstance(event.error, DeadlineExceeded) and (event.lease, event.epoch) == ("r/1", 0)
    assert worker.idle() and worker.decode.expired == 1, "everything is free at once"
    with pytest.raises(StaleLease):
        await worker.decode.commit(sealed_commit(grant.lease, 1))
    worker.step()
    assert told.events.empty()


async def test_a_lease_that_begins_anew_has_a_new_deadline(worker: Worker) -> None:
    told = Told()
    session = await worker.decode.connect("router", told, lambda error: None)
    await worker.lease(session, PROMPT, ends_in=SOON)
    await worker.lease(session, PROMPT, "r/2", ends_in=SOON)
    await session.advance(make_order(PROMPT, lease=worker.fence(epoch=1)))
    assert (await told.events.get()).lease == "r/2", "the first has none any more"
    assert len(worker.decode.table.leases) == 1 and worker.decode.deadlines.watched == 0


async def test_nothing_is_held_for_what_is_over_already(worker: Worker) -> None:
    session = await worker.session()
    with pytest.raises(DeadlineExceeded):
        await worker.lease(session, PROMPT, ends_in=0.0)
    await worker.lease(session, PROMPT)
    with pytest.raises(DeadlineExceeded):
        await session.advance(make_order(PROMPT, lease=worker.fence(epoch=1), ends_in=-1.0))
    assert worker.idle() and worker.decode.deadlines.watched == 0


async def test_an_ended_lease_is_watched_no_more(worker: Worker) -> None:
    session = await worker.session()
    await worker.lease(session, PROMPT, ends_in=99.0)
    assert worker.decode.deadlines.watched == 1
    session.cancel("r/1")
    assert worker.decode.deadlines.watched == 0


async def test_a_timer_counts_from_when_it_was_set_last() -> None:
    passed: asyncio.Queue[str] = asyncio.Queue()
    deadlines = Deadlines(passed.put_nowait)
    deadlines.watch("a", 0.0)
    deadlines.watch("b", SOON)
    deadlines.watch("a", 2 * SOON)
    deadlines.watch("c", 0.0)
    deadlines.forget("c")
    assert [await passed.get(), await passed.get()] == ["b", "a"] and deadlines.watched == 0


# ---- prefills ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    made = Prefill()
    yield made
    if made.loop._thread is not None:
        await made.loop.stop()
    assert made.idle() and made.kv.unaccounted([]) == 0


async def run(worker: Prefill, wanted: PrefillOrder) -> int:
    """How many answers came before the run ended."""
    answers = 0
    with pytest.raises(DeadlineExceeded):
        async for _ in worker.prefill.run(wanted):
            answers += 1
    return answers


@pytest.mark.parametrize("granted", [False, True])
async def test_a_queued_prompt_leaves_the_queue_with_its_deadline(prefill: Prefill, granted: bool) -> None:
    """The engine does not run: it would wait for ever."""
    assert await run(prefill, order(granted=granted, ends_in=SOON)) == 0
    assert prefill.prefilling.queue == [] and prefill.prefill.expired == 1


async def test_a_handoff_that_is_stuck_ends_with_the_deadline(prefill: Prefill) -> None:
    prefill.start()
    prefill.link.gate.clear()
    assert await run(prefill, order(ends_in=10 * SOON)) == 1, "the first token had come"
    assert prefill.link.closed == 1 and prefill.link.committed == []


async def test_a_prompt_that_is_over_already_is_not_computed(prefill: Prefill) -> None:
    prefill.start()
    assert await run(prefill, order(ends_in=-1.0)) == 0
    assert prefill.runner.counts == []


async def test_a_prompt_of_a_lease_of_its_own_ends_with_it() -> None:
    """A mixed worker: both who wait for the prefill and who wait for tokens are told."""
    worker, told = Worker(Role.MIXED), Told()
    session = await worker.decode.connect("router", told, lambda error: None)
    grant: LeaseGrant = await worker.lease(session, PROMPT, ends_in=SOON)
    wanted = PrefillOrder(order=make_order(PROMPT, lease=worker.fence(), ends_in=SOON), grant=grant)
    with pytest.raises(DeadlineExceeded):
        async for _ in worker.prefill.run(wanted):
            raise AssertionError("the engine does not run")
    assert isinstance((await told.events.get()).error, DeadlineExceeded)
    assert worker.idle() and worker.prefilling.queue == []


async def test_a_deadline_that_does_not_pass_changes_nothing(prefill: Prefill) -> None:
    prefill.start()
    answers = [answer async for answer in prefill.prefill.run(order(ends_in=99.0))]
    assert len(answers) == 1 and prefill.link.committed == [
        (lease_id("r/1", 2, "decode-life"), answers[0].delta.tokens[0])
    ]
