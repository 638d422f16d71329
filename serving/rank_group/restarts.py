"""Starts the process of a rank again when it has ended, and offers it to the group once it is ready for an epoch.

One thread for each rank. It takes no part in steps and does not know what the group makes of its offer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from serving.expert_parallel.exchange import RankLost
from serving.rank_group.child import RankProcess

log = logging.getLogger(__name__)

MOST_RESTARTS = 8  # of processes in a row that ended before they had lasted
LASTING_SECONDS = 60.0
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds
LONGEST_HOST_DELAY = 600.0  # of hosts, which are let in for ever: each time costs the others an epoch
MOST_DOUBLED = 32  # times, of a delay that is as long as it gets by then
JOIN_SECONDS = 10.0


class RestartDelays:
    """How long to wait before there is another process: nothing at first, then twice as long each time. Pure."""

    def __init__(self, most: int | None = MOST_RESTARTS, longest: float = LONGEST_DELAY) -> None:
        """Of `most` in a row; None: as many as there are."""
        self._restarts, self._most, self._longest = 0, most, longest

    def after(self, lasted: float) -> float | None:
        """Seconds, once a process has ended that lasted so many; None where there is to be no other."""
        if lasted >= LASTING_SECONDS:
            self._restarts = 0
        if self._restarts == self._most:
            return None
        self._restarts += 1
        doubled = min(self._restarts - 2, MOST_DOUBLED)
        return 0.0 if self._restarts == 1 else min(FIRST_DELAY * 2.0**doubled, self._longest)


class RankKeeper:
    """Of one rank, whose first process is given. `prepare` readies another, and raises RankLost or ValueError.

    `start` makes the next process instead of a child, once a host has come for it: not before so many seconds have
    passed. Raises RankLost.
    """

    def __init__(
        self,
        first: RankProcess,
        prepare: Callable[[RankProcess], None],
        start: Callable[[int, float], RankProcess] | None = None,
    ) -> None:
        self.current = first
        self._prepare, self._start = prepare, start
        self._preparing = False  # by the thread, which alone reads the channel then
        self._offered: RankProcess | None = None
        self._began = time.monotonic()  # what it is there for: to load may take longer than it lasts then
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on a process that ends is followed by another."""
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name=f"rank-{self.current.rank}", daemon=True)
        self._thread.start()

    def taken(self) -> RankProcess | None:
        """The process that is ready for an epoch, if there is one; it is offered once."""
        with self._lock:
            found, self._offered = self._offered, None
            if found is not None:  # it may have waited long, and fail its first step
                self._began = time.monotonic()
        return found

    @property
    def offers(self) -> bool:
        """Whether there is one to be taken."""
        return self._offered is not None

    def _keep(self) -> None:
        delays = RestartDelays() if self._start is None else RestartDelays(None, LONGEST_HOST_DELAY)
        rank = self.current.rank
        while True:
            status = self.current.process.wait()
            with self._lock:
                self._offered, lasted = None, time.monotonic() - self._began
            if self._closing.is_set():
                return
            delay = delays.after(lasted)
            if delay is None:
                log.error(
                    "rank %d is not started again, since %d of its processes have ended one soon after the other: see"
                    " what they say before they end, and restart the worker; the others go on",
                    rank,
                    MOST_RESTARTS,
                )
                return
            if self._start is None:
                log.warning("rank %d has ended with status %d; it is started again in %.1f s", rank, status, delay)
                if self._closing.wait(delay):
                    return
            self._follow(rank, delay)

    def _follow(self, rank: int, delay: float) -> None:
        """Start the next process and offer it when it is ready; one that cannot be made so is ended."""
        if self._closing.is_set():
            return
        try:
            started = RankProcess(rank) if self._start is None else self._start(rank, delay)
        except (OSError, RankLost) as error:  # the host has no process, memory or descriptor left for it
            if not self._closing.wait(FIRST_DELAY):
                log.warning("%s does not come back: %s", self.current.called, _why(error))
            return
        with self._lock:
            self.current = started
            if self._closing.is_set():
                self.current.process.kill()
                self.current.channel.close()
                return
            self._preparing = True
        ready = False
        try:
            self._prepare(self.current)
            ready = True
        except (RankLost, ValueError) as error:
            log.warning("%s is not ready: %s", self.current.called, _why(error))
        with self._lock:
            self._preparing, self._began = False, time.monotonic()
            if ready:
                self._offered = self.current
            else:
                self.current.process.kill()
                self.current.channel.close()

    def closing(self) -> None:
        """No process follows the present one, which is told to leave."""
        with self._lock:
            self._closing.set()
            if self._preparing:
                self.current.process.kill()  # its channel is in use
            else:
                self.current.channel.close()

    def close(self, until: float) -> None:
        """See the process leave, or kill it at this time of the monotonic clock. `closing` comes first."""
        self.current.end(until)
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)


def _why(error: Exception) -> str:
    return error.reason if isinstance(error, RankLost) else str(error)
