"""What is remembered of requests: true to what happened, bounded in bytes, and counted once by class and outcome."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router.explain import MOST_ATTEMPTS, ExplainLog, outcome_of, within_slo
from router.goodput import Goodput
from router.overview import RouterOverview
from router.policy import Decision
from router.request_state import Attempt, RequestState
from router.router import Router
from serving.errors import (
    CorruptChunk,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MillraceError,
    NoRoom,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from serving.messages import Delta, FinishReason, LeaseGrant, LeaseOrder, Prefilled, PrefillOrder, Role, Slo
from serving.step_cost import StepCost
from serving.timeline import Moment
from tests.router.conftest import World, wanted
from tests.router.scripted import Script, ScriptedSession, ScriptedWorker

pytestmark = pytest.mark.usefixtures("ties_by_name")


@dataclass
class Watching:
    """A router.explain.PlacementObserver that remembers."""

    placements: list[tuple[str, bool]] = field(default_factory=list)
    endings: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, float | None]] = field(default_factory=list)

    def placed(self, *, reason: str, downgraded: bool) -> None:
        self.placements.append((reason, downgraded))

    def ended(self, **what: Any) -> None:
        self.endings.append(what)

    def predicted(self, **ratios: float | None) -> None:
        self.ratios.append(ratios)


@pytest.fixture
def watching(world: World) -> Watching:
    watching = Watching()
    world.router = Router(world.placer, world.seen, watching)
    return watching


def explained(world: World, name: str = "r") -> Any:
    return RouterOverview(world.router).explain(name)


async def test_a_split_request_is_explained(world: World, watching: Watching) -> None:
    world.add("p", Role.PREFILL)
    world.add("d", Role.DECODE)
    await world.tokens(wanted())
    told = explained(world)
    assert (told["outcome"], told["within_slo"], told["output_tokens"]) == ("completed", True, 8)
    (attempt,) = told["attempts"]
    assert (attempt["prefill"], attempt["decode"], attempt["reason"]) == ("p", "d", "least_loaded")
    assert attempt["predicted"] is None and attempt["error"] is None and attempt["output_tokens"] == 8
    assert attempt["actual"]["ttft"] == 0.0 and attempt["actual"]["queue"] == 0.0, "the clock stands still"
    assert watching.placements == [("least_loaded", False)]
    assert watching.endings == [{"service_class": "standard", "outcome": "completed", "within_slo": True, "code": ""}]
    placement = world.router.explained.placement("r")
    assert placement == {"prefill": "p", "decode": "d", "reason": "least_loaded", "downgrade": "", "degraded": ""}


async def test_cached_tokens_are_told_by_where_they_were(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ScriptedWorker.run

    async def reusing(self: ScriptedWorker, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        assert order.grant is not None
        async for prefilled in run(self, order):
            yield replace(prefilled, cached_tokens=48, fetched_tokens=16)

    open_lease = ScriptedSession.open

    async def holding(self: ScriptedSession, order: LeaseOrder) -> LeaseGrant:
        return replace(await open_lease(self, order), cached_tokens=32)

    monkeypatch.setattr(ScriptedWorker, "run", reusing)
    monkeypatch.setattr(ScriptedSession, "open", holding)
    world.add("p", Role.PREFILL)
    world.add("d", Role.DECODE)
    await world.tokens(wanted())
    tiers = {"expected": 0, "actual": 48, "device": 32, "pool": 16, "decode": 32}
    assert explained(world)["attempts"][0]["cached_tokens"] == tiers
    world.workers.clear()
    world.fleet.registry.workers.clear()
    world.add("m")
    await world.tokens(wanted())
    assert explained(world)["attempts"][0]["cached_tokens"] == {**tiers, "decode": 0}, "it hands nothing over"


async def test_a_request_in_progress_is_explained_too(world: World) -> None:
    world.add("m")
    async with aclosing(world.router.generate(wanted())) as deltas:  # type: ignore[type-var]
        await anext(deltas)
        told = explained(world)
        assert (told["outcome"], told["within_slo"], told["output_tokens"]) == ("running", None, 1)
        assert world.router.explained.placement("r") is not None
    assert explained(world)["outcome"] == "completed", "left between two tokens: a stop string was found"


async def test_retries_say_why(world: World) -> None:
    for name in ("p0", "p1"):
        world.add(name, Role.PREFILL)
    world.add("d0", Role.DECODE).script = Script(open=[NoRoom("full")])
    world.add("d1", Role.DECODE)
    world.workers["p0"].script.before_first = [WorkerLost("it broke")]
    await world.tokens(wanted())
    told = explained(world)
    assert told["passed_over"] == [{"worker": "d0", "error": "NoRoom"}]
    first, second = told["attempts"]
    assert (first["prefill"], first["error"]) == ("p0", "WorkerLost: it broke")
    assert (second["prefill"], second["error"]) == ("p1", None)


async def test_predictions_stand_beside_what_came(watching: Watching, world: World) -> None:
    cost = StepCost(fixed=0.01, token=1e-4, pair=0.0, sequence=1e-3, context=0.0)
    world.add("m", step_cost=cost, max_batched_tokens=512)
    world.placer.policy = policy = Goodput()
    for _ in range(30):
        policy.calibration.text_took(0, 0.02, 0.03, both=True)
    async for delta in world.router.generate(wanted(max_tokens=8, slo=Slo(ttft_ms=1000.0, tpot_ms=100.0))):
        world.now += 0.02 if delta.index == 0 else 0.005
    told = explained(world)
    (attempt,) = told["attempts"]
    assert attempt["predicted"]["ttft"] > 0 and len(attempt["considered"]) >= 1
    assert attempt["considered"][0]["prefill"] == "m"
    (ratios,) = watching.ratios
    assert attempt["predicted"]["usual_tpot"] > 1.1 * attempt["predicted"]["tpot"]
    assert ratios["tpot"] == pytest.approx(attempt["actual"]["tpot"] / attempt["predicted"]["usual_tpot"])
    assert policy.calibration._steps._all.count == 1 and policy.calibration.tokens_a_step("m-life") == 1.0


async def test_a_refusal_is_counted_by_class_and_code(world: World, watching: Watching) -> None:
    world.add("m").script = Script(open=[Overloaded("no", code="slo")])
    with pytest.raises(Overloaded):
        await world.tokens(wanted(service_class="interactive"))
    (ending,) = watching.endings
    assert ending == {"service_class": "interactive", "outcome": "refused", "within_slo": False, "code": "slo"}
    counts = world.router.explained.counts["interactive"]
    assert (counts.outcomes["refused"], counts.within_slo) == (1, 0)
    assert explained(world)["error"] == "Overloaded: no"
    assert world.router.explained.placement("r") is None


async def test_a_downgrade_is_told(world: World, watching: Watching) -> None:
    """Decided split, and then computed where it is decoded: the only prefill worker broke."""
    world.add("m", running=0)
    world.add("p", Role.PREFILL)
    world.placer.policy = ApartFirst()
    world.workers["p"].script.before_first = [WorkerLost("gone")]
    await world.tokens(wanted())
    assert [downgraded for _, downgraded in watching.placements] == [False, True]
    placement = world.router.explained.placement("r")
    assert placement is not None and placement["downgrade"] == "mixed"


class ApartFirst:
    """Prefill elsewhere while there is an elsewhere."""

    needs_prefixes = False

    def choose(self, demand: Any, view: Any, now: float) -> Any:
        if not view.decode:
            return None
        decode = view.decode[0]
        apart = [worker for worker in view.prefill if worker.status.name != decode.status.name]
        return Decision(decode, (apart or list(view.prefill) or [None])[0], "apart")

    def observed(self, decision: Any, **came: float | None) -> None: ...


def ended_state(name: str = "r", **request: Any) -> RequestState:
    state = RequestState(request=wanted(name, **request))
    state.timeline.note(Moment.ARRIVED, 1.0)
    return state


def finished_state(name: str = "r", **request: Any) -> RequestState:
    state = ended_state(name, **request)
    for index in range(3):
        finish = FinishReason.LENGTH if index == 2 else None
        state.take(Delta(index=index, tokens=(5,), finish=finish), 1.5 + index * 0.1)
    return state


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "aborted"),
        (GeneratorExit(), "aborted"),
        (asyncio.CancelledError(), "aborted"),
        (Overloaded("x"), "refused"),
        (Unavailable("x"), "refused"),
        (InternalError("x"), "failed"),
        (InvalidRequest("x"), "invalid"),
        (RuntimeError("a bug"), "failed"),
    ],
)
def test_how_a_request_without_a_token_ended(error: BaseException | None, outcome: str) -> None:
    assert outcome_of(ended_state(), error) == outcome


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(GeneratorExit(), "completed"), (asyncio.CancelledError(), "aborted"), (Unavailable("x"), "failed")],
)
def test_how_a_request_with_tokens_ended(error: BaseException, outcome: str) -> None:
    state = ended_state()
    state.take(Delta(index=0, tokens=(5,)), 1.5)
    assert outcome_of(state, error) == outcome
    assert outcome_of(finished_state(), error) == "completed", "it had ended before"


def test_what_a_worker_handed_back_is_refused_and_what_broke_there_has_failed() -> None:
    state = ended_state()
    state.attempts.append(Attempt(Decision(None, None, "only"), 1.0))
    assert outcome_of(state, Overloaded("late")) == "refused" and outcome_of(state, Unavailable("gone")) == "failed"
    state.failures = 1
    assert outcome_of(state, Overloaded("no room any more")) == "failed"


async def test_whoever_was_placed_and_gave_up_has_failed_and_was_not_refused(world: World, watching: Watching) -> None:
    world.add("m").script.before_first = [CorruptChunk("x")] * 50
    with pytest.raises(Unavailable):
        await world.tokens(wanted())
    (ending,) = watching.endings
    assert ending["outcome"] == "failed"
    assert len(explained(world)["attempts"]) <= MOST_ATTEMPTS


def test_whoever_is_cancelled_at_its_deadline_has_not_left() -> None:
    state = ended_state(deadline=2.0)
    assert outcome_of(state, asyncio.CancelledError()) == "aborted"
    state.timeline.note(Moment.FINISHED, 2.0)
    assert outcome_of(state, asyncio.CancelledError()) == "failed"


async def test_a_deadline_that_passes_while_waiting_is_told_as_one(world: World) -> None:
    """And not as patience that has ended."""
    world.fleet.clock = time.monotonic
    with pytest.raises(DeadlineExceeded):
        await world.tokens(wanted(deadline=time.monotonic() + 0.05))


@pytest.mark.parametrize(
    ("slo", "within"),
    [
        (Slo(), True),
        (Slo(ttft_ms=501.0, tpot_ms=101.0), True),
        (Slo(ttft_ms=499.0), False),
        (Slo(tpot_ms=99.0), False),
    ],
)
def test_both_objectives_have_to_be_met(slo: Slo, within: bool) -> None:
    """The first token came after 500 ms, then one each 100 ms."""
    assert within_slo(finished_state(slo=slo)) is within


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    log = ExplainLog(("standard",), capacity=4000)
    for number in range(200):
        state = finished_state(f"r{number}")
        log.began(state)
        log.ended(state, None)
        assert 0 < log.held <= 4000
    assert log.explain("r199") is not None and log.explain("r0") is None
    assert log.held == sum(len(explained) for _, explained in log._ended.values())
    state = finished_state("r199")
    log.began(state)
    log.ended(state, None)
    assert log.held == sum(len(explained) for _, explained in log._ended.values()), (
        "a name that is used again is held once"
    )


def test_memory_is_what_is_counted() -> None:
    """What orjson returns holds 8 KiB however short it is."""
    log = ExplainLog(("standard",))
    tracemalloc.start()
    try:
        for number in range(300):
            log.ended(finished_state(f"r{number}"), None)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(log) == 300
    assert taken < 3 * log.held


def test_classes_that_are_not_configured_are_counted_together() -> None:
    watching = Watching()
    log = ExplainLog(("standard",), watching)
    for number in range(10):
        state = finished_state(f"r{number}", service_class=f"made-up-{number}")
        log.began(state)
        log.ended(state, None)
    assert set(log.counts) == {"standard", "other"} and log.counts["other"].within_slo == 10
    assert {ending["service_class"] for ending in watching.endings} == {"other"}


async def test_the_overview_shows_workers_and_classes(world: World) -> None:
    world.add("m", free_blocks=25, waiting_tokens=7)
    world.add("d", Role.DECODE, draining=True)
    await world.tokens(wanted(service_class="batch"))
    shown = RouterOverview(world.router).workers()
    assert (shown["tokens"], shown["requests_running"], shown["requests_waiting"]) == (8, 0, 0)
    assert shown["classes"]["batch"]["offered"] == shown["classes"]["batch"]["within_slo"] == 1
    by_name = {worker["name"]: worker for worker in shown["workers"]}
    assert by_name["m"]["kv_usage"] == 0.75 and by_name["m"]["queued_tokens"] == 7
    assert (by_name["m"]["state"], by_name["d"]["state"]) == ("live", "draining")
    assert by_name["m"]["breaker"] == "closed"


# ---- --strict-disaggregation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "prefix_aware", "session_sticky", "goodput"])
async def test_strictly_split_requests_are_never_computed_by_one_worker(policy: str) -> None:
    world = World(policy=policy, strict_disaggregation=True)
    world.add("m0")
    world.add("m1")
    world.add("p", Role.PREFILL)
    for number in range(6):
        await world.tokens(replace(wanted(f"r{number}", max_tokens=3), session=f"s{number}"))
        (attempt,) = explained(world, f"r{number}")["attempts"]
        assert attempt["prefill"] == "p" and attempt["decode"] in ("m0", "m1")
    await world.fleet.close()


async def test_mixed_workers_prefill_for_decode_workers_where_nobody_else_does() -> None:
    world = World(strict_disaggregation=True)
    world.add("m")
    world.add("d", Role.DECODE)
    await world.tokens(wanted())
    (attempt,) = explained(world)["attempts"]
    assert (attempt["prefill"], attempt["decode"]) == ("m", "d")
    await world.fleet.close()


@pytest.mark.parametrize("roles", [[Role.MIXED, Role.MIXED], [Role.MIXED]])
async def test_without_a_split_pair_strict_requests_fail_and_are_told_why(roles: list[Role]) -> None:
    world = World(strict_disaggregation=True, patience=0.05)
    for number, role in enumerate(roles):
        world.add(f"w{number}", role)
    with pytest.raises(MillraceError) as caught:
        await world.tokens(wanted())
    assert caught.value.status == 503 and caught.value.code == "no_split_placement"
    assert "--strict-disaggregation" in caught.value.message
    await world.fleet.close()
