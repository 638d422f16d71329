"""A prompt that its class sheds or degrades ends when it is late: not before, and not while it is computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefill.worker import LOOK_SECONDS, RESTED_LOOKS
from serving.engine.ageing import ends_late
from serving.engine.sequence import SequenceState
from serving.errors import LATE, Preempted
from serving.messages import PrefillOrder, Role
from tests.decode.workers import Worker
from tests.fakes.loop_time import passing_time
from tests.fakes.sequences import make_order
from tests.prefill.test_worker import Prefill, order

PROMPT = list(range(10))
DUE = 6.0  # seconds
RESTED = (RESTED_LOOKS - 1) * LOOK_SECONDS
HANGS = 30.0  # seconds
WANTED = {"first_token_in": DUE, "sheddable": True}


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    made = Prefill()
    yield made
    assert made.idle() and made.kv.unaccounted([]) == 0


@given(left=st.one_of(st.none(), st.floats()), sheddable=st.booleans(), generated=st.sampled_from([(), (1,)]))
@example(left=0.0, sheddable=True, generated=())
@example(left=inf, sheddable=True, generated=())
def test_only_what_may_be_shed_and_is_not_late_yet(
    left: float | None, sheddable: bool, generated: tuple[int, ...]
) -> None:
    wanted = make_order(PROMPT, first_token_in=left, sheddable=sheddable, generated=generated)
    assert ends_late(wanted) is (sheddable and not generated and left is not None and 0.0 < left < inf)


async def rest() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Asked:
    """A prompt that is sent to a worker whose engine the test steps."""

    def __init__(self, worker: Prefill, granted: bool, **fields: Any):
        self.worker = worker
        self.let_pass: Callable[[float], None] = passing_time()
        self.running = asyncio.ensure_future(self._answers(order(granted=granted, **{**WANTED, **fields})))

    async def _answers(self, wanted: Any) -> int:
        return len([answer async for answer in self.worker.prefill.run(wanted)])

    async def passes(self, seconds: float) -> None:
        await rest()
        self.let_pass(seconds)
        await rest()

    async def is_looked_at(self, seconds: float) -> None:
        """As `passes`, a little more than one look after the other."""
        for _ in range(round(seconds / LOOK_SECONDS)):
            await self.passes(1.01 * LOOK_SECONDS)

    async def is_late(self) -> None:
        with pytest.raises(Preempted) as told:
            await asyncio.wait_for(self.running, HANGS)
        assert told.value.code == LATE
        assert self.worker.prefilling.queue == [] and self.worker.prefill.late == 1

    async def left(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        assert self.worker.prefill.late == 0


@pytest.mark.parametrize("granted", [False, True])
async def test_a_prompt_that_waits_ends_when_it_is_late(prefill: Prefill, granted: bool) -> None:
    asked = Asked(prefill, granted)
    await asked.passes(DUE / 2)
    assert not asked.running.done() and len(prefill.prefilling.queue) == 1
    await asked.passes(DUE)
    await asked.is_late()
    prefill.step()
    assert prefill.runner.counts == []


async def test_what_is_cached_of_it_was_not_computed_for_it(prefill: Prefill) -> None:
    """It is kept while the prompt waits."""
    before = Asked(prefill, granted=False)
    await rest()
    while not before.running.done():
        prefill.step()
        await rest()
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    assert prefill.prefilling.queue[0].computed == 8
    await asked.passes(DUE / 2 + LOOK_SECONDS / 2)
    assert asked.running.done()
    await asked.is_late()


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("fields", [{"sheddable": False}, {"first_token_in": -1.0}, {"generated": [7]}])
async def test_others_wait_on(prefill: Prefill, granted: bool, fields: dict[str, Any]) -> None:
    asked = Asked(prefill, granted, **fields)
    await asked.passes(3600.0)
    assert not asked.running.done()
    await asked.left()


@pytest.mark.parametrize("granted", [False, True])
async def test_what_has_begun_ends_once_it_rests(prefill: Prefill, granted: bool) -> None:
    """A chunk of it is computed; nothing may have been handed over yet."""
    asked = Asked(prefill, granted)
    await asked.passes(DUE / 2)
    prefill.step()
    assert prefill.prefill.sequences()[0].computed == 8
    await asked.passes(DUE)
    await asked.is_looked_at(RESTED - 2 * LOOK_SECONDS)
    assert not asked.running.done()
    await asked.is_looked_at(3 * LOOK_SECONDS)
    await asked.is_late()


@pytest.mark.parametrize("granted", [False, True])
async def test_what_is_in_a_step_does_not_end_however_long_it_lasts(prefill: Prefill, granted: bool) -> None:
    asked = Asked(prefill, granted)
    await asked.passes(DUE / 2)
    prefill.step()
    (seq,) = prefill.prefill.sequences()
    seq.in_flight += 1
    await asked.passes(DUE)
    await asked.is_looked_at(4 * RESTED)
    seq.in_flight -= 1
    await asked.is_looked_at(RESTED - 2 * LOOK_SECONDS)
    assert not asked.running.done(), "it rests from the end of the step on"
    seq.in_flight += 1
    await asked.is_looked_at(LOOK_SECONDS)
    seq.in_flight -= 1
    await asked.is_looked_at(RESTED - 2 * LOOK_SECONDS)
    assert not asked.running.done(), "and from the end of the next one"
    await asked.is_looked_at(3 * LOOK_SECONDS)
    await asked.is_late()


async def test_one_that_no_look_sees_in_a_step_but_that_goes_on_does_not_end(prefill: Prefill) -> None:
    """A chunk of 8 now and then, in steps that are over before the next look."""
    asked = Asked(prefill, granted=False, prompt=list(range(60)))
    await asked.passes(DUE / 2)
    prefill.step()
    await asked.passes(DUE)
    for _ in range(5):
        await asked.is_looked_at(RESTED - 2 * LOOK_SECONDS)
        prefill.step()
        assert not asked.running.done()
    await asked.is_looked_at(RESTED + 2 * LOOK_SECONDS)
    await asked.is_late()


async def test_a_process_that_stands_still_leaves_nothing_aside(prefill: Prefill) -> None:
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    prefill.step()
    await asked.passes(DUE)
    for _ in range(RESTED_LOOKS - 2):
        await asked.passes(3600.0)
        assert not asked.running.done()
    await asked.left()


async def test_one_whose_first_token_is_on_its_way_does_not_end(prefill: Prefill) -> None:
    """It has rested, and what its last step brought out is delivered behind the next look."""
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    prefill.step()
    await asked.passes(DUE)
    await asked.is_looked_at(RESTED - 2 * LOOK_SECONDS)
    deliver, kept = prefill.prefill.deliver, list[Any]()
    prefill.prefill.deliver = kept.append  # type: ignore[method-assign]
    prefill.step()
    await asked.is_looked_at(2 * RESTED)
    assert not asked.running.done() and kept
    deliver(kept[0])
    assert await asyncio.wait_for(asked.running, HANGS) == 1
    assert prefill.prefill.late == 0


async def test_what_is_late_and_computed_has_its_first_token(prefill: Prefill) -> None:
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    prefill.step()
    await asked.passes(DUE)
    await asked.is_looked_at(2 * LOOK_SECONDS)
    prefill.step()
    assert await asyncio.wait_for(asked.running, HANGS) == 1
    await asked.is_looked_at(2 * RESTED)
    assert prefill.prefill.late == 0


async def test_a_prompt_of_the_workers_own_lease_is_not_computed_once_it_is_told() -> None:
    """Its router hears of it, and gives the lease up a moment later."""
    worker, let_pass = Worker(Role.MIXED), passing_time()
    session = await worker.session()
    grant = await worker.lease(session, PROMPT, **WANTED)
    wanted = PrefillOrder(order=make_order(PROMPT, lease=worker.fence(), **WANTED), grant=grant)
    running = asyncio.ensure_future(anext(worker.prefill.run(wanted)))
    await rest()
    let_pass(DUE + 1.0)
    await rest()
    with pytest.raises(Preempted):
        await asyncio.wait_for(running, HANGS)
    for _ in range(3):
        worker.step()
    assert worker.runner.counts == [] and worker.events == []
    session.cancel("r/1")
    await session.close()
    assert worker.idle() and worker.kv.unaccounted([]) == 0


async def test_one_whose_prefix_was_asked_for_in_vain_ends_after_all(prefill: Prefill) -> None:
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    (seq,) = prefill.prefill.sequences()
    seq.incoming.arrival = object()
    await asked.passes(DUE)
    assert not asked.running.done()
    seq.incoming.arrival = None
    await asked.passes(LOOK_SECONDS)
    await asked.is_late()


@pytest.mark.parametrize("coming", [True, False])
async def test_one_whose_prefix_has_come_rests_first_and_one_that_only_asks_ends_at_once(
    prefill: Prefill, coming: bool
) -> None:
    class Pool:
        async def bring(self, seq: Any, begun: Callable[[], None]) -> None:
            if coming:
                seq.incoming.fetched = 4
                begun()
            await asyncio.Event().wait()

    prefill.prefill.prefixes = Pool()
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    await asked.passes(DUE)
    if coming:
        assert not asked.running.done()
        await asked.is_looked_at(RESTED + 2 * LOOK_SECONDS)
    await asked.is_late()


@pytest.mark.parametrize("coming", [True, False])
async def test_the_run_is_over_when_what_brings_its_prefix_is(prefill: Prefill, coming: bool) -> None:
    over = list[str]()

    class Pool:
        async def bring(self, seq: Any, begun: Callable[[], None]) -> None:
            if coming:
                seq.incoming.fetched = 4
                begun()
            try:
                await asyncio.Event().wait()
            finally:
                await rest()  # as a stream takes to close
                over.append("bringing")

    prefill.prefill.prefixes = Pool()
    asked = Asked(prefill, granted=False)
    asked.running.add_done_callback(lambda _: over.append("run"))
    await asked.passes(DUE / 2)
    await asked.passes(DUE)
    await asked.is_looked_at(RESTED + 2 * LOOK_SECONDS)
    await asked.is_late()
    await rest()
    assert over == ["bringing", "run"]


async def test_who_leaves_is_not_counted(prefill: Prefill) -> None:
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    await asked.left()
    await asked.passes(DUE)
    assert prefill.prefill.late == 0


async def test_one_that_may_be_queued_in_the_turn_in_which_it_is_late_is_not(prefill: Prefill) -> None:
    """The pool has answered just before the timer, and the prompt's own task is yet to run."""

    class Pool:
        async def bring(self, seq: Any, begun: Callable[[], None]) -> None:
            asyncio.get_running_loop().call_later(DUE - 0.001, begun)
            await asyncio.Event().wait()

    prefill.prefill.prefixes = Pool()
    asked, added = Asked(prefill, granted=False), list[Any]()
    prefill.prefilling.add = added.append  # type: ignore[method-assign]
    await asked.passes(DUE)
    await asked.is_late()
    assert added == []


async def test_no_look_outlives_its_prompt(prefill: Prefill) -> None:
    """One that had its first token in time, and one whose client has left: nothing is left that breaks later."""
    broken, loop = list[dict[str, Any]](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: broken.append(context))
    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    for _ in range(2):
        prefill.step()
    assert await asyncio.wait_for(asked.running, HANGS) == 1
    left = Asked(prefill, granted=False)
    await left.passes(DUE / 4)
    await left.left()
    await left.passes(DUE)
    assert broken == []


async def test_the_engine_plans_no_step_while_one_is_ended(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is in a step is asked, and it is taken out of the queue, under the engine's lock."""
    may_plan, remove = list[bool](), prefill.prefilling.remove

    def engine_plans() -> None:
        may_plan.append(prefill.engine.lock.acquire(blocking=False))
        if may_plan[-1]:
            prefill.engine.lock.release()

    def watched(seq: SequenceState) -> None:
        asks = threading.Thread(target=engine_plans)
        asks.start()
        asks.join(HANGS)
        remove(seq)

    asked = Asked(prefill, granted=False)
    await asked.passes(DUE / 2)
    monkeypatch.setattr(prefill.prefilling, "remove", watched)
    await asked.passes(DUE)
    assert may_plan[0] is False
    await asked.is_late()


async def test_what_has_passed_of_its_objective_when_its_prefill_comes_counts() -> None:
    """The lease was given some time before a prefill is sent into it."""
    worker, let_pass, now = Worker(Role.MIXED), passing_time(), [0.0]
    worker.engine.clock = lambda: now[0]
    session = await worker.session()
    grant = await worker.lease(session, PROMPT, **WANTED)
    now[0] = DUE / 2
    wanted = PrefillOrder(order=make_order(PROMPT, lease=worker.fence(), **WANTED), grant=grant)
    running = asyncio.ensure_future(anext(worker.prefill.run(wanted)))
    await rest()
    let_pass(DUE / 2 - 0.5)
    await rest()
    assert not running.done()
    let_pass(1.0)
    await rest()
    assert running.done() and isinstance(running.exception(), Preempted)
    session.cancel("r/1")
    await session.close()
    assert worker.idle() and worker.kv.unaccounted([]) == 0
