"""Where the other hosts of a leader's group come in: one process waits at the door, and then stands for its host.

A place that a host has had stays a host's: it may be lost, and come back. It knows neither models nor epochs.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.expert_parallel.exchange import RankLost
from serving.rank_group.child import RankProcess
from serving.rank_group.host_door import HostIdentity, HostSecurity
from serving.rank_group.host_line import ToldOnce
from serving.rank_group.host_messages import AwaitHost, HostCame, TakeHost
from serving.rank_group.host_plan import HostPlace, refusal, unplaced

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.2  # between looks whether the group is closing, or another thread has let a host in
PAUSE_SECONDS = 1.0  # before another process waits at the door, where one has ended there

Refused = Callable[[HostPlace], str | None]  # why a host cannot have a place


@dataclass(frozen=True, slots=True)
class _Missed:
    """A host that is waited for: it is let in after a pause of so many seconds, at this time of the monotonic clock."""

    pause: float
    at: float


class HostLobby:
    """Of a group of `identity.ranks`, the first `local` of which are on the leader's host."""

    def __init__(self, listening: socket.socket, identity: HostIdentity, security: HostSecurity, local: int) -> None:
        """Closes `listening` at its own end."""
        self.local, self.identity = local, identity
        self.places: list[HostPlace] = []  # in their order, once all hosts have come
        self._listening, self._security = listening, security
        self._came: dict[HostPlace, RankProcess] = {}  # that nobody has taken yet
        self._missed: dict[HostPlace, _Missed] = {}
        self._closing = threading.Event()
        self._door = threading.Lock()  # held by who has a process wait there

    def gather(self, seconds: float) -> Sequence[RankProcess]:
        """The processes that stand for all other hosts, in the order of their ranks. Raises RankLost and OSError.

        They are this lobby's to end until they are `handed_over`.
        """
        until = time.monotonic() + seconds

        def refused(place: HostPlace) -> str | None:
            self._drop_lost()
            return refusal(place, list(self._came), self.local, self.identity.ranks)

        with self._door:
            while missing := self._missing():
                log.info("waiting for the hosts of ranks %s", ", ".join(map(str, missing)))
                place, process = self._let_in(missing[0], refused, until)
                self._came[place] = process
        self.places = sorted(self._came)
        for number, place in enumerate(self.places, self.local):
            self._came[place].rank = number
        return [self._came[place] for place in self.places]

    def _missing(self) -> Sequence[int]:
        """Ranks that nobody has come for, or nobody any more."""
        self._drop_lost()
        return unplaced(list(self._came), self.local, self.identity.ranks)

    def _drop_lost(self) -> None:
        """A host that is lost before all have come leaves its place to the next: it comes again by itself."""
        for place, process in list(self._came.items()):
            if process.process.poll() is not None:
                log.warning("the host of %s is lost before all hosts have come, and waited for again", place)
                self._came.pop(place).channel.close()

    def handed_over(self) -> list[RankProcess]:
        """The same, which are the caller's from now on."""
        return [self._taken(place) for place in self.places]

    def again(self, rank: int, pause: float = 0.0, until: float = math.inf) -> RankProcess:
        """The process that stands for the host which is this rank of the group, once the host has come back.

        It is let in when `pause` seconds have passed, and is told so before. Raises RankLost when the group is closing,
        and at the time `until` of the monotonic clock.
        """
        place = self.places[rank - self.local]
        self._missed[place] = _Missed(pause, time.monotonic() + pause)
        log.warning("the host of %s is waited for: start it again, unless it is there and joins by itself", place)
        if pause:
            log.warning(
                "the host of %s was lost soon after it had come, not for the first time: it is let in again in %.1f s"
                " at the earliest; see what it says before it leaves",
                place,
                pause,
            )
        while place not in self._came:
            if self._closing.is_set():
                raise RankLost(rank, "the group is closing")
            if time.monotonic() >= until:
                raise RankLost(rank, f"its host has not come again with {place}: start it, and this worker again")
            if self._door.acquire(timeout=LOOK_SECONDS):
                try:
                    if place not in self._came and not self._closing.is_set():
                        self._wait_for_any(place, until)
                finally:
                    self._door.release()
        try:
            return self._taken(place)
        except KeyError:  # closing has taken it meanwhile
            raise RankLost(rank, "the group is closing") from None

    def _wait_for_any(self, place: HostPlace, until: float) -> None:
        """Of the hosts that are missed: others may be so while this thread has the door."""

        try:
            found, process = self._let_in(place.start, self._not_missed, until)
        except (RankLost, OSError) as error:  # no process, memory or descriptor is left for it
            if time.monotonic() < until and not self._closing.wait(PAUSE_SECONDS):
                log.warning("the process that waits for hosts has ended, another one is to do so: %s", error)
            return
        del self._missed[found]
        self._came[found] = process

    def _not_missed(self, coming: HostPlace) -> str | None:
        """Why a host is not let in that says it has been here before."""
        missed = self._missed.get(coming)
        if missed is None:
            return f"{coming}: the leader misses no such host at present"
        if time.monotonic() >= missed.at:
            return None
        return (
            f"{coming}: lost soon after this host had come, not for the first time; it is let in after a pause of"
            f" {missed.pause:g} s"
        )

    def _taken(self, place: HostPlace) -> RankProcess:
        process = self._came.pop(place)
        process.rank = self.local + self.places.index(place)
        return process

    def _let_in(self, label: int, refused: Refused, until: float) -> tuple[HostPlace, RankProcess]:
        """The next host, and the process that stands for it. Raises RankLost and OSError."""
        process, taken = RankProcess(label, inherited=(self._listening.fileno(),), part="door"), False
        try:
            order = AwaitHost(listening=self._listening.fileno(), identity=self.identity, security=self._security)
            process.ask(order, ANSWER_SECONDS)
            told = ToldOnce()
            while True:
                came = self._heard(process, until)
                reason = refused(came.place)
                if reason is None:
                    process.say(TakeHost(), ANSWER_SECONDS)
                    taken, process.called = True, f"the host of {came.place}"
                    log.info("the host at %s has %s of the group", came.where, came.place)
                    return came.place, process
                if told.is_new((came.place, reason)):  # it asks again and again
                    log.warning("the host at %s is not taken in: %s", came.where, reason)
                process.ask(TakeHost(reason), ANSWER_SECONDS)
        finally:
            if not taken:
                process.process.kill()
                process.channel.close()
                process.process.wait()

    def _heard(self, process: RankProcess, until: float) -> HostCame:
        poller = select.poll()
        poller.register(process.channel.fileno(), select.POLLIN)
        while not poller.poll(LOOK_SECONDS * 1000):
            if self._closing.is_set():
                raise RankLost(None, "the group is closing")
            if time.monotonic() >= until:
                missing = unplaced(list(self._came), self.local, self.identity.ranks)
                raise RankLost(missing[0], f"no host has come with ranks {', '.join(map(str, missing))}")
        return process.answer(HostCame, ANSWER_SECONDS)

    def close(self) -> None:
        """Nobody is let in any more, and who waits for a host is told."""
        self._closing.set()
        with self._door:
            for process in self._came.values():
                process.process.kill()
                process.channel.close()
                process.process.wait()
            self._came.clear()
            self._listening.close()
