"""One rank's part in a group whose ranks may fail: a step in which one is lost is dropped by all, and repeated.

What a step computes is the caller's matter. It gets its answer from a whole group or not at all: no step is computed
without an expert that a token wants. Rows of a rank that is lost are lost with it.

    step() → compute() → RankLost → end of the epoch: who is left, who holds what → load experts → meet → compute()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from serving.expert_parallel.bounded import STORE_SECONDS, BoundedStore
from serving.expert_parallel.epoch import Epoch, Report, Rules
from serving.expert_parallel.exchange import ExchangeShape, ExchangeUnavailable, ExpertExchange, RankLost
from serving.expert_parallel.layer import idle_step
from serving.expert_parallel.local import LocalExchange
from serving.expert_parallel.meeting import MEETING_SECONDS
from serving.expert_parallel.membership import DeclaredLost, Door, Membership
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.rehosting import ExpertLoader, HeldExperts
from serving.expert_parallel.shared_memory import DEADLINE_SECONDS
from serving.expert_parallel.surviving import ExpertsLost, Placements
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement

__all__ = ["DeclaredLost", "ExpertGroup", "ExpertsLost", "Limits", "RecoveryCounts"]

log = logging.getLogger(__name__)

VAIN_EPOCHS = 3  # one after the other that lose nobody, and break nevertheless

Answer = TypeVar("Answer")
Joining = Callable[[ExchangeShape, int, Store], ExpertExchange]
"""How ranks of an epoch meet: the shape, the rank in it, a store of their own. As the exchanges' `join`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds, and memory. No wait of a group is longer than the sum of these."""

    deadline: float = DEADLINE_SECONDS  # that a member may keep the others waiting
    meeting: float = MEETING_SECONDS  # for all to begin, or to be admitted
    loading: float = 60.0  # for the experts that nobody holds any more
    store: float = STORE_SECONDS  # for the store to answer
    most_slots: int  # experts of one layer that a rank has memory for


@dataclass(kw_only=True, slots=True)
class RecoveryCounts:
    """What happened to a group, as one of its members has seen it."""

    losses: int = 0  # members that were lost
    admitted: int = 0  # members that came back
    repeated_steps: int = 0  # that were begun and dropped
    loaded_experts: int = 0  # by this member, because nobody held them any more
    stalled_seconds: float = 0.0  # from the beginnings of dropped steps until the group could compute again
    noticed: float = 0.0  # when the last loss was noticed, by `time.monotonic`


class ExpertGroup:
    """A member of a group that spreads the experts of `model`. `enter` makes it, `step` runs everything, `close` ends.

    `epoch` is the present one; `steps` are those that this member has completed, the group's number of them.
    """

    def __init__(
        self,
        membership: Membership,
        epoch: Epoch,
        experts: HeldExperts,
        shape: ExchangeShape,
        join: Joining,
        limits: Limits,
    ) -> None:
        self.epoch, self.steps = epoch, epoch.step
        self.counts = RecoveryCounts()
        self._membership, self._experts, self._shape = membership, experts, shape
        self._join, self._limits = join, limits
        self._watch = ProcessWatch({})
        self._exchange: ExpertExchange | None = None
        self._door: Door | None = None
        self._admitted: set[str] = set()  # processes that were members of some epoch
        self._behind = 0  # steps that others repeat and this member has completed: the last one, or none
        self._idle: Callable[[], object] = self._idle_step  # a step of the form that the last one had

    @classmethod
    def enter(
        cls,
        model: Decoder,
        placements: Placements,
        member: int,
        store: Store,
        *,
        shape: ExchangeShape,
        join: Joining,
        limits: Limits,
        load: ExpertLoader | None = None,
    ) -> ExpertGroup:
        """Begin a group with the other members, or come back to one: between two steps, in an epoch of its own.

        `model` holds the experts that `placements` give this member; those and `shape` are of the whole group, for all
        members alike. With `load` a rank can take experts that nobody holds any more. Raises RankLost for a member that
        does not begin, DeclaredLost where nobody admits this one, ExpertsLost, and StoreUnavailable.
        """
        rules = Rules(origin=placements, most_slots=limits.most_slots, loads=load is not None)
        membership = Membership(BoundedStore(store, limits.store), member, rules, limits.deadline)
        epoch = membership.begin(limits.meeting)
        group = cls(membership, epoch, HeldExperts(model, load), shape, join, limits)
        with group._over_if_it_raises():
            try:
                group._begin()
            except RankLost as lost:
                if epoch.number == 0:
                    raise
                group._recover(group._missed(lost), str(lost), time.monotonic())
        return group

    def step(self, compute: Callable[[], Answer], idle: Callable[[], object] | None = None) -> Answer:
        """What `compute` gives when every rank has taken its part, however often it has to begin again.

        It writes only what writing twice does not change, as KV of the same tokens. All members call this equally
        often; none waits longer than the deadline between two calls. `idle` is a step of the same exchanges without
        rows, which a member that has completed this one takes while others repeat it: `layer.idle_step` unless given,
        `micro_batches.overlapped_step` without a batch for a step in halves.

        Raises ExpertsLost, DeclaredLost and StoreUnavailable, RankLost where epoch after epoch breaks and nobody is
        missed; the group is then over for this member.
        """
        with self._over_if_it_raises():
            while True:
                began = time.monotonic()
                try:
                    self._admit(began)
                    while self._behind:
                        self._idle()
                        self._behind -= 1
                    answer = compute()
                except RankLost as lost:
                    self.counts.repeated_steps += 1
                    self._recover(self._missed(lost), str(lost), began)
                else:
                    self.steps += 1
                    self._idle = idle or self._idle_step
                    return answer

    def placed(self, layer: int, placement: ExpertPlacement) -> None:
        """The experts of a MoE layer have moved: `on_placed` of a rebalance that was joined in the present epoch."""
        placements = tuple(placement if number == layer else one for number, one in enumerate(self.epoch.placements))
        self.epoch = replace(self.epoch, placements=placements)

    def _idle_step(self) -> None:
        idle_step(self._experts.model)

    def _admit(self, began: float) -> None:
        """Between two steps: end the epoch if somebody waits to come in. The others meet nobody in their next step."""
        waiting = {} if self._door is None else self._door.waiting
        admits = {member: process for member, process in waiting.items() if process not in self._admitted}
        if admits:
            self._recover(frozenset(), f"it admits {sorted(admits)}", began, admits)

    def _recover(
        self, missed: frozenset[int], why: str, began: float, admits: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """End epochs until one begins; the step that began at `began` is not completed."""
        self.counts.noticed = time.monotonic()
        vain = 0
        while True:
            before = self.epoch
            log.warning("epoch %d ends after step %d: %s", before.number, self.steps, why)
            self._membership.report(
                before, Report(step=self.steps, lost=missed, admits=admits, held=self._experts.held())
            )
            self._leave_exchange()
            self.epoch = self._membership.following(before, self._watch)
            changed = self._count(before)
            try:
                self._begin()
                break
            except RankLost as again:
                vain = 0 if changed else vain + 1
                if vain == VAIN_EPOCHS:
                    raise
                missed, why, admits = self._missed(again), str(again), {}
        stalled = time.monotonic() - began
        self.counts.stalled_seconds += stalled
        log.warning("epoch %d goes on after step %d, %.3f s later", self.epoch.number, self.epoch.step, stalled)

    def _missed(self, lost: RankLost) -> frozenset[int]:
        return frozenset() if lost.rank is None else frozenset([self.epoch.order[lost.rank]])

    def _count(self, before: Epoch) -> bool:
        """Whether the present epoch has other members than the one before; they are counted and logged."""
        now = self.epoch
        lost = [member for member, process in before.members.items() if not now.has(member, process)]
        came = [member for member, process in now.members.items() if not before.has(member, process)]
        self.counts.losses += len(lost)
        self.counts.admitted += len(came)
        log.warning("epoch %d: members %s, lost %s, admitted %s", now.number, now.order, lost, came)
        return bool(lost or came)

    def _begin(self) -> None:
        """Load what the present epoch wants of this rank, and meet the others in it."""
        epoch, limits = self.epoch, self._limits
        self._admitted |= set(epoch.members.values())
        self._watch.close()
        self._watch = self._membership.watch(epoch)
        rank, failure = epoch.order.index(self._membership.member), None
        try:
            self.counts.loaded_experts += self._experts.fetch(epoch.placements, rank, limits.loading)
        except ExpertsLost as lost:
            failure = lost
        seconds = limits.deadline + (limits.loading if epoch.loads else 0.0)
        self._membership.ready(epoch, failure, self._watch, seconds)
        self._exchange = self._met(rank)
        self._experts.place(epoch.placements, self._exchange)
        self._behind = self.steps - epoch.step
        self._keep_door()

    def _met(self, rank: int) -> ExpertExchange:
        """The present epoch's exchange. What an earlier one has left in the store lies under other keys."""
        epoch, membership = self.epoch, self._membership
        shape = replace(self._shape, ranks=len(epoch.members), slots=len(epoch.placements[0].slots[0]))
        if shape.ranks == 1:
            return LocalExchange(shape)
        try:
            return self._join(shape, rank, PrefixStore(f"epoch/{epoch.number}/exchange", membership.store.store))
        except ExchangeUnavailable as error:  # which is what memory looks like that another has just let go of
            if membership.is_over(epoch):
                raise RankLost(None, f"who was to be met has left: {error}") from error
            raise

    def _keep_door(self) -> None:
        """The first of the members looks who waits to come in."""
        first = self.epoch.order[0] == self._membership.member
        if first and self._door is None:
            self._door = Door(self._membership.store, self._membership.places)
        elif not first and self._door is not None:
            self._door.close()
            self._door = None

    @contextmanager
    def _over_if_it_raises(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _leave_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def close(self) -> None:
        """Take part no longer. To the others it is a loss."""
        if self._door is not None:
            self._door.close()
            self._door = None
        self._leave_exchange()
        self._watch.close()
