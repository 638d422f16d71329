"""Plays a trace to a simulated cluster, request by request, until all of them have ended.

Time is virtual throughout: what it takes in reality is only told to a progress bar.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle

from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.held_tokens import HeldDelta
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.traffic import Arrival
from deploy.simulator.virtual_loop import VirtualLoop, run_virtually
from router.router import Router
from serving.errors import MillraceError
from serving.messages import Audit, Delta, Request
from serving.timeline import Timeline

YOUNG_OBJECTS = 50_000
SETTLE_SECONDS = 1.0  # what was cancelled last has come to its end by then


class _NoObserver:
    """Outcomes are taken where clients are (router.router.RouterObserver)."""

    def first_token(self, request: Request, seconds: float, cached: int) -> None: ...
    def tokens(self, seconds: float, count: int) -> None: ...
    def replaced(self, error: MillraceError) -> None: ...
    def finished(
        self, request: Request, timeline: Timeline, last: Delta | None, error: BaseException | None
    ) -> None: ...


@dataclass(slots=True)
class SimulatedRun:
    """`audits` are of the router and of every worker, once all requests have ended; `seconds` are virtual.

    `outcomes` are in the order of arrival, and empty where none were to be kept.
    """

    outcomes: list[RequestOutcome]
    audits: list[Audit] = field(default_factory=list)
    seconds: float = 0.0


def simulate(
    plan: ClusterPlan,
    arrivals: Iterable[Arrival],
    rate: float,
    *,
    seed: int = 0,
    ended: Callable[[RequestOutcome], None] = lambda outcome: None,
    watch: Callable[[SimulatedCluster], Coroutine[None, None, None]] | None = None,
    keep: bool = True,
) -> SimulatedRun:
    """All requests of a trace, at `rate` requests a second, to each router in turn. Deterministic.

    `ended` is told of each request; `watch` runs beside them, on virtual time, until all have ended. Requests are taken
    from `arrivals` as they come; without `keep` nothing of them is left once they have ended.
    """
    with collecting_seldom():
        return run_virtually(lambda loop: _play(loop, plan, arrivals, rate, seed, ended, watch, keep))


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Python's garbage collector looks at many young objects together, and never at what was there before.

    A third of the time is saved; old objects of the run are looked at as well, so that its memory stays bounded.
    """
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, before[1], before[2])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Requests that are placed anew say so, and here there are thousands of them."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(level)


class _Requests:
    """The requests that are under way: what is noted of them, and how long their texts become."""

    def __init__(self, loop: VirtualLoop, ended: Callable[[RequestOutcome], None]):
        self.loop = loop
        self.tell = ended
        self.lengths: dict[str, int] = {}
        self.running: dict[str, RequestOutcome] = {}

    def began(self, arrival: Arrival, at: float) -> RequestOutcome:
        request = arrival.request
        self.lengths[request.request_id] = arrival.output_tokens
        outcome = self.running[request.request_id] = RequestOutcome(request=request, arrived=at)
        return outcome

    def placed(self, request: str, worker: str, side: str) -> None:
        if request in self.running:
            self.running[request].placed.append((worker, side))

    def ended(self, outcome: RequestOutcome) -> None:
        request = outcome.request.request_id
        outcome.ended = self.loop.time()
        del self.running[request]
        self.loop.call_later(SETTLE_SECONDS, self.lengths.pop, request)  # a step may still compute it until then
        self.tell(outcome)


async def _play(
    loop: VirtualLoop,
    plan: ClusterPlan,
    arrivals: Iterable[Arrival],
    rate: float,
    seed: int,
    ended: Callable[[RequestOutcome], None],
    watch: Callable[[SimulatedCluster], Coroutine[None, None, None]] | None,
    keep: bool,
) -> SimulatedRun:
    requests, outcomes = _Requests(loop, ended), list[RequestOutcome]()
    texts = ScriptedTexts(requests.lengths)
    async with SimulatedCluster(plan, texts, seed, requests.placed) as cluster:
        routers = cluster.routers(_NoObserver())
        watching = asyncio.create_task(watch(cluster)) if watch is not None else None
        async with asyncio.TaskGroup() as clients:
            for arrival, router in zip(arrivals, cycle(routers), strict=False):
                await asyncio.sleep(arrival.at / rate - loop.time())
                outcome = requests.began(arrival, loop.time())
                if keep:
                    outcomes.append(outcome)
                clients.create_task(_ask(loop, router, outcome, plan.front_seconds, requests.ended))
        seconds = loop.time()
        if watching is not None:
            watching.cancel()
        await asyncio.sleep(SETTLE_SECONDS)
        audits = [audit for router in routers for audit in await router.audit()]
        return SimulatedRun(outcomes, audits, seconds)


async def _ask(
    loop: VirtualLoop,
    router: Router,
    outcome: RequestOutcome,
    front: float,
    ended: Callable[[RequestOutcome], None],
) -> None:
    """One client, `front` seconds away: it takes what comes, and notes when."""
    if front:
        await asyncio.sleep(front)
    answer: AsyncIterator[Delta] = router.generate(outcome.request)
    try:
        async with aclosing(answer) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                now = outcome.last_token = delta.came_at if isinstance(delta, HeldDelta) else loop.time()
                if outcome.first_token is None:
                    outcome.first_token = now
                outcome.tokens += delta.tokens
                outcome.finish = delta.finish
    except MillraceError as error:
        outcome.error = error.code or type(error).__name__
    ended(outcome)
