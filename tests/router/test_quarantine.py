"""A request that breaks the workers that compute it is given to no third; one whose workers were killed goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.candidate import Candidate
from router.policy import Decision
from router.quarantine import MOST_BROKEN, PROGRESS, SUSPECTED, Quarantine, Verdict
from router.registry import Registry
from router.request_state import Attempt, RequestState
from serving.errors import (
    BESIDE_STEP,
    IN_STEP,
    NEVER_SENT,
    CorruptChunk,
    Draining,
    MillraceError,
    Quarantined,
    WorkerLost,
)
from serving.messages import Request, Role
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import LOSE, ScriptedSession, ScriptedWorker, Step, make_status

pytestmark = pytest.mark.usefixtures("ties_by_name")

IN_ITS_STEP = WorkerLost("the engine died", code=IN_STEP)
POISON = "poison"


@pytest.fixture
async def fleet() -> AsyncIterator[World]:
    """Six mixed workers."""
    world = World()
    for number in range(6):
        world.add(f"w{number}")
    yield world
    await nothing_held(world)
    await world.fleet.close()


async def nothing_held(world: World) -> None:
    """What was sent before a worker's last report is part of that."""
    await world.settled()
    world.now += 1.0
    world.beat()
    assert world.held() == {}


async def run(world: World, *requests: Request, alive: Sequence[str] = ()) -> list[Any]:
    """What becomes of them. Time passes; of the workers that were lost only the `alive` ones are heard again."""
    running = [asyncio.create_task(world.tokens(request)) for request in requests]
    while not all(task.done() for task in running):
        world.now += 0.05
        for name, worker in world.workers.items():
            entry = world.fleet.registry.get(worker.status.instance)
            if name in alive or (entry is not None and not entry.suspect and not broken(worker)):
                world.fleet.heartbeat(worker.status, made_at=world.now - 0.01)
        await asyncio.sleep(0.002)
    return await asyncio.gather(*running, return_exceptions=True)


def broken(worker: ScriptedWorker) -> bool:
    """It has played a loss."""
    return bool(getattr(worker, "died", False))


class Poisoned(ScriptedWorker):
    """A worker that dies of a request named POISON, in its prefill or after so many tokens of its decode."""

    after: int | None = None  # None: in prefill
    told = False  # its engine says so, or the process is just gone
    died = False
    unanswered = False  # it computes as soon as the lease is granted, and dies before anybody hears of the grant

    async def play(self, steps: list[Step], session: ScriptedSession | None = None) -> Step:
        granted = self.unanswered and steps is self.script.open
        if granted and any(lease.startswith(POISON) for lease in self.asked_to_prefill):
            self.asked_to_prefill.clear()
            self.die()
            raise WorkerLost("reset", code=IN_STEP if self.told else None)
        return await super().play(steps, session)

    async def run(self, order: Any) -> AsyncIterator[Any]:
        if order.order.request.request_id.startswith(POISON):
            if self.after is None:
                self.die()
                await asyncio.sleep(0)
                raise WorkerLost("reset", code=IN_STEP if self.told else None)
            self.script.decode.insert(0, (self.after, IN_ITS_STEP if self.told else LOSE))
        async for prefilled in super().run(order):
            yield prefilled

    def die(self) -> None:
        self.died = True
        self.lose_sessions()

    def lose_sessions(self) -> None:
        self.died = True
        super().lose_sessions()


def poisoned(monkeypatch: pytest.MonkeyPatch, count: int, **fields: Any) -> World:
    kind = type("Made", (Poisoned,), fields)
    monkeypatch.setattr("tests.router.conftest.ScriptedWorker", kind)
    world = World()
    for number in range(count):
        world.add(f"w{number}")
    return world


def dead(world: World) -> list[str]:
    return [name for name, worker in world.workers.items() if broken(worker)]


# ---- poison --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when",
    [{"unanswered": True}, {"after": None}, {"after": 0}, {"after": 3}],
    ids=["before its lease is known", "in prefill", "in its first step", "soon"],
)
@pytest.mark.parametrize("told", [False, True], ids=["the process is gone", "the engine says so"])
async def test_a_request_that_broke_two_workers_is_given_to_no_third(
    monkeypatch: pytest.MonkeyPatch, when: dict[str, Any], told: bool
) -> None:
    world = poisoned(monkeypatch, 6, told=told, **when)
    [ended] = await run(world, wanted(POISON, max_tokens=60))
    assert isinstance(ended, Quarantined) and (ended.status, ended.code) == (500, "quarantined")
    assert "2 workers died" in ended.message and "w0" in ended.message and "w1" in ended.message
    assert ended.retry_after is None
    assert len(world.seen.replacements) == SUSPECTED
    await nothing_held(world)
    await world.fleet.close()


async def test_one_that_is_always_beside_others_is_found_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was with it on both workers is tried alone; of those only one dies again, and the others are served."""
    world = poisoned(monkeypatch, 8)
    requests = [wanted(str(number), max_tokens=60) for number in range(3)]
    poison = wanted(POISON, max_tokens=60)

    monkeypatch.setattr("router.policy.LeastLoaded.decode_order", lambda self, demand, workers: by_name(workers))
    found = await run(world, *requests[:1], poison, *requests[1:])
    ended = [found[0], *found[2:]]
    assert ended == [expected(request) for request in requests]
    assert isinstance(found[1], Quarantined)
    assert len(dead(world)) <= MOST_BROKEN
    await nothing_held(world)
    await world.fleet.close()


def by_name(workers: Sequence[Candidate]) -> list[Candidate]:
    return sorted(workers, key=lambda worker: worker.status.name)


async def test_a_single_token_breaks_no_third_worker_either(monkeypatch: pytest.MonkeyPatch) -> None:
    world = poisoned(monkeypatch, 6)
    [ended] = await run(world, wanted(POISON, max_tokens=1))
    assert isinstance(ended, Quarantined) and len(world.seen.replacements) == SUSPECTED
    await world.fleet.close()


async def test_a_prefill_worker_that_dies_counts_as_a_decode_worker_does() -> None:
    world = World()
    for number in range(4):
        world.add(f"p{number}", Role.PREFILL).script.before_first = [IN_ITS_STEP]
    world.add("d", Role.DECODE)
    [ended] = await run(world, wanted(max_tokens=40))
    assert isinstance(ended, Quarantined) and "p0, p1" in ended.message
    await nothing_held(world)
    await world.fleet.close()


# ---- what does not count -------------------------------------------------------------------------------------------


async def test_connections_that_break_to_workers_that_live_do_not_count(fleet: World) -> None:
    for worker in fleet.workers.values():
        worker.script.before_first = [WorkerLost("reset")]
    request = wanted(max_tokens=40)
    assert await run(fleet, request, alive=tuple(fleet.workers)) == [expected(request)]
    assert len(fleet.seen.replacements) > SUSPECTED


async def test_long_texts_survive_the_loss_of_any_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator kills one worker after the other, each some time after it took over."""
    world = poisoned(monkeypatch, 6)
    for worker in world.workers.values():
        worker.script.decode = [(PROGRESS + 3, LOSE)]
    request = wanted(max_tokens=6 * PROGRESS)
    assert await run(world, request) == [expected(request)]
    assert len(dead(world)) > MOST_BROKEN
    await world.fleet.close()


async def test_a_worker_that_dies_at_once_counts_anew_after_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    world = poisoned(monkeypatch, 6)
    for name, after in (("w0", 2), ("w1", PROGRESS + 3), ("w2", 2), ("w3", PROGRESS + 3)):
        world.workers[name].script.decode = [(after, LOSE)]
    request = wanted(max_tokens=6 * PROGRESS)
    assert await run(world, request) == [expected(request)]
    assert len(dead(world)) == 4
    await world.fleet.close()


async def test_what_was_beside_the_step_does_not_count(fleet: World) -> None:
    for worker in fleet.workers.values():
        worker.script.before_first = [WorkerLost("the engine died", code=BESIDE_STEP)]
    for name in ("w4", "w5"):
        fleet.workers[name].script.before_first = []
    request = wanted(max_tokens=40)
    assert await run(fleet, request) == [expected(request)]
    assert sum(len(worker.orders) for worker in fleet.workers.values()) == 5


async def test_dead_workers_that_it_never_reached_do_not_count(fleet: World) -> None:
    """Several are killed at once: a request that is given to them before they are missed is served by the others."""
    for name in ("w0", "w1", "w2", "w3"):
        fleet.workers[name].script.open = [WorkerLost("failed to connect", code=NEVER_SENT)]
    request = wanted(max_tokens=40)
    assert await run(fleet, request) == [expected(request)]
    assert sum(sum(worker.opened.values()) for worker in fleet.workers.values()) == 5


@pytest.mark.parametrize("error", [Draining("x"), CorruptChunk("x")], ids=lambda error: type(error).__name__)
async def test_drains_and_links_do_not_count(fleet: World, error: MillraceError) -> None:
    for name in ("w0", "w1", "w2", "w3"):
        fleet.workers[name].script.before_first = [error]
    request = wanted(max_tokens=40)
    assert await run(fleet, request, alive=tuple(fleet.workers)) == [expected(request)]


async def test_many_that_lost_the_same_two_workers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers are killed one right after the other: any of those there may have done it, and none is ended."""
    world = poisoned(monkeypatch, 4)
    monkeypatch.setattr("router.policy.LeastLoaded.decode_order", lambda self, demand, workers: by_name(workers))
    for name in ("w0", "w1"):
        world.workers[name].script.decode = [(2, LOSE)]
    requests = [wanted(str(number), max_tokens=40) for number in range(5)]
    assert await run(world, *requests) == [expected(request) for request in requests]
    assert dead(world) == ["w0", "w1"]
    await world.fleet.close()


async def test_one_that_is_held_back_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the second worker is dead is known when it has been silent for long; the deadline comes before."""
    world = poisoned(monkeypatch, 6)
    world.now += 1.0
    running = asyncio.create_task(world.tokens(replace(wanted(POISON), deadline=world.now + 0.5)))
    with pytest.raises(MillraceError) as ended:
        await asyncio.wait_for(running, 60)
    assert ended.value.status == 504
    await nothing_held(world)
    await world.fleet.close()


# ---- the rule ------------------------------------------------------------------------------------------------------


def tried(state: RequestState, tokens: int) -> None:
    """A try that has brought so many tokens."""
    attempt = Attempt(Decision(None, None, "test"), 0.0)
    attempt.tokens = tokens
    state.attempts.append(attempt)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 2 * PROGRESS), st.booleans(), st.booleans(), st.sampled_from([None, IN_STEP])),
        max_size=8,
    )
)
def test_only_losses_in_a_row_of_dead_workers_count(tries: list[tuple[int, bool, bool, str | None]]) -> None:
    """Each try: tokens that came of it, if its worker was lost, if that is heard again, and what it said."""
    registry = Registry(silence=5.0)
    quarantine, state, now, row = Quarantine(registry), RequestState(request=wanted()), 0.0, 0
    for number, (tokens, lost, heard, code) in enumerate(tries):
        now += 1.0
        status = make_status(f"w{number}")
        registry.heartbeat(status, now)
        tried(state, tokens)
        quarantine.tried(state)
        row = 0 if tokens > PROGRESS else row
        if lost:
            now += 0.1
            quarantine.lost(state, status.instance, WorkerLost("x", code=code), now, computing=True)
            row += (code == IN_STEP or tokens <= PROGRESS) and (code == IN_STEP or not heard)
            if heard:
                registry.heartbeat(status, now + 0.1)
    verdict = quarantine.verdict(state, now + 60.0)
    assert verdict is (Verdict.QUARANTINED if row >= SUSPECTED else Verdict.FREE)


def test_it_is_open_until_a_worker_is_known_to_be_dead() -> None:
    registry = Registry(silence=5.0)
    quarantine, state = Quarantine(registry), RequestState(request=wanted())
    for name in ("a", "b"):
        registry.heartbeat(make_status(name), 1.0)
        quarantine.lost(state, f"{name}-life", WorkerLost("reset"), 2.0, computing=True)
    assert quarantine.verdict(state, 2.1) is Verdict.OPEN
    registry.heartbeat(make_status("a", instance="a-again", address="elsewhere"), 3.0)
    assert quarantine.verdict(state, 3.1) is Verdict.OPEN
    assert quarantine.verdict(state, 7.1) is Verdict.QUARANTINED, "b is silent"
    registry.heartbeat(make_status("b"), 7.2)
    assert quarantine.verdict(state, 7.3) is Verdict.FREE, "b was out of reach, and a may have died by itself"


def test_requests_of_other_routers_are_company_too() -> None:
    registry = Registry(silence=5.0)
    quarantine, state = Quarantine(registry), RequestState(request=wanted())
    for count, name in enumerate(("a", "b", "c"), 1):
        registry.heartbeat(make_status(name, leases=4), 1.0)
        quarantine.lost(state, f"{name}-life", WorkerLost("died", code=IN_STEP), 2.0, computing=True)
        expected_ = {1: Verdict.FREE, 2: Verdict.ALONE, MOST_BROKEN: Verdict.QUARANTINED}[count]
        assert quarantine.verdict(state, 9.0) is expected_


def test_a_worker_that_was_killed_while_it_drained_counts_against_no_request() -> None:
    """Its platform has lost patience."""
    registry = Registry()
    state = RequestState(request=wanted())
    for number, draining in enumerate((True, True, False)):
        registry.heartbeat(make_status(f"w{number}", draining=draining), 0.0)
        Quarantine(registry).lost(state, f"w{number}-life", WorkerLost("killed"), 1.0, computing=True)
    assert [death.name for death in state.deaths] == ["w2"]
