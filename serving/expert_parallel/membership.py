"""How the members of a group agree on who is in it: by words in a store, epoch after epoch, no wait without its end.

An epoch is ended by whoever misses a member or admits one. All who can report do so; the first to have heard enough
decides, by compare-and-set, and what is decided holds for all. A member that it leaves out has been declared lost.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import partial

from torch._C._distributed_c10d import Store

from serving.expert_parallel.all_to_all import host_key
from serving.expert_parallel.bounded import BoundedStore, StoreUnavailable
from serving.expert_parallel.epoch import Epoch, Report, Rules, encoded_loss, epoch_of, following, missing, report_of
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.meeting import POLL_SECONDS, exchanged
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.surviving import ExpertsLost

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between looks for members that come back
GRACE = 0.1  # of the deadline: for a member that others miss and that is alive nevertheless


class DeclaredLost(Exception):
    """The others go on without this member: it was too late. It may come back as a new one."""


class Membership:
    """One member's view of the store."""

    def __init__(self, store: BoundedStore, member: int, rules: Rules, deadline: float) -> None:
        """`deadline`: seconds that a member may keep the others waiting."""
        self.store, self.member, self.rules, self.deadline = store, member, rules, deadline
        self.process = f"{host_key()} {os.getpid()} {secrets.token_hex(4)}"

    def begin(self, meeting: float) -> Epoch:
        """The group's first epoch, when all members have met; the latest, if there is one already and it admits this.

        Raises RankLost for a member that does not come within `meeting` seconds, DeclaredLost where nobody admits it.
        """
        if self.store.ask(lambda store: store.check([_record(0)])):
            return self._admitted(meeting)
        words = exchanged(self.store, "begin", self.member, self.places, self.process.encode(), meeting)
        processes = {member: word.decode() for member, word in enumerate(words)}
        first = Epoch(number=0, members=processes, placements=self.rules.origin, step=0).encoded()
        return self._own(epoch_of(self.store.ask(lambda store: store.compare_set(_record(0), "", first)).decode()))

    @property
    def places(self) -> int:
        """How many members the group has when all are there."""
        return len(self.rules.origin[0].slots)

    def report(self, epoch: Epoch, report: Report) -> None:
        """Say that this epoch is over. After this nobody need find the member in its exchange."""
        self.store.ask(lambda store: store.set(_report(epoch, self.member), report.encoded()))

    def is_over(self, epoch: Epoch) -> bool:
        """True if another member ends this epoch, within the deadline."""
        return self.store.ask(lambda store: self._over(store, epoch), self.deadline)

    def _over(self, store: Store, epoch: Epoch) -> bool:
        until = time.monotonic() + self.deadline
        words = [_record(epoch.number + 1), *(_report(epoch, other) for other in epoch.members if other != self.member)]
        while not (over := any(store.check([word]) for word in words)) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return over

    def following(self, epoch: Epoch, watch: ProcessWatch) -> Epoch:
        """Take part in deciding on the next epoch, in the deadline and a tenth of it.

        Raises DeclaredLost where it has been decided without this member, ExpertsLost where there is no next one.
        """
        word = self.store.ask(lambda store: self._settled(store, epoch, watch), self.deadline * (1 + GRACE))
        next_one = self._own(epoch_of(word))
        admitted = {member: key for member, key in next_one.members.items() if not epoch.has(member, key)}
        if admitted:
            self.store.ask(lambda store: _ask_no_longer(store, admitted))
        return next_one

    def ready(self, epoch: Epoch, failure: ExpertsLost | None, watch: ProcessWatch, seconds: float) -> None:
        """Meet the others when all have their experts, or one cannot have them, which is ExpertsLost for all.

        Raises RankLost, when the rest are ready, for a member that has ended, or has said nothing within `seconds`; and
        where the others have given this one up.
        """
        word = "" if failure is None else encoded_loss(failure)
        self.store.ask(lambda store: store.set(_ready(epoch, self.member), word))
        if word := self.store.ask(lambda store: _await_ready(store, epoch, watch, seconds), seconds):
            epoch_of(word)

    def _settled(self, store: Store, epoch: Epoch, watch: ProcessWatch) -> str:
        """The word that decides on the next epoch."""
        began = time.monotonic()
        reports: dict[int, Report] = {}
        while not store.check([_record(epoch.number + 1)]):
            for member in epoch.members:
                if member not in reports and store.check([_report(epoch, member)]):
                    reports[member] = report_of(store.get(_report(epoch, member)).decode())
            late, unmissed = missing(epoch.members, reports, watch.all_ended())
            waited = time.monotonic() - began
            enough = not late or (not unmissed and waited >= GRACE * self.deadline)
            if enough or waited >= self.deadline * (1 + GRACE):
                return self._propose(store, epoch, reports)
            time.sleep(POLL_SECONDS)
        return store.get(_record(epoch.number + 1)).decode()

    def _propose(self, store: Store, epoch: Epoch, reports: dict[int, Report]) -> str:
        try:
            word = following(epoch, reports, self.rules).encoded()
        except ExpertsLost as lost:
            word = encoded_loss(lost)
        return store.compare_set(_record(epoch.number + 1), "", word).decode()

    def _own(self, epoch: Epoch) -> Epoch:
        if not epoch.has(self.member, self.process):
            raise DeclaredLost(f"member {self.member} has been declared lost: epoch {epoch.number} is without it")
        return epoch

    def _admitted(self, seconds: float) -> Epoch:
        """Ask to come in, and wait for an epoch that has this member."""
        epoch = epoch_of(self.store.ask(_latest_record))  # first, since the others wait for who has been let in
        self.store.ask(lambda store: store.set(_knock(self.member), self.process))
        self.store.ask(lambda store: store.add(KNOCKS, 1))
        until = time.monotonic() + seconds
        while not epoch.has(self.member, self.process) and time.monotonic() < until:
            word = self.store.ask(partial(_record_after, number=epoch.number))
            epoch = epoch_of(word) if word else epoch
        if not epoch.has(self.member, self.process):
            self.store.ask(lambda store: _ask_no_longer(store, {self.member: self.process}))  # nobody is to wait for it
        return self._own(epoch)

    def watch(self, epoch: Epoch) -> ProcessWatch:
        """Of the other members' processes, as far as they are on this host."""
        here = host_key()
        keys = {member: process.rsplit(" ", 2) for member, process in epoch.members.items() if member != self.member}
        return ProcessWatch({member: int(pid) for member, (host, pid, _) in keys.items() if host == here})


class Door:
    """Looks from time to time whether somebody waits to be admitted; a thread, so that no step waits for the store."""

    def __init__(self, store: BoundedStore, members: int) -> None:
        self.waiting: dict[int, str] = {}  # members that have asked, with their processes; replaced, never changed
        self._store, self._members = store, members
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="door", daemon=True).start()

    def _look(self) -> None:
        heard = 0
        while not self._closed.wait(LOOK_SECONDS):
            try:
                count = self._store.ask(lambda store: store.add(KNOCKS, 0))
                if count != heard:
                    self.waiting = self._store.ask(self._all)
                    heard = count
            except StoreUnavailable as error:
                log.error("nobody can come back any more: %s", error)
                return

    def _all(self, store: Store) -> dict[int, str]:
        asked = [member for member in range(self._members) if store.check([_knock(member)])]
        return {member: process for member in asked if (process := store.get(_knock(member)).decode())}

    def close(self) -> None:
        self._closed.set()


KNOCKS = "knocks"  # how often anybody has asked to come in


def _await_ready(store: Store, epoch: Epoch, watch: ProcessWatch, seconds: float) -> str:
    """The word of a member that cannot be ready, where there is one."""
    began = time.monotonic()
    silent = set(epoch.members)
    while True:
        if store.check([_record(epoch.number + 1)]):
            raise RankLost(None, "the others have ended the epoch")
        for member in sorted(silent):
            if store.check([_ready(epoch, member)]):
                silent.remove(member)
                if word := store.get(_ready(epoch, member)).decode():
                    return word
        ended = watch.all_ended()
        if silent <= ended or time.monotonic() - began >= seconds:
            break
        time.sleep(POLL_SECONDS)
    for member in sorted(silent | ended):
        reason = "its process has ended" if member in ended else f"it was not ready within {seconds:g} s"
        raise RankLost(epoch.order.index(member), reason)
    return ""


def _latest_record(store: Store) -> str:
    number = 0
    while store.check([_record(number + 1)]):
        number += 1
    return store.get(_record(number)).decode()


def _record_after(store: Store, number: int) -> str:
    """The word on the epoch after this one, "" where there is none in a moment."""
    if store.check([_record(number + 1)]):
        return store.get(_record(number + 1)).decode()
    time.sleep(POLL_SECONDS)
    return ""


def _ask_no_longer(store: Store, members: Mapping[int, str]) -> None:
    """To be admitted; another process of the same member may."""
    for member, process in members.items():
        store.compare_set(_knock(member), process, "")


def _record(number: int) -> str:
    return f"epoch/{number}/record"


def _report(epoch: Epoch, member: int) -> str:
    return f"epoch/{epoch.number}/report/{member}"


def _ready(epoch: Epoch, member: int) -> str:
    return f"epoch/{epoch.number}/ready/{member}"


def _knock(member: int) -> str:
    return f"knock/{member}"
