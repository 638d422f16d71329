"""`generate()`: whatever fails, and wherever, the tokens are those of an undisturbed run, and nothing is left."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from router.leases import RouterLease
from router.prefill_call import Placed, PrefillCall
from router.request_state import RequestState
from serving.errors import (
    CorruptChunk,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    MillraceError,
    NoRoom,
    Overloaded,
    Preempted,
    Retryable,
    StaleLease,
    Unavailable,
    WorkerLost,
)
from serving.messages import FinishReason, Role
from serving.timeline import Moment
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import LOSE, Script, ScriptedSession, Step

pytestmark = pytest.mark.usefixtures("ties_by_name")


async def test_a_request_is_prefilled_decoded_and_over(split: World) -> None:
    request = wanted()
    assert await split.tokens(request) == expected(request)
    ((name, timeline, last, error),) = split.seen.endings
    assert (name, error) == ("r", None) and last is not None and last.finish is FinishReason.LENGTH
    assert [moment for moment, _ in timeline.events] == [
        Moment.ARRIVED,
        Moment.LEASED,
        Moment.PREFILL_SENT,
        Moment.FIRST_TOKEN,
        Moment.FINISHED,
    ]
    assert timeline.tokens == 8 and split.seen.firsts == ["r"] and split.seen.replacements == []


async def test_a_mixed_worker_prefills_what_it_decodes(world: World) -> None:
    mixed = world.add("m")
    world.add("p", Role.PREFILL)
    request = wanted()
    assert await world.tokens(request) == expected(request)
    assert len(mixed.orders) == 1
    assert mixed.asked_to_prefill == set(mixed.opened), "its lease asks for it: no second message has to follow"


async def test_a_prefill_worker_is_not_asked_with_the_lease(split: World) -> None:
    await split.tokens(wanted())
    assert not split.workers["d0"].asked_to_prefill and split.workers["d0"].opened


async def test_a_prefill_asked_for_with_its_lease_began_when_it_was_asked_for(world: World) -> None:
    """A router that is busy reads the answer late: that must not make the prompt look shorter than it was."""
    mixed = world.add("m")
    play = mixed.play

    async def slow(steps: list[Step], session: ScriptedSession | None = None) -> Step:
        world.now += 0.25 * (steps is mixed.script.open)
        return await play(steps, session)

    mixed.play = slow  # type: ignore[method-assign]
    mixed.script.open = [None]
    began: list[float] = []
    begin = world.placer.begin_prefill

    def noted(placed: Placed, state: RequestState, lease: RouterLease) -> PrefillCall:
        call = begin(placed, state, lease)
        began.append(state.attempts[-1].began_at)
        return call

    world.placer.begin_prefill = noted  # type: ignore[method-assign]
    now = world.now
    await world.tokens(wanted())
    assert began == [now]


async def test_a_worker_that_begins_to_drain_computes_what_it_was_asked_for(world: World) -> None:
    """Another may not compute the same prompt: both would write to the lease."""
    mixed = world.add("m")
    mixed.script.open = [None]
    play = mixed.play

    async def drain(steps: list[Step], session: ScriptedSession | None = None) -> Step:
        if steps is mixed.script.open:
            world.add("n")
            world.fleet.heartbeat(mixed.change(draining=True))
        return await play(steps, session)

    mixed.play = drain  # type: ignore[method-assign]
    request = wanted()
    assert await world.tokens(request) == expected(request)
    assert len(mixed.orders) == 1 and not world.workers["n"].orders


async def test_a_single_token_needs_no_lease(split: World) -> None:
    request = wanted(max_tokens=1)
    assert await split.tokens(request) == expected(request)
    assert not split.workers["d0"].opened and not split.workers["d1"].opened
    assert [order.grant for order in split.workers["p0"].orders] == [None]


RETRYABLE = [NoRoom("x"), Draining("x"), WorkerLost("x"), StaleLease("x"), CorruptChunk("x"), Preempted("x")]
POINTS = ["before_first", "after_first", "committed"]


@pytest.mark.parametrize("error", RETRYABLE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_failing_prefill_is_repeated(split: World, point: str, error: Retryable, times: int) -> None:
    """By another worker if this one is lost or leaving, with the tokens the client has by then."""
    for name in ("p0", "p1"):
        setattr(split.workers[name].script, point, [error] * times)
    request = wanted()
    running = asyncio.create_task(split.tokens(request))
    while not running.done():
        split.beat()
        await asyncio.sleep(0)
    assert await running == expected(request)
    kinds = [type(seen) for seen in split.seen.replacements]
    assert kinds[0] is type(error) and set(kinds) <= {type(error), StaleLease}, (
        "a lease may have ended before it failed"
    )


async def test_a_leaving_prefill_worker_is_not_asked_again_while_there_is_another(split: World) -> None:
    split.workers["p0"].script.before_first = [Draining("x")] * 5
    request = wanted()
    assert await split.tokens(request) == expected(request)
    assert [len(split.workers[name].orders) for name in ("p0", "p1")] == [1, 1]


async def test_the_only_prefill_worker_is_not_asked_again_once_it_leaves(world: World) -> None:
    """Whatever happens before its heartbeat says so: the request waits for another, it does not use up its tries."""
    leaving = world.add("p0", Role.PREFILL)
    leaving.script.before_first = [Draining("x")] * 50
    world.add("d", Role.DECODE)
    running = asyncio.create_task(world.tokens(wanted()))
    for _ in range(200):
        await asyncio.sleep(0)
        world.fleet.notify()
    assert not running.done() and len(leaving.orders) == 1
    world.add("p1", Role.PREFILL)
    assert await running == expected(wanted())
    assert [type(error) for error in world.seen.replacements] == [Draining]


async def test_a_lost_decode_worker_is_not_held_against_the_prefill_worker(split: World) -> None:
    split.workers["d0"].script.decode = [(2, WorkerLost("x"))]
    request = wanted()
    assert await split.tokens(request) == expected(request)
    suspects = [worker.status.name for worker in split.fleet.registry.workers.values() if worker.suspect]
    assert split.seen.replacements and not {"p0", "p1"} & set(suspects)


async def test_a_prefill_that_ends_without_a_token_is_repeated(split: World) -> None:
    split.workers["p0"].script.before_first = ["empty"]
    request = wanted()
    assert await split.tokens(request) == expected(request)
    assert [type(error) for error in split.seen.replacements] == [WorkerLost]


@pytest.mark.parametrize("error", [NoRoom("x"), Draining("x"), WorkerLost("x")], ids=lambda e: type(e).__name__)
async def test_a_lease_refused_by_one_worker_is_granted_by_the_next(split: World, error: Retryable) -> None:
    split.workers["d0"].script.open = [error]
    request = wanted()
    assert await split.tokens(request) == expected(request)
    assert split.workers["d1"].opened and split.seen.replacements == [], "looking further is no failure"


async def test_a_worker_that_cannot_be_reached_is_passed_over(split: World) -> None:
    split.workers["d0"].script.connect = [WorkerLost("connection refused")]
    request = wanted()
    assert await split.tokens(request) == expected(request)


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("how", [LOSE, Preempted("x"), Draining("x"), WorkerLost("x")], ids=str)
async def test_decoding_goes_on_elsewhere_when_a_lease_is_lost(split: World, after: int, how: Retryable | str) -> None:
    for name in ("d0", "d1"):
        split.workers[name].script.decode = [(after, how)]
    request = wanted(max_tokens=20)
    running = asyncio.create_task(split.tokens(request))
    while not running.done():
        split.beat()
        await asyncio.sleep(0)
    assert await running == expected(request)
    assert split.seen.replacements and split.seen.firsts == ["r"], "the first token comes once, whatever is repeated"


async def test_each_try_is_told_the_tokens_known_by_then(split: World) -> None:
    split.workers["d0"].script.decode = [(4, Draining("x"))]
    request = wanted(max_tokens=12)
    assert await split.tokens(request) == expected(request)
    orders = [order.order for name in ("p0", "p1") for order in split.workers[name].orders]
    assert sorted(orders, key=lambda order: len(order.generated))[1].generated == tuple(expected(request)[:5])


async def test_a_lease_that_cannot_begin_anew_is_placed_elsewhere(split: World) -> None:
    split.workers["p0"].script.before_first = [CorruptChunk("x")]
    split.workers["d0"].script.advance = [NoRoom("x")]
    request = wanted()
    assert await split.tokens(request) == expected(request)
    assert split.workers["d0"].opened and [type(error) for error in split.seen.replacements] == [CorruptChunk, NoRoom]


@pytest.mark.parametrize("point", [*POINTS, "open", "advance"])
@pytest.mark.parametrize("error", [InternalError("a bug"), InvalidRequest("no", param="x")], ids=["bug", "invalid"])
async def test_what_no_retry_can_help_is_told_at_once(split: World, point: str, error: MillraceError) -> None:
    for worker in split.workers.values():
        worker.script = Script()
        setattr(worker.script, point, [error])
        if point == "advance":
            worker.script.before_first = [CorruptChunk("x")]
    with pytest.raises(type(error)):
        await split.tokens(wanted())
    assert split.seen.endings[0][3] is error


async def test_an_error_of_the_lease_itself_is_told(split: World) -> None:
    for name in ("d0", "d1"):
        split.workers[name].script.decode = [(2, InternalError("its scores are no numbers"))]
    with pytest.raises(InternalError, match="scores"):
        await split.tokens(wanted())


async def test_tries_come_to_an_end(split: World) -> None:
    for name in ("p0", "p1"):
        split.workers[name].script.before_first = [CorruptChunk("x")] * 100
    with pytest.raises(Unavailable, match="gave up after 9"):
        await split.tokens(wanted())


async def test_being_preempted_is_no_failure(split: World) -> None:
    """A request that gets a token further each time is getting on."""
    for name in ("d0", "d1"):
        split.workers[name].script.decode = [(1, Preempted("x"))] * 100
    request = wanted(max_tokens=40)
    assert await split.tokens(request) == expected(request)
    assert len(split.seen.replacements) > split.fleet.config.max_failures


async def test_a_deadline_that_has_passed_ends_the_tries(split: World) -> None:
    request = wanted(deadline=split.now + 1)
    split.workers["p0"].script.before_first = [CorruptChunk("x")]
    split.workers["p1"].script.before_first = [CorruptChunk("x")]
    running = asyncio.create_task(split.tokens(request))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    split.now += 2
    with pytest.raises(DeadlineExceeded):
        await running


async def test_a_text_is_gone_on_with_by_the_model_that_began_it(split: World) -> None:
    for name in ("p1", "d1"):
        split.fleet.heartbeat(split.workers[name].change(fingerprint="another", pairing="another"))
    split.fleet.heartbeat(split.workers["p1"].change(draining=True))  # so that it begins with the other
    split.workers["d0"].script.decode = [(2, LOSE)]
    split.workers["d0"].script.connect = [None, WorkerLost("it cannot be reached again at once")]
    running = asyncio.create_task(split.tokens(wanted()))
    while not split.seen.replacements:
        await asyncio.sleep(0)
    split.fleet.heartbeat(split.workers["p1"].change(draining=False))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not running.done() and not split.workers["d1"].opened
    split.beat()  # the first decode worker is back
    assert await running == expected(wanted())


class Impatient:
    """A world whose requests do not wait long."""

    def __init__(self, **config: float) -> None:
        self.world = World(patience=0.05, **config)


async def test_without_workers_a_request_is_unavailable_when_patience_is_over() -> None:
    world = Impatient().world
    with pytest.raises(Unavailable) as refused:
        await world.tokens(wanted())
    assert refused.value.retry_after and world.held() == {}


async def test_without_prefill_workers_too() -> None:
    world = Impatient().world
    decode = world.add("d", Role.DECODE)
    with pytest.raises(Unavailable, match="prefill"):
        await world.tokens(wanted())
    assert world.held() == {} and decode.cancelled == decode.opened != {}


async def test_without_room_a_request_is_refused_when_patience_is_over() -> None:
    world = Impatient().world
    world.add("m").script.open = [NoRoom("full")] * 1000
    with pytest.raises(Overloaded) as refused:
        await world.tokens(wanted())
    assert refused.value.retry_after and refused.value.code == "no_room" and world.held() == {}


async def test_without_workers_every_request_is_unavailable() -> None:
    world = Impatient().world
    first = wanted("a", deadline=world.now + 0.02)  # gives up while the other still waits
    both = await asyncio.gather(world.tokens(first), world.tokens(wanted("b")), return_exceptions=True)
    assert [type(error) for error in both] == [Unavailable, Unavailable]


async def test_too_many_waiting_are_refused_at_once() -> None:
    world = Impatient(max_waiting=2).world
    results = await asyncio.gather(*(world.tokens(wanted(str(n))) for n in range(5)), return_exceptions=True)
    codes = [getattr(error, "code", None) for error in results]
    assert codes.count("queue_full") == 2 and world.held() == {}


async def test_room_that_comes_free_is_taken_up(world: World) -> None:
    mixed = world.add("m")
    mixed.script.open = [NoRoom("full")] * 3
    request = wanted()
    running = asyncio.create_task(world.tokens(request))
    while not running.done():
        world.beat()
        await asyncio.sleep(0)
    assert await running == expected(request)


@pytest.mark.parametrize("stop_at", [1, 2, 5])
async def test_a_client_that_leaves_frees_everything(split: World, stop_at: int) -> None:
    async with aclosing(split.router.generate(wanted())) as deltas:  # type: ignore[type-var]
        count = 0
        async for _ in deltas:
            count += 1
            if count == stop_at:
                break
    assert split.router.running == 0 and split.fleet.open_leases == 0
    ((_, _, last, error),) = split.seen.endings
    assert last is not None and last.finish is None and isinstance(error, GeneratorExit)


async def test_when_the_iterator_is_closed_the_prefill_is_over_too(split: World) -> None:
    async with aclosing(split.router.generate(wanted())) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            break
    assert split.fleet.running_prefills == 0 and sum(worker.runs for worker in split.workers.values()) == 0


async def test_refusing_all_ends_what_runs_and_what_waits(split: World) -> None:
    split.workers["p0"].script.before_first = ["hang", "hang"]
    split.workers["p1"].script.before_first = ["hang", "hang"]
    running = [asyncio.create_task(split.tokens(wanted(str(n)))) for n in range(3)]
    running += [asyncio.create_task(split.tokens(wanted("one token", max_tokens=1)))]  # which holds no lease
    await split.settled()
    split.fleet.refuse_all(Unavailable("leaving"))
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(error) for error in results] == [Unavailable] * 4
    with pytest.raises(Unavailable, match="leaving"):
        await split.tokens(wanted())


async def test_the_audit_adds_up(split: World) -> None:
    iterator = split.router.generate(wanted())
    await anext(iterator)
    audits = await split.router.audit()
    assert audits[0].counts["requests"] == audits[0].counts["leases"] == 1 and not audits[0].idle
    assert sum(audit.counts.get("leases", 0) for audit in audits[1:]) == 1
    await iterator.aclose()  # type: ignore[attr-defined]
    await split.settled()
    assert all(audit.idle for audit in await split.router.audit())
