"""Sends a prepared load, closed loop or open loop, and returns what every request gave.

The bodies are ready before the clock starts. It knows nothing of what the bodies ask, nor of statistics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from bench.endpoint import Endpoint
from bench.sse import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One request, ready to be sent."""

    body: bytes
    prompt_tokens: int
    output_tokens: int
    kind: str = ""  # of a mixture


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """When requests are sent: `concurrency` at a time, or at `arrivals`, seconds from the start."""

    concurrency: int | None = None
    arrivals: tuple[float, ...] = ()


@dataclass(kw_only=True, slots=True)
class Run:
    """Every request of one measurement, in the order of sending."""

    planned: int
    outcomes: list[Outcome] = field(default_factory=list)
    stopped: str = ""  # why it ended before all was sent: "interrupted", "hopeless" or not at all
    client_cpu_s: float = 0.0  # CPU seconds the client's thread used meanwhile

    @property
    def duration(self) -> float:
        """Seconds from the first send to the last finish."""
        ends = [outcome.finished for outcome in self.outcomes if outcome.finished is not None]
        return max(ends) - min(outcome.sent for outcome in self.outcomes) if ends else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Who looks on. `finished` is called after each request; `hopeless` may end the run early."""

    finished: Callable[[Outcome], None] = lambda outcome: None
    hopeless: Callable[[Outcome], bool] = lambda outcome: False
    interrupted: asyncio.Event | None = None


async def run_load(endpoint: Endpoint, requests: Sequence[Prepared], pace: Pace, watch: Watch) -> Run:
    """Sends all requests and waits for all answers, or until interrupted or hopeless; those in flight are cut off."""
    run = Run(planned=len(requests))
    give_up = asyncio.Event()

    async def send(request: Prepared, scheduled: float) -> None:
        outcome = Outcome(
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.output_tokens,
            kind=request.kind,
            scheduled=scheduled,
        )
        run.outcomes.append(outcome)
        await endpoint.send(request.body, outcome)
        watch.finished(outcome)
        if watch.hopeless(outcome):
            give_up.set()

    cpu = time.thread_time()
    started = endpoint.client.clock()
    if pace.concurrency is not None:
        sending = asyncio.create_task(_closed_loop(requests, pace.concurrency, send, endpoint.client.clock))
    else:
        sending = asyncio.create_task(_open_loop(requests, pace.arrivals, send, started, endpoint.client.clock))
    run.stopped = await _first_of(sending, {"interrupted": watch.interrupted, "hopeless": give_up})
    run.client_cpu_s = time.thread_time() - cpu
    return run


Send = Callable[[Prepared, float], Coroutine[None, None, None]]


async def _closed_loop(requests: Sequence[Prepared], concurrency: int, send: Send, clock: Callable[[], float]) -> None:
    """`concurrency` senders, each with its next request as soon as its last one is answered."""
    waiting = iter(requests)

    async def sender() -> None:
        for request in waiting:
            await send(request, clock())

    async with asyncio.TaskGroup() as senders:
        for _ in range(min(concurrency, len(requests))):
            senders.create_task(sender())


async def _open_loop(
    requests: Sequence[Prepared], arrivals: Sequence[float], send: Send, started: float, clock: Callable[[], float]
) -> None:
    """Each request at its time, however many are still unanswered."""
    async with asyncio.TaskGroup() as senders:
        for request, arrival in zip(requests, arrivals, strict=True):
            due = started + arrival
            await asyncio.sleep(max(0.0, due - clock()))
            senders.create_task(send(request, due))


async def _first_of(work: asyncio.Task[None], ends: dict[str, asyncio.Event | None]) -> str:
    """Waits for `work`, or for the first of `ends`, which cancels it; returns the name of that end, else nothing."""
    waits = {asyncio.create_task(event.wait()): name for name, event in ends.items() if event is not None}
    try:
        done, _ = await asyncio.wait({work, *waits}, return_when=asyncio.FIRST_COMPLETED)
        if work in done:
            await work  # raises our own bugs
            return ""
        return next(name for wait, name in waits.items() if wait in done)
    finally:
        for task in (work, *waits):
            task.cancel()
        await asyncio.gather(work, *waits, return_exceptions=True)
