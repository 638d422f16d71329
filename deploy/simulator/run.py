"""Plays a trace to a simulated cluster, request by request, until all of them have ended.

Time is virtual throughout: what it takes in reality is only told to a progress bar.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle

from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
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
    """`audits` are of the router and of every worker, once all requests have ended; `seconds` are virtual."""

    outcomes: list[RequestOutcome]
    audits: list[Audit] = field(default_factory=list)
    seconds: float = 0.0


def simulate(
    plan: ClusterPlan,
    arrivals: Sequence[Arrival],
    rate: float,
    *,
    seed: int = 0,
    ended: Callable[[RequestOutcome], None] = lambda outcome: None,
    watch: Callable[[SimulatedCluster], Coroutine[None, None, None]] | None = None,
) -> SimulatedRun:
    """All requests of a trace, at `rate` requests a second, to each router in turn. Deterministic.

    `ended` is told of each request; `watch` runs beside them, on virtual time, until all have ended.
    """
    with collecting_seldom():
        return run_virtually(lambda loop: _play(loop, plan, arrivals, rate, seed, ended, watch))


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Python's garbage collector looks at young objects alone, and at many together: a third of the time is saved."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, before[1], 1_000_000)
    try:
        yield
    finally:
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


async def _play(
    loop: VirtualLoop,
    plan: ClusterPlan,
    arrivals: Sequence[Arrival],
    rate: float,
    seed: int,
    ended: Callable[[RequestOutcome], None],
    watch: Callable[[SimulatedCluster], Coroutine[None, None, None]] | None,
) -> SimulatedRun:
    outcomes = [RequestOutcome(request=each.request, arrived=each.at / rate) for each in arrivals]
    by_id = {outcome.request.request_id: outcome for outcome in outcomes}
    texts = ScriptedTexts({each.request.request_id: each.output_tokens for each in arrivals})

    def placed(request: str, worker: str, side: str) -> None:
        by_id[request].placed.append((worker, side))

    async with SimulatedCluster(plan, texts, seed, placed) as cluster:
        routers = cluster.routers(_NoObserver())
        watching = asyncio.create_task(watch(cluster)) if watch is not None else None
        async with asyncio.TaskGroup() as clients:
            for outcome, router in zip(outcomes, cycle(routers), strict=False):
                await asyncio.sleep(outcome.arrived - loop.time())
                outcome.arrived = loop.time()
                clients.create_task(_ask(loop, router, outcome, plan.front_seconds, ended))
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
                now = outcome.last_token = loop.time()
                if outcome.first_token is None:
                    outcome.first_token = now
                outcome.tokens += delta.tokens
                outcome.finish = delta.finish
    except MillraceError as error:
        outcome.error = error.code or type(error).__name__
    outcome.ended = loop.time()
    ended(outcome)
