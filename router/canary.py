"""The canary: one real token through every pair of workers that no request has used for a while, so that what is broken
shows before a client finds it.

It goes over the fleet past admission, placement and the users' metrics. What it finds opens and closes breakers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import count, islice
from typing import Any
from uuid import uuid4

from router.candidate import Candidate, Dispatched
from router.fleet import Fleet
from router.leases import OUT_OF_REACH
from router.placement import blames_link
from router.request_state import RequestState
from router.stalls import STEPS
from serving.errors import Draining, MillraceError, NoRoom, Preempted, Retryable, WorkerLost
from serving.messages import Request, SamplingParams
from serving.step_cost import StepLoad

log = logging.getLogger(__name__)

TENANT = "millrace-canary"  # no user shares blocks with it
PROMPT = (1, 2, 3)  # every vocabulary has these
PATIENCE = 2.0  # seconds for the token, beside the worker's longest step: within 5 s of a break the pair is red
LOOK = 0.25  # seconds from one look at the clock to the next
STANDSTILL = 4 * LOOK  # a longer one has not only a slow loop: of it HEARD seconds count
HEARD = 2 * LOOK
MOST = 8  # pairs at a time
WINDOW = 512  # pairs that are looked at at a time: in large clusters it takes more to go round

Pair = tuple[str, str]  # instances of a prefill and a decode worker; of a mixed one, twice its own


class Stage(Enum):
    """How far the token has come."""

    LEASE = "lease"
    PREFILL = "prefill"
    DECODE = "decode"


class Canary:
    """`run()` as a background task. `interval`: seconds after which a pair without traffic is tried."""

    def __init__(self, fleet: Fleet, interval: float, *, patience: float = PATIENCE):
        self.fleet = fleet
        self.interval = interval
        self.patience = patience
        self.outcomes: Counter[str] = Counter()  # probes by how they went: ok, failed, unclear
        self._tried: dict[Pair, float] = {}  # when a probe of the pair last ended
        self._running: dict[Pair, asyncio.Task[None]] = {}
        self._life = uuid4().hex[:12]  # other routers try the same workers: leases must not be named alike
        self._numbers = count(1)
        self._seen = 0  # pairs in this round

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                self.begin_due()
                await asyncio.sleep(self.interval / 4)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def begin_due(self) -> None:
        """Begin to probe the pairs that are due, those tried longest ago first."""
        now, pairs = self.fleet.clock(), {_key(*pair): pair for pair in self._next_pairs()}
        last = {key: max(self._tried.get(key, 0.0), self.fleet.worked.get(key, 0.0)) for key in pairs}
        due = sorted((at, key) for key, at in last.items() if now - at >= self.interval and key not in self._running)
        for _, key in due[: MOST - len(self._running)]:
            task = asyncio.create_task(self.probe(*pairs[key]), name="canary")
            self._running[key] = task
            task.add_done_callback(partial(self._ended, key))

    def _next_pairs(self) -> list[tuple[Candidate, Candidate]]:
        """All pairs or, where there are very many, the next so many of them."""
        found = list(islice(self.fleet.pairs(), self._seen, self._seen + WINDOW))
        self._seen += WINDOW
        if len(found) < WINDOW:
            self._seen, known = 0, self.fleet.registry.workers.keys()
            self._tried = {key: at for key, at in self._tried.items() if known >= set(key)}
        return found

    def _ended(self, key: Pair, task: asyncio.Task[None]) -> None:
        del self._running[key]

    async def probe(self, prefill: Candidate, decode: Candidate) -> None:
        """Send a token through the pair, and tell its breakers what came of it."""
        trip = _Trip(self.fleet, prefill, decode, f"canary-{self._life}-{next(self._numbers)}")
        error: MillraceError | None = None
        try:
            await _within(self._patience(prefill) + self._patience(decode) - self.patience, trip.run())
        except TimeoutError:
            error = self._unanswered(trip)
        except MillraceError as broken:
            error = broken
        self._tried[_key(prefill, decode)] = self.fleet.clock()
        self.outcomes[self._conclude(trip, error)] += 1

    def _unanswered(self, trip: _Trip) -> MillraceError:
        """Time is up. A worker that reports, and from which nothing comes else, is cut off: what it holds moves."""
        fleet, blamed = self.fleet, trip.blamed
        if trip.stage is Stage.PREFILL and trip.answered and trip.moved:
            return NoRoom("busy")
        error = WorkerLost(f"no answer within {self.patience:g} s")
        if blamed is not None and not (trip.stage is Stage.PREFILL and trip.answered):
            instance, half_time = blamed.status.instance, (trip.began + fleet.clock()) / 2  # it may break on the way
            entry = fleet.registry.get(instance)
            if entry is not None and entry.seen > trip.began and fleet.sessions.heard(instance) <= half_time:
                fleet.relieve(blamed, error)
        return error

    def _patience(self, worker: Candidate) -> float:
        """The longest a step of it may take, and ours."""
        cost, most = worker.status.step_cost, worker.status.max_batched_tokens
        return self.patience + (cost.seconds(StepLoad.of(0, most)) if cost is not None and cost.samples else 0.0)

    def _conclude(self, trip: _Trip, error: MillraceError | None) -> str:
        """Tell the breakers; the outcome."""
        fleet, now = self.fleet, self.fleet.clock()
        prefill, decode = _key(trip.prefill, trip.decode)
        if error is None:
            fleet.breakers.succeeded(prefill, now)
            fleet.decoded(prefill, decode)
            return "ok"
        if isinstance(error, NoRoom | Draining | Preempted) or error.code == OUT_OF_REACH:
            return "unclear"
        log.warning(
            "the canary from %s to %s did not get beyond %s: %s",
            *(trip.prefill.status.name, trip.decode.status.name, trip.stage.value, error.message),
        )
        if prefill != decode and (trip.blamed is None or (isinstance(error, Retryable) and blames_link(error))):
            fleet.blame_link(prefill, decode, error)
            fleet.interrupt_handoffs(prefill, decode)
        else:
            fleet.breakers.failed((trip.blamed or trip.decode).status.instance, now)
        return "failed"


class _Trip:
    """One token's way through a pair: a lease, a prefill into it, and a step of decode."""

    def __init__(self, fleet: Fleet, prefill: Candidate, decode: Candidate, name: str):
        self.fleet = fleet
        self.prefill = prefill
        self.decode = decode
        self.stage = Stage.LEASE
        self.blamed: Candidate | None = decode  # should it get no further; None: the way between them
        self.began = fleet.clock()
        self.answered = False  # the prefill worker has, to a question that waits for no prompt
        self._steps = _steps(fleet, prefill)
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, prompt=PROMPT, sampling=sampling, tenant=TENANT)
        self.state = RequestState(request=request)

    @property
    def moved(self) -> bool:
        """True if the prefill worker has reported steps since this began: its own work may be before ours."""
        return _steps(self.fleet, self.prefill) != self._steps

    async def run(self) -> None:
        """Raises MillraceError where the way is broken."""
        self.fleet.probing += 1
        asking = asyncio.create_task(self._ask(), name="canary-question")
        try:
            own = self.prefill.status.instance == self.decode.status.instance
            lease = await self.fleet.open(self.decode, self.state.request.request_id, self.state, prefill=own)
            try:
                self.stage, self.blamed = Stage.PREFILL, self.prefill
                reserved = self.fleet.reserve(self.prefill, Dispatched(prompt_tokens=len(PROMPT)))
                async with self.fleet.prefill(self.prefill, self.state, lease, reserved) as call:
                    self.state.take((await call.first()).delta, self.fleet.clock())
                    self.stage, self.blamed = Stage.DECODE, None
                    await lease.next()
            except WorkerLost:
                self.blamed = self.decode if lease.failed.done() else self.prefill
                raise
            finally:
                self.fleet.close_lease(lease)
        finally:
            asking.cancel()
            self.fleet.probing -= 1

    async def _ask(self) -> None:
        with suppress(MillraceError):
            await self.fleet.link(self.prefill.status).audit()
            self.answered = True


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError when the work has lasted so long, and then has ended.

    A router that stood still could hear nobody: what counts is time in which its loop went round, and after a
    standstill it listens once more.
    """
    clock, running, stood = asyncio.get_running_loop().time, asyncio.create_task(work, name="canary-trip"), False
    try:
        while not running.done() and (seconds > 0.0 or stood):
            before = clock()
            await asyncio.wait({running}, timeout=min(LOOK, seconds) if seconds > 0.0 else LOOK)
            passed = clock() - before
            stood = passed > STANDSTILL and seconds > 0.0
            seconds -= HEARD if passed > STANDSTILL else passed
        if not running.done():
            raise TimeoutError
        running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _key(prefill: Candidate, decode: Candidate) -> Pair:
    return prefill.status.instance, decode.status.instance


def _steps(fleet: Fleet, worker: Candidate) -> float:
    """Steps the worker had run by its last report."""
    entry = fleet.registry.get(worker.status.instance)
    return entry.status.counters.get(STEPS, 0.0) if entry is not None else 0.0
