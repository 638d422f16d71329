"""The router. `generate()` is the way of a request; everything else here is what it takes to keep its promises.

It knows neither HTTP nor how workers are reached: the fleet finds room, links carry the calls. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

from router.fleet import Fleet
from router.leases import NoLease, RouterLease
from router.policy import Candidate
from router.prefill_call import PrefillCall
from serving.errors import DeadlineExceeded, Draining, MillraceError, Preempted, Retryable, Unavailable, WorkerLost
from serving.logs import request_context
from serving.messages import Audit, Build, Delta, LeaseOrder, PrefillOrder, Request
from serving.timeline import Moment, Timeline

log = logging.getLogger(__name__)


class RouterObserver(Protocol):
    """Hears of what the router does, for metrics. Seconds and tokens."""

    def first_token(self, request: Request, seconds: float, cached: int) -> None: ...
    def tokens(self, seconds: float, count: int) -> None: ...
    def replaced(self, error: MillraceError) -> None: ...
    def finished(
        self, request: Request, timeline: Timeline, last: Delta | None, error: BaseException | None
    ) -> None: ...


class Router:
    """Serves requests on a fleet of workers."""

    def __init__(self, fleet: Fleet, observer: RouterObserver):
        self.fleet = fleet
        self.observer = observer
        self.clock = fleet.clock
        self.running = 0  # requests between their first and last line of generate()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Place, lease, prefill, hand off, decode; on any failure go on elsewhere from the tokens known by then.

        Leaving the iterator cancels the request everywhere. Raises errors of serving.errors, none of them Retryable.
        """
        timeline = Timeline()
        timeline.note(Moment.ARRIVED, self.clock())
        generated: list[int] = []
        last: Delta | None = None
        failure: BaseException | None = None
        failures = 0
        build: Build | None = None  # what wrote the tokens so far
        self.running += 1
        try:
            while True:
                try:
                    async with self.fleet.lease(request, generated, build if generated else None) as lease:
                        build = lease.build
                        timeline.note(Moment.LEASED, self.clock())
                        async with aclosing(self._tokens(request, generated, lease, timeline)) as deltas:
                            async for delta in deltas:
                                self._note_tokens(request, timeline, delta)
                                generated += delta.tokens
                                last = delta
                                yield delta
                                if delta.finish is not None:
                                    return
                except Retryable as error:
                    failures += not isinstance(error, Preempted)
                    self._retry(request, timeline, error, failures)
        except BaseException as error:
            failure = error
            raise
        finally:
            self.running -= 1
            timeline.note(Moment.FINISHED, self.clock())
            self.observer.finished(request, timeline, last, failure)
            self._log_end(request, timeline, last, failure)

    def _log_end(self, request: Request, timeline: Timeline, last: Delta | None, failure: BaseException | None) -> None:
        if last is not None and last.finish is not None:
            ending = last.finish.value
        else:
            ending = type(failure).__name__ if isinstance(failure, MillraceError) else "left"
        ttft, tpot = timeline.between(Moment.ARRIVED, Moment.FIRST_TOKEN), timeline.tpot
        with request_context(request.request_id):
            log.info(
                "%d prompt tokens, %d output tokens, first after %s, then one each %s: %s",
                len(request.prompt),
                timeline.tokens,
                "never" if ttft is None else f"{ttft * 1e3:.0f} ms",
                "-" if tpot is None else f"{tpot * 1e3:.1f} ms",
                ending,
            )

    async def _tokens(
        self, request: Request, generated: list[int], lease: RouterLease | NoLease, timeline: Timeline
    ) -> AsyncGenerator[Delta, None]:
        """Prefill into the lease, by one worker after another until one succeeds, then what the lease decodes."""
        avoid: set[str] = set()
        failures = 0
        while True:
            worker = await self.fleet.prefill_worker(request, generated, lease, avoid)
            order = LeaseOrder(lease=lease.fence, request=request, generated=tuple(generated))
            timeline.note(Moment.PREFILL_SENT, self.clock())
            try:
                async with self._prefill(worker, PrefillOrder(order=order, grant=lease.grant), lease) as run:
                    prefilled = await run.first()
                    yield prefilled.delta
                    if prefilled.delta.finish is None:
                        async for delta in lease.deltas():
                            yield delta
                    return
            except Retryable as error:
                if lease.failed.done():
                    raise  # the decode side is gone: the lease has to be placed anew
                if isinstance(error, WorkerLost):
                    self.fleet.blame(worker.status.instance, error)
                if isinstance(error, Draining):
                    self.fleet.registry.leaves(worker.status.instance)
                if isinstance(error, WorkerLost | Draining):
                    avoid.add(worker.status.instance)
                failures += 1
                self._retry(request, timeline, error, failures)
                await lease.advance(request, generated)

    def _prefill(self, worker: Candidate, order: PrefillOrder, lease: RouterLease | NoLease) -> PrefillCall:
        """A prefill try; its tokens count towards the worker's load while it runs."""
        instance = worker.status.instance
        entry = self.fleet.registry.get(instance)
        tokens = len(order.order.request.prompt) + len(order.order.generated)
        running = self.fleet.prefills.setdefault(instance, set())

        def ended() -> None:
            running.discard(run)
            if entry is not None:
                entry.prefill_tokens -= tokens

        run = PrefillCall(self.fleet.link(worker.status), order, lease, ended)
        running.add(run)
        if entry is not None:
            entry.prefill_tokens += tokens
        return run

    def _retry(self, request: Request, timeline: Timeline, error: Retryable, failures: int) -> None:
        """A try has failed: count it, and go on unless there were too many or time is up."""
        timeline.note(Moment.REPLACED, self.clock())
        self.observer.replaced(error)
        with request_context(request.request_id):
            log.warning("placing again after %s: %s", type(error).__name__, error.message)
        if failures > self.fleet.config.max_failures:
            raise Unavailable(f"gave up after {failures} failed placements; the last: {error.message}") from error
        if request.deadline is not None and self.clock() > request.deadline:
            raise DeadlineExceeded("the request's deadline has passed") from error

    def _note_tokens(self, request: Request, timeline: Timeline, delta: Delta) -> None:
        now = self.clock()
        if timeline.last_token is None:
            timeline.note(Moment.FIRST_TOKEN, now)
            self.observer.first_token(request, now - timeline.events[0][1], delta.cached_tokens)
        else:
            self.observer.tokens(now - timeline.last_token, len(delta.tokens))
        timeline.last_token = now
        timeline.tokens += len(delta.tokens)

    @property
    def prefills(self) -> int:
        """Prefill calls in progress."""
        return sum(map(len, self.fleet.prefills.values()))

    async def audit(self) -> list[Audit]:
        """What the router and every worker it reaches hold."""
        counts = {
            "requests": self.running,
            "leases": self.fleet.open_leases(),
            "prefills": self.prefills,
            "waiting": self.fleet.admission.waiting,
        }
        leaked = {"leases": max(0, counts["leases"] - self.running)}
        return [Audit(service=self.fleet.config.name, counts=counts, leaked=leaked), *await self.fleet.audits()]
