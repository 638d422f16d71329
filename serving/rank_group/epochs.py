"""The leader's way from one epoch of its group to the next: who is left, who holds what, and that all have met anew.

The leader alone decides: it is there as long as the group is. A rank that it gives up is killed before anything is
computed again, so that none writes KV late. What a step computes is not known here.
"""

from __future__ import annotations

import logging
import os
import select
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.epoch import Epoch, Report, Rules, brought, following, missing
from serving.expert_parallel.exchange import ExchangeUnavailable, RankLost
from serving.expert_parallel.recovery import VAIN_EPOCHS, RecoveryCounts
from serving.expert_parallel.surviving import Brought, ExpertsLost
from serving.rank_group.child import RankProcess
from serving.rank_group.host_plan import HostPlace
from serving.rank_group.member import EpochMember
from serving.rank_group.messages import (
    BeginEpoch,
    EndEpoch,
    EpochBegun,
    EpochEnded,
    ExpertsHeld,
    HoldExperts,
    RankTotals,
    StepDone,
    StepDropped,
    StepFailed,
)
from serving.rank_group.share import LEADER
from serving.temporary import temporary_folder

log = logging.getLogger(__name__)

LOADING_SECONDS = 60.0  # for experts that nobody holds any more
GRACE = 0.1  # of the deadline: for a rank that others miss and that is alive nevertheless
LOOK_SECONDS = 0.005

Processes = Mapping[int, RankProcess]


class GroupEpochs:
    """`others` are the ranks of the present epoch but the leader, by the number that each has for the group's life."""

    def __init__(
        self, own: EpochMember, rules: Rules, deadline: float, hosts: Mapping[int, HostPlace] | None = None
    ) -> None:
        """`deadline`: seconds that a rank may keep the others waiting; `hosts` are those that other hosts are."""
        self.own, self.others = own, dict[int, RankProcess]()
        self.counts = RecoveryCounts()
        self.failures: list[str] = []  # of ranks that made a mistake over the step that was dropped last
        self._rules, self._deadline, self._hosts = rules, deadline, hosts or {}
        self._folder = ExitStack()  # of the file by which the present epoch has met
        self._totals: dict[int, RankTotals] = {}
        self._retired = RankTotals()  # of processes that are lost
        self.epoch = Epoch(number=0, members={LEADER: ""}, placements=rules.origin, step=0)

    @property
    def totals(self) -> RankTotals:
        """Of all ranks so far."""
        return sum(self._totals.values(), self._retired + self.own.totals)

    def heard(self, rank: int, totals: RankTotals) -> None:
        """What a rank's process has done so far."""
        self._totals[rank] = totals

    def begin(self, others: Processes, meeting: float) -> None:
        """The first epoch. Raises RankLost, and what `EpochMember.begin` does."""
        self.others = dict(others)
        self.epoch = replace(self.epoch, members=self._members())
        self._meet(self.epoch, meeting)

    def named(self, lost: RankLost) -> RankLost:
        """A loss as the exchange tells of it, with the number that the rank has for the group's life."""
        return RankLost(None if lost.rank is None else self.epoch.order[lost.rank], lost.reason)

    def called(self, rank: int) -> str:
        """As a log calls it: a host by its ranks, since its own number among the members is none of those."""
        return f"the host of {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"

    def told(self, lost: RankLost) -> str:
        """What a log says of it."""
        if lost.rank is None or lost.rank not in self._hosts:
            return str(lost)
        return f"{self.called(lost.rank)} is lost: {lost.reason}"

    def follow(self, lost: RankLost | None, why: str, began: float, admitted: Processes) -> None:
        """End epochs until one begins, at first with those that are `admitted`; what began at `began` is not computed.

        Raises ExpertsLost, and RankLost where epoch after epoch breaks and nobody is missed.
        """
        vain, missed = 0, lost
        self.counts.noticed = time.monotonic()
        while True:
            before = replace(self.epoch, placements=self.own.placements or self.epoch.placements)
            log.warning("epoch %d of the expert group ends: %s", before.number, why)
            self.epoch = self._next(before, missed, admitted)
            changed = self._count(before, why)
            try:
                self._meet(self.epoch, self._deadline)
                break
            except RankLost as again:
                vain = 0 if changed else vain + 1
                if vain == VAIN_EPOCHS:
                    raise
                missed, why, admitted = again, self.told(again), {}
        stalled = time.monotonic() - began
        self.counts.stalled_seconds += stalled
        members = ", ".join(map(self.called, self.epoch.order))
        log.warning("epoch %d goes on with %s, %.3f s later", self.epoch.number, members, stalled)

    # ---- who is left -------------------------------------------------------------------------------------------

    def _next(self, before: Epoch, missed: RankLost | None, admitted: Processes) -> Epoch:
        """The next epoch. Whoever is not in it is dead."""
        if missed is not None and missed.rank == LEADER:
            missed = None  # what others say who have waited for it
        self.own.leave()
        heard = self._outcomes(missed)
        held = self._held({rank: other for rank, other in self.others.items() if rank in heard})
        for rank in sorted(self.others.keys() - held.keys()):
            self._give_up(rank)
        origin = self._rules.origin  # also of one that has come, and has computed nothing yet
        reports = {rank: Report(step=before.step, held=of or brought(origin, rank)) for rank, of in held.items()}
        self.others = dict(sorted((self.others | dict(admitted)).items()))
        joined = {rank: str(other.process.pid) for rank, other in admitted.items()}
        reports[LEADER] = Report(step=before.step, admits=joined, held=self.own.end())
        return following(before, reports, self._rules)

    def _members(self) -> dict[int, str]:
        return {LEADER: ""} | {rank: str(other.process.pid) for rank, other in self.others.items()}

    def _outcomes(self, missed: RankLost | None) -> dict[int, Report]:
        """Hear what is still owed: a rank that has answered is alive, whatever others say of it."""
        began = time.monotonic()
        told = frozenset() if missed is None or missed.rank is None else frozenset([missed.rank])
        reports = {LEADER: Report(step=0, lost=told)}
        gone: set[int] = set()
        while True:
            for rank, other in self.others.items():
                if rank not in reports and not other.owed:
                    reports[rank] = Report(step=0)
            late, unmissed = missing(self.others, reports, gone)
            waited = time.monotonic() - began
            longest = self._deadline * (1 + GRACE)
            if not late or (not unmissed and waited >= GRACE * self._deadline) or waited >= longest:
                return reports
            readable = self._readable(late)
            for rank in readable:
                try:
                    reports |= self._heard_of(rank, longest - waited)
                except RankLost:
                    gone.add(rank)
            gone |= {rank for rank in late.difference(readable) if self.others[rank].ending}

    def _readable(self, ranks: set[int]) -> list[int]:
        """Those that have something to say, or have closed, in a moment."""
        poller = select.poll()
        found = {self.others[rank].channel.fileno(): rank for rank in sorted(ranks)}
        for descriptor in found:
            poller.register(descriptor, select.POLLIN)
        return [found[descriptor] for descriptor, _ in poller.poll(LOOK_SECONDS * 1000)]

    def _heard_of(self, rank: int, seconds: float) -> dict[int, Report]:
        """Its report, once it owes nothing. Raises RankLost."""
        other = self.others[rank]
        word = other.hear(seconds)
        if isinstance(word, StepDone):
            self.heard(rank, word.totals)
        if isinstance(word, StepFailed):
            self.failures.append(f"{self.called(rank)}: {word.error}")
        missed = word.lost if isinstance(word, StepDropped) else None
        lost = frozenset() if missed is None else frozenset([self.epoch.order[missed]]) - {LEADER}
        return {} if other.owed else {rank: Report(step=0, lost=lost)}

    def _held(self, others: Processes) -> dict[int, Brought | None]:
        """What those hold that leave the epoch when they are told."""
        asked, found = list[RankProcess](), dict[int, Brought | None]()
        for other in others.values():
            try:
                other.ask(EndEpoch(), self._deadline)
                asked.append(other)
            except RankLost as lost:
                log.warning("%s", self.told(lost))
        for other in asked:
            try:
                found[other.rank] = other.answer(EpochEnded, self._deadline).held
            except RankLost as lost:
                log.warning("%s", self.told(lost))
        return found

    def _give_up(self, rank: int) -> None:
        """Raises RankLost where a process does not end that is told to: it might write KV of a step that is over."""
        other = self.others.pop(rank)
        self._retired += self._totals.pop(rank, RankTotals())
        other.kill(self._deadline)

    def _count(self, before: Epoch, why: str) -> bool:
        """Whether the present epoch has other members than the one before; they are counted and logged."""
        now = self.epoch
        lost = [rank for rank, process in before.members.items() if not now.has(rank, process)]
        came = [rank for rank, process in now.members.items() if not before.has(rank, process)]
        self.counts.losses += len(lost)
        self.counts.admitted += len(came)
        for rank in lost:
            self._tell_lost(rank, why)
        for rank in came:
            log.warning("%s has come back: nothing is to be done", self.called(rank))
        return bool(lost or came)

    def _tell_lost(self, rank: int, why: str) -> None:
        what = "it is started again; nothing is to be done unless this comes again"
        if rank in self._hosts:
            what = "it is waited for: start it again, unless it is there and joins by itself"
        log.error("%s is lost (%s): the others go on without it, and %s", self.called(rank), why, what)

    # ---- meeting -----------------------------------------------------------------------------------------------

    def _meet(self, epoch: Epoch, meeting: float) -> None:
        """Have all ranks of `epoch` hold their experts and meet. Raises RankLost, ExpertsLost."""
        if loaded := self._hold(epoch):
            self.counts.loaded_experts += loaded
            log.warning("%d experts that no rank held any more were read again from the checkpoint", loaded)
        self._folder.close()
        store = self._folder.enter_context(temporary_folder(Path(tempfile.gettempdir()))) / "store"
        processes = (os.getpid(), *(other.process.pid for other in self.others.values()))
        self._begin(BeginEpoch(
            number=epoch.number, rank=LEADER, processes=processes, placements=epoch.placements, store=store,
            meeting=meeting,
        ))  # fmt: skip

    def _hold(self, epoch: Epoch) -> int:
        """How many experts all ranks have loaded. Raises RankLost, ExpertsLost.

        All are heard first: one that still loads is not to count as lost with another that is.
        """
        asked, losses = list[RankProcess](), list[RankLost]()
        for place, other in enumerate(self.others.values(), 1):
            try:
                other.ask(HoldExperts(epoch.placements, place), self._deadline)
                asked.append(other)
            except RankLost as lost:
                losses.append(lost)
        loaded = self.own.hold(epoch.placements, LEADER, LOADING_SECONDS)
        for other in asked:
            try:
                word = other.answer(ExpertsHeld, self._deadline + (LOADING_SECONDS if epoch.loads else 0.0))
            except RankLost as lost:
                losses.append(lost)
                continue
            loaded += word.loaded
            if word.lost is not None:
                raise ExpertsLost(word.lost, word.reason)
        if losses:
            raise losses[0]
        return loaded

    def _begin(self, order: BeginEpoch) -> None:
        for place, other in enumerate(self.others.values(), 1):
            other.ask(replace(order, rank=place), self._deadline)
        try:
            self.own.begin(order)
        except RankLost as lost:
            raise self._explained(self.named(lost)) from lost
        except (ExchangeUnavailable, StoreUnavailable) as error:
            if order.number == 0:
                raise
            raise RankLost(None, f"the ranks do not meet: {error}") from error
        for other in self.others.values():
            word = other.answer(EpochBegun, order.meeting + LOADING_SECONDS)
            if word.error is not None:
                raise RankLost(other.rank, word.error)
        if not self.own.balances:
            self._folder.close()  # nothing else goes that way

    def close(self) -> None:
        """Leave the last epoch."""
        self.own.end()
        self._folder.close()

    def _explained(self, lost: RankLost) -> RankLost:
        """With what the rank itself has said before it left, where it has."""
        other = None if lost.rank is None else self.others.get(lost.rank)
        if other is None or lost.rank not in self._readable({other.rank}):
            return lost
        try:
            word = other.hear(self._deadline)
        except RankLost:
            return lost
        return RankLost(lost.rank, word.error) if isinstance(word, EpochBegun) and word.error else lost
