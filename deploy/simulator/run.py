"""Plays a trace to a simulated cluster, request by request, until all of them have ended; and looks for goodput.

Time is virtual throughout: what it takes in reality is only told to a progress bar.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle

from bench.goodput import GoodputSearch, SearchLimits
from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.outcomes import RateFigures, RequestOutcome, figures
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.traffic import Arrival, Traffic, trace
from deploy.simulator.virtual_loop import VirtualLoop, run_virtually
from router.router import Router
from serving.errors import MillraceError
from serving.messages import Audit, Delta, Request
from serving.timeline import Timeline

FULL_BATCH = 32  # sequences, for a first guess
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
                clients.create_task(_ask(loop, router, outcome, ended))
        seconds = loop.time()
        if watching is not None:
            watching.cancel()
        await asyncio.sleep(SETTLE_SECONDS)
        audits = [audit for router in routers for audit in await router.audit()]
        return SimulatedRun(outcomes, audits, seconds)


async def _ask(
    loop: VirtualLoop, router: Router, outcome: RequestOutcome, ended: Callable[[RequestOutcome], None]
) -> None:
    """One client: it takes what comes, and notes when."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A cluster under a kind of load: `requests` at every rate, once for each seed."""

    plan: ClusterPlan
    traffic: Traffic
    requests: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    max_tokens: int | None = None

    def traces(self) -> list[tuple[Arrival, ...]]:
        return [
            trace(self.traffic, self.plan.profile, self.requests, seed, max_tokens=self.max_tokens)
            for seed in self.seeds
        ]

    def at(
        self,
        rate: float,
        ended: Callable[[RequestOutcome], None] = lambda outcome: None,
        *,
        wanted: float = 0.0,
    ) -> RateFigures:
        """What comes of one rate. No more seeds are run once the share `wanted` cannot be attained any more."""
        runs: list[list[RequestOutcome]] = []
        spare = (1.0 - wanted) * self.requests * len(self.seeds)  # requests that may miss their objectives
        for seed, arrivals in zip(self.seeds, self.traces(), strict=True):
            runs.append(simulate(self.plan, arrivals, rate, seed=seed, ended=ended).outcomes)
            spare -= sum(not outcome.met for outcome in runs[-1])
            if spare < -0.5:
                break
        return figures(rate, runs)

    def goodput(self, limits: SearchLimits, measured: Callable[[float], RateFigures]) -> float | None:
        """The highest rate that attains; None where none does. `measured` is `at`, or something around it."""
        search = GoodputSearch(limits)
        while (rate := search.next_rate()) is not None:
            search.record(rate, measured(rate).attainment)
        return search.answer

    def first_rate(self) -> float:
        """A guess at a rate that could be kept up: each worker computes prompts, or decodes in full batches."""
        profile, arrivals = self.plan.profile, self.traces()[0]
        prompt = sum(len(each.request.prompt) for each in arrivals) / len(arrivals)
        output = sum(each.output_tokens for each in arrivals) / len(arrivals)
        decoding = profile.decode_seconds(FULL_BATCH, int(prompt + output)) / FULL_BATCH * output
        return len(self.plan.roles) / (profile.prompt_seconds(int(prompt)) + decoding) / 2
