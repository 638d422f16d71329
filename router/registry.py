"""The live registry: which workers there are, how loaded, and whether they can be believed. Pure; `now` comes in.

heartbeat ──► live ──(silent, or a call broke)──► suspect ──heartbeat──► live
                                                    └──(silent for long)──► forgotten
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite

from router.arrivals import ArrivalRates, Arrivals
from router.candidate import NOTHING, Candidate, Dispatched, QueuedPrompt
from serving.messages import WorkerStatus
from serving.share import Share

OLDEST_ECHO = 60.0  # seconds: a status that is said to be older, or from the future, carries another clock's time
LONGEST_WAIT = 86_400.0  # seconds: no worker has prompts for a day
REMEMBERED = 1000  # instances that were replaced
FLIGHT_SECONDS = 0.01  # what was sent so shortly before a status was made may not be in it


def believable(status: WorkerStatus) -> WorkerStatus:
    """The status without numbers that cannot be right: a worker that sends such counts as one that has none."""
    cost, waits, share = status.step_cost, status.waiting_seconds, status.prompt_share
    if not (0.0 <= waits < LONGEST_WAIT and 0.0 <= share <= 1.0 and (cost is None or cost.possible)):
        status = replace(status, step_cost=None, waiting_seconds=0.0, prompt_share=0.0)
    if not (isfinite(status.stalled_seconds) and all(map(isfinite, status.counters.values()))):
        counters = {name: number for name, number in status.counters.items() if isfinite(number)}
        stalled = status.stalled_seconds if isfinite(status.stalled_seconds) else 0.0
        status = replace(status, counters=counters, stalled_seconds=stalled)
    return status


@dataclass(slots=True)
class RegisteredWorker:
    """A registered worker. `suspect` since a call to it broke; a later heartbeat clears it.

    `leases` are this router's that are open on it. What the router has sent since the status was made is kept apart.
    `busy_until` is when the prompts that it has been given are computed, on the router's clock. `stale` gathers the
    instances of a registry that are seen otherwise than before.
    """

    status: WorkerStatus
    seen: float
    made_at: float
    suspect: bool = False
    leases: int = 0
    newer: Dispatched = NOTHING
    slow: bool = False  # it works, but takes much longer than it should (router.slowness)
    busy_until: float = 0.0
    decoding: Share = field(default_factory=Share)  # of its leases, those that decode
    in_time: ArrivalRates = field(default_factory=ArrivalRates)  # prompts whose first tokens came in time from here
    _sent: deque[tuple[float, Dispatched]] = field(default_factory=deque)
    _prompts: deque[Reservation] = field(default_factory=deque)  # sent since the status was made
    _queued: dict[Reservation, QueuedPrompt] = field(default_factory=dict)  # sent, and without a first token
    stale: set[str] = field(default_factory=set)
    _candidate: Candidate | None = None

    def __post_init__(self) -> None:
        self.busy_until = self.made_at + self.status.waiting_seconds

    def _changed(self) -> None:
        """The worker is seen anew when it is next asked for."""
        self._candidate = None
        self.stale.add(self.status.instance)

    def sent(self, work: Dispatched, now: float) -> None:
        """The router has sent this work, or knows that it is over where `work` is negative."""
        self.leases += work.leases
        self._sent.append((now, work))
        self.newer += work
        self._changed()

    def begun(self, prompt: Reservation) -> None:
        """A prompt joins the worker's queue."""
        self.busy_until = prompt.until = max(self.busy_until, prompt.at) + prompt.work.prompt_seconds
        self._prompts.append(prompt)
        if prompt.turn is not None:
            self._queued[prompt] = QueuedPrompt(*prompt.turn, prompt.work.prompt_seconds, prompt.at)

    def left(self, prompt: Reservation, now: float, *, computed: bool) -> None:
        """A prompt has left the queue. Those behind it are as early, or as late, as it was; one that was not computed
        spares them its own time alone.
        """
        self._queued.pop(prompt, None)
        if prompt not in self._prompts:
            return
        place = self._prompts.index(prompt)
        sooner = prompt.until - now if computed else prompt.work.prompt_seconds
        del self._prompts[place]
        for behind in islice(self._prompts, place, None):
            behind.until = max(now, behind.until - sooner)
        self.busy_until = max(now, self.busy_until - sooner)

    def report(self, status: WorkerStatus, now: float, made_at: float) -> None:
        """A heartbeat: what was sent before its status was made is part of it."""
        self.decoding.look(status.running, status.leases, made_at)
        self.status, self.seen, self.made_at, self.suspect = status, now, made_at, False
        while self._sent and self._sent[0][0] < made_at - FLIGHT_SECONDS:
            self.newer += -self._sent.popleft()[1]
        if not self._sent:
            self.newer = NOTHING
        while self._prompts and self._prompts[0].at < made_at - FLIGHT_SECONDS:
            self._prompts.popleft()
        self.busy_until = made_at + status.waiting_seconds
        for prompt in self._prompts:
            self.busy_until = prompt.until = max(self.busy_until, prompt.at) + prompt.work.prompt_seconds
        self._share(made_at - FLIGHT_SECONDS)
        self._changed()

    def _share(self, until: float) -> None:
        """What was sent before takes no longer than the worker says, which knows what prompts share steps.

        They were counted with those of them whose first tokens have come since.
        """
        every = sum(prompt.seconds for prompt in self._queued.values()) - self.newer.prompt_seconds
        share = min(1.0, self.status.waiting_seconds / every) if every > 0.0 else 1.0
        for sent, prompt in self._queued.items():
            if sent.at < until and prompt.share != share:
                self._queued[sent] = prompt._replace(share=share)

    def leaves(self) -> None:
        self.status = replace(self.status, draining=True)
        self._changed()

    def mark_slow(self, slow: bool) -> None:
        self.slow = slow
        self._changed()

    @property
    def candidate(self) -> Candidate:
        """The worker as policies see it, made anew when something has changed."""
        if self._candidate is None:
            self._candidate = Candidate(
                self.status,
                self.newer,
                self.leases,
                self.made_at,
                self.busy_until,
                self.slow,
                tuple(self._queued.values()),
                self.decoding.share,
                self.in_time.expected(self.seen),
            )
        return self._candidate


class Reservation:
    """Work that counts towards a worker's load from when it is decided until it is released.

    `turn` is the priority of its prompt and when that is due, on the router's clock; None: not known.
    """

    def __init__(
        self,
        worker: RegisteredWorker | None,
        work: Dispatched,
        clock: Callable[[], float],
        turn: tuple[int, float] | None = None,
    ):
        self.worker = worker
        self.work = work
        self.clock = clock
        self.turn = turn
        self.at = self.until = clock()  # until: when its prompt is predicted to be computed
        if worker is not None:
            worker.sent(work, self.at)
            if work.prompt_seconds:
                worker.begun(self)

    def release(self, *, computed: bool = False) -> None:
        """The work is over: its prompt is computed, or was not sent or given up. Safe to repeat."""
        worker, self.worker = self.worker, None
        if worker is not None:
            now = self.clock()
            worker.sent(-self.work, now)
            worker.left(self, now, computed=computed)


class Registry:
    """Workers by instance id. `silence` seconds without a heartbeat make one suspect, three times that forgotten."""

    def __init__(self, silence: float = 5.0):
        self.silence = silence
        self.workers: dict[str, RegisteredWorker] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED)  # instances whose place another life has taken
        self._listed: list[Candidate] | None = None  # None: others are there, or believed, than before
        self._places: dict[str, int] = {}  # in that list, by instance
        self._stale: set[str] = set()  # instances that have changed since

    def heartbeat(self, status: WorkerStatus, now: float, *, made_at: float | None = None) -> bool:
        """Take a heartbeat in that was made at `made_at`, by default now; True if the worker is new or believed again.

        One that was long on its way is as old as it says; a time that cannot be right counts as now.
        """
        made = now if made_at is None or not now - OLDEST_ECHO <= made_at <= now else made_at
        worker = self.workers.get(status.instance)
        if worker is None and status.instance in self._over:
            return False  # it was under way while the next life began
        if worker is None:
            self._replace_previous_life(status)
            self.workers[status.instance] = RegisteredWorker(status, now, made, stale=self._stale)
            self._listed = None
            return True
        if worker.suspect:
            self._listed = None
        news = worker.suspect or worker.status.draining != status.draining
        worker.report(status, now, made)
        return news

    def _replace_previous_life(self, status: WorkerStatus) -> None:
        """A worker that comes back under its name and address is not also still there under its old instance."""
        for instance, worker in list(self.workers.items()):
            if (worker.status.name, worker.status.address) == (status.name, status.address):
                del self.workers[instance]
                self._over.append(instance)

    def suspect(self, instance: str) -> None:
        """A call to it broke: send nothing there until it is heard of again."""
        worker = self.workers.get(instance)
        if worker is not None:
            worker.suspect, self._listed = True, None

    def mark_slow(self, instance: str, slow: bool) -> None:
        """It takes much longer than it should, or no longer does."""
        worker = self.workers.get(instance)
        if worker is not None:
            worker.mark_slow(slow)

    def in_time(self, instance: str, prompt: Arrivals, now: float) -> None:
        """A prompt's first token has come from there within its objective."""
        worker = self.workers.get(instance)
        if worker is not None:
            worker.in_time.note(prompt, now)

    def leaves(self, instance: str) -> None:
        """It has said that it drains, before a heartbeat did: send nothing new there."""
        worker = self.workers.get(instance)
        if worker is not None:
            worker.leaves()

    def excuse(self, now: float) -> None:
        """Nobody was listening until now: every worker has a whole silence to be heard in."""
        for worker in self.workers.values():
            worker.seen = now

    def expire(self, now: float) -> list[str]:
        """Instances that have just fallen silent; long-silent ones are forgotten."""
        fallen = []
        for instance, worker in list(self.workers.items()):
            silent = now - worker.seen
            if silent > self.silence and not worker.suspect:
                worker.suspect, self._listed = True, None
                fallen.append(instance)
            if silent > 3 * self.silence:
                del self.workers[instance]
                self._listed = None
        return fallen

    def candidates(self) -> Sequence[Candidate]:
        """Workers that may be given work, as the policy wants them: not to be changed, and it never changes itself.

        Of hundreds few have changed since the request before, and the others are not looked at.
        """
        if self._listed is None:
            believed = [each for each in self.workers.values() if not each.suspect]
            self._listed = [each.candidate for each in believed]
            self._places = {each.status.instance: place for place, each in enumerate(believed)}
        elif self._stale:
            self._listed = self._listed.copy()
            for instance in self._stale.intersection(self._places):
                self._listed[self._places[instance]] = self.workers[instance].candidate
        self._stale.clear()
        return self._listed

    def get(self, instance: str) -> RegisteredWorker | None:
        return self.workers.get(instance)
