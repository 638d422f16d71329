"""The router. `generate()` is the way of a request: place, lease, prefill, decode; and anew from there if that fails.

It knows neither HTTP nor how workers are reached: placement finds room, links carry the calls. No torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Protocol

from router.explain import ExplainLog, PlacementObserver
from router.isolation import Isolation
from router.placement import Placement
from router.placer import Placer
from router.request_state import RequestState
from router.request_trace import RequestTrace
from router.retry_budget import RetryBudget, RetryConfig, backoff
from serving.errors import DeadlineExceeded, MillraceError, Preempted, Retryable, Unavailable
from serving.logs import request_context
from serving.messages import Audit, Delta, Request
from serving.timeline import Moment, Timeline

log = logging.getLogger(__name__)


class RouterObserver(Protocol):
    """Takes what the router does, for metrics. Seconds and tokens."""

    def first_token(self, request: Request, seconds: float, cached: int) -> None: ...
    def tokens(self, seconds: float, count: int) -> None: ...
    def replaced(self, error: MillraceError) -> None: ...
    def finished(
        self, request: Request, timeline: Timeline, last: Delta | None, error: BaseException | None
    ) -> None: ...


class Router:
    """Serves requests on a fleet of workers."""

    def __init__(self, placer: Placer, observer: RouterObserver, placements: PlacementObserver | None = None):
        self.placer = placer
        self.fleet = placer.fleet
        self.observer = observer
        self.clock = placer.fleet.clock
        self.explained = ExplainLog(placer.fleet.config.classes, placements)
        config = self.fleet.config
        budget = RetryConfig(per_second=config.retries_per_second, most=config.retries_saved)
        self.retries = RetryBudget(budget, self.clock())
        self.isolation = Isolation(self.fleet, placer.quarantine)
        self.running = 0  # requests between the first and last line of generate()
        self.tokens = 0  # output tokens so far

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Place, lease, prefill, decode; after a failure go on elsewhere from the tokens the client has.

        Leaving the iterator cancels the request everywhere. Raises errors of serving.errors, none of them Retryable.
        """
        with self._running(request) as (state, place, trace):
            while not state.finished:
                try:
                    lease = await place.lease()
                    state.timeline.note(Moment.LEASED, self.clock())
                    async with await place.prefill() as prefill:
                        state.timeline.note(Moment.PREFILL_SENT, self.clock())
                        self.explained.placed(state)
                        trace.placed()
                        yield self._take(state, place.prefilled(await prefill.first()))
                        while not state.finished:
                            yield self._take(state, place.decoded(await lease.next()))
                except Retryable as error:
                    place.failed(error)
                    trace.failed(error)
                    await self._retry(state, error)
                    place.alone = await self.isolation.enter(state)

    @contextmanager
    def _running(self, request: Request) -> Iterator[tuple[RequestState, Placement, RequestTrace]]:
        """The request counts as running, and its end is observed and logged, whatever it is; its place is given up."""
        state = RequestState(request=request)
        trace = RequestTrace(state)
        state.timeline.note(Moment.ARRIVED, self.clock())
        self.retries.request(self.clock())
        failure: BaseException | None = None
        self.running += 1
        self.explained.began(state)
        place = Placement(self.placer, state)
        try:
            yield state, place, trace
        except BaseException as error:
            failure = error
            raise
        finally:
            place.leave_isolation()
            place.drop_lease()
            self.running -= 1
            state.timeline.note(Moment.FINISHED, self.clock())
            self.explained.ended(state, failure)
            trace.ended(failure)
            self.observer.finished(state.request, state.timeline, state.last, failure)
            _log_end(state, failure)

    def _take(self, state: RequestState, delta: Delta) -> Delta:
        now, timeline = self.clock(), state.timeline
        if timeline.last_token is None:
            self.observer.first_token(state.request, now - timeline.events[0][1], delta.cached_tokens)
        else:
            self.observer.tokens(now - timeline.last_token, len(delta.tokens))
        self.tokens += len(delta.tokens)
        state.take(delta, now)
        self.placer.learner.learn(state, self.placer.policy)
        return delta

    async def _retry(self, state: RequestState, error: Retryable) -> None:
        """A try has failed: go on, unless too many have in a row or time is up; later, where retries are too many."""
        now, failures, deadline = self.clock(), state.failures, state.request.deadline
        state.timeline.note(Moment.REPLACED, now)
        self.observer.replaced(error)
        with request_context(state.request):
            level = logging.INFO if isinstance(error, Preempted) else logging.WARNING  # which comes of load alone
            log.log(level, "placing again after %s: %s", type(error).__name__, error.message)
        if failures > self.fleet.config.max_failures:
            raise Unavailable(f"gave up after {failures} failed placements; the last: {error.message}") from error
        pause = self.retries.retry(now) if failures > 1 else 0.0
        late = deadline is not None and now + pause > deadline
        if late or pause > self.fleet.config.patience:
            self.retries.give_back(pause)
        if late:
            raise DeadlineExceeded("the request's deadline has passed") from error
        if pause > self.fleet.config.patience:
            again = pause if isfinite(pause) else None
            raise Unavailable("too many placements fail", code="retry_budget", retry_after=again) from error
        backed_off = backoff(failures, self.fleet.config.retry_pause, state.salt)
        if deadline is not None:
            backed_off = min(backed_off, (deadline - now) / 2)
        try:
            await asyncio.sleep(max(pause, backed_off))
        except asyncio.CancelledError:  # the client has left: those behind it need not wait for its turn
            self.retries.give_back(pause)
            raise

    async def audit(self) -> list[Audit]:
        """What the router and every worker it reaches hold."""
        counts = {
            "requests": self.running,
            "leases": self.fleet.open_leases,
            "prefills": self.fleet.running_prefills,
            "waiting": self.placer.admission.waiting,
        }
        leaked = {"leases": max(0, counts["leases"] - self.running - self.fleet.probing)}
        return [Audit(service=self.fleet.config.name, counts=counts, leaked=leaked), *await self._audits()]

    async def _audits(self) -> list[Audit]:
        """What every worker that can be reached says it holds."""
        found: list[Audit] = []
        for candidate in self.fleet.registry.candidates():
            try:
                found += await self.fleet.link(candidate.status).audit()
            except MillraceError as error:  # a worker that is slow to count may serve well: leave that to heartbeats
                log.warning("no audit of %s: %s", candidate.status.name, error.message)
        return found


def _log_end(state: RequestState, failure: BaseException | None) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    timeline, last = state.timeline, state.last
    if last is not None and last.finish is not None:
        ending = last.finish.value
    else:
        ending = type(failure).__name__ if isinstance(failure, MillraceError) else "left"
    ttft, tpot = timeline.between(Moment.ARRIVED, Moment.FIRST_TOKEN), timeline.tpot
    with request_context(state.request):
        log.info(
            "%d prompt tokens, %d output tokens, first after %s, then one each %s: %s",
            len(state.request.prompt),
            timeline.tokens,
            "never" if ttft is None else f"{ttft * 1e3:.0f} ms",
            "-" if tpot is None else f"{tpot * 1e3:.1f} ms",
            ending,
        )
