"""The leader's hold on the other ranks of its group: starts them, has them take part in each step, and ends them.

A step that loses a rank is computed again by those that are left. Where that cannot be, `RankGroup.lost` says why. It
knows no sequences and no model's modules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.epoch import Rules
from serving.expert_parallel.exchange import ExchangeShape, RankLost
from serving.expert_parallel.layer import exchange_shape
from serving.expert_parallel.recovery import VAIN_EPOCHS, RecoveryCounts
from serving.expert_parallel.surviving import ExpertsLost, Placements
from serving.kvspec import LayerKV
from serving.model.decoder import Planes
from serving.rank_group.child import RankProcess
from serving.rank_group.epochs import GroupEpochs
from serving.rank_group.gathering import Gathering
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.host_plan import of_members
from serving.rank_group.member import EpochMember
from serving.rank_group.messages import (
    Balancing,
    CompiledForm,
    KVMapped,
    LoadShare,
    MapKV,
    PackedBatch,
    RankTotals,
    RunStep,
    ShareLoaded,
    StepDone,
    StepDropped,
    StepFailed,
    UsePlanes,
)
from serving.rank_group.restarts import RankKeeper
from serving.rank_group.shared_planes import SharedPlanes

log = logging.getLogger(__name__)

LOAD_SECONDS = 600.0  # that a rank may take to load its share
MEETING_SECONDS = 60.0  # that it may take to be ready for steps then
STOP_SECONDS = 2.0  # that it may take to leave

Answer = TypeVar("Answer")


class RankGroup:
    """All ranks but the leader, whose process this is. `deadline` are the seconds of a step's every wait.

    `lost` is set once there is no group any more; from then on every step raises it.
    """

    def __init__(
        self,
        ranks: int,
        deadline: float,
        *,
        redundant: int = 0,
        balancing: Balancing | None = None,
        lobby: HostLobby | None = None,
    ) -> None:
        """Starts their processes. `redundant` experts have copies at first; with `balancing` experts move.

        By the `lobby` other hosts come in, each as one rank to the others here.
        """
        self.configured, self.lobby = ranks, lobby
        self._local = ranks if lobby is None else lobby.local
        self._before = Gathering(lobby, self._local)
        self.deadline, self.redundant, self.balancing = deadline, redundant, balancing
        self.lost: Exception | None = None
        self.own: EpochMember | None = None  # the leader's part, once it has met the others
        self._epochs: GroupEpochs | None = None
        self._kv: SharedPlanes | None = None
        self._plane_sets: list[UsePlanes] = []
        self.most_rows = 0  # that a step has at most
        self.totals = RankTotals()  # what all ranks had sent and moved after the last step
        self.imbalance = 0.0  # of the MoE layer that is balanced worst: the heaviest rank's load over the mean; or 0
        self.switch_seconds = 0.0  # the longest that experts that move have held up the leader as a step began
        self._steps, self._began = 0, 0.0
        self._unfinished = False  # the last step, by the leader itself
        self._order: LoadShare | None = None
        self._gathering: Future[None] | None = None
        self._shape: ExchangeShape | None = None
        self._compiled: CompiledForm | None = None
        self.keepers: list[RankKeeper] = []
        started = False
        try:
            self.keepers += (RankKeeper(RankProcess(rank), self._prepare) for rank in range(1, self._local))
            started = True
        finally:
            if not started:
                self.close()

    @property
    def size(self) -> int:
        """The members of the present epoch, the leader among them: ranks of its host, then other hosts."""
        return 1 + len(self.others)

    @property
    def mapping(self) -> int:
        """Those of them that have the KV, and may have rows in a step."""
        return 1 + sum(other.rank < self._local for other in self.others)

    @property
    def there(self) -> int:
        """The ranks of the present epoch, those of other hosts each counted."""
        places = () if self.lobby is None else self.lobby.places
        hosts = (places[other.rank - self._local] for other in self.others if other.rank >= self._local)
        return self.mapping + sum(place.ranks for place in hosts)

    def of_members(self, placements: Placements) -> Placements:
        """Of placements on all ranks those on the members."""
        return placements if self.lobby is None else of_members(placements, self._local, self.lobby.places)

    @property
    def others(self) -> list[RankProcess]:
        """The processes of those but the leader, in their order."""
        if self._epochs is None:
            return [keeper.current for keeper in self.keepers]
        return list(self._epochs.others.values())

    @property
    def placements(self) -> Placements:
        """Where the experts of each MoE layer were in the last step."""
        return () if self.own is None else self.own.placements

    @property
    def counts(self) -> RecoveryCounts:
        return RecoveryCounts() if self._epochs is None else self._epochs.counts

    # ---- until the first step ----------------------------------------------------------------------------------

    def load(self, path: Path, dtype: str) -> None:
        """Have every rank begin to load its share of the model, each with as many threads as this process has."""
        self._order = LoadShare(
            path=path,
            dtype=dtype,
            rank=0,
            ranks=self.configured,
            redundant=self.redundant,
            threads=torch.get_num_threads(),
        )
        for other in self.others:
            self._load(other)
        if self.lobby is not None:
            self._gathering = ThreadPoolExecutor(1, "hosts").submit(self._hosts_come, self.lobby)

    def _hosts_come(self, lobby: HostLobby) -> None:
        """Have them load their shares beside the ranks here."""
        self._before.ask_each(lobby.gather(LOAD_SECONDS), self._load)

    def _load(self, other: RankProcess) -> None:
        assert self._order is not None, "load comes first"
        other.ask(replace(self._order, rank=other.rank), MEETING_SECONDS)

    def loaded(self) -> None:
        """Wait until all have, and all hosts have come. Raises RankLost, and ValueError for what is not loaded."""
        if self._gathering is not None and self.lobby is not None:
            self._gathering.result()
            self.keepers += (RankKeeper(first, self._prepare, self.lobby.again) for first in self.lobby.handed_over())

        def load(other: RankProcess) -> None:
            self._load(other)
            self._loaded(other)

        self._before.hear_each(self.keepers, self._loaded, load, LOAD_SECONDS)

    def _loaded(self, other: RankProcess) -> None:
        word = other.answer(ShareLoaded, LOAD_SECONDS)
        if word.error is not None:
            raise ValueError(f"{other.called}: {word.error}")
        log.info("%s holds %.0f MB of weights", other.called, word.weight_bytes / 1e6)

    def share_planes(self, specs: Sequence[LayerKV], num_blocks: int, block_size: int) -> list[Planes]:
        """KV planes that every rank will map."""
        self._kv = SharedPlanes(specs, num_blocks, block_size)
        return self._kv.planes

    def meet(
        self, own: EpochMember, placements: Placements, most_rows: int, compiled: CompiledForm | None = None
    ) -> None:
        """Begin the first epoch, `own` being the leader's part; `most_rows` is what a step has at most.

        With `compiled` all ranks compute by the compiled kernels, as the leader does.

        A host that is lost meanwhile is waited for, and done without as the epoch begins. Raises RankLost, ExpertsLost,
        ValueError, and what `EpochMember.begin` does where the group does not come about.
        """
        self.most_rows, self._compiled = most_rows, compiled
        self._shape = exchange_shape(own.model, placements[0], most_rows)
        self._before.ask_each(self.others, self._map_kv)
        self._before.hear_each(self.keepers, self._mapped, self._prepare, LOAD_SECONDS)
        others = {other.rank: other for other in self.others}
        rules = Rules(origin=placements, most_slots=placements[0].experts, loads=True)
        hosts = {} if self.lobby is None else dict(enumerate(self.lobby.places, self._local))
        self.own, self._epochs = own, GroupEpochs(own, rules, self.deadline, hosts)
        try:
            self._epochs.begin(others, MEETING_SECONDS)
        except RankLost as lost:
            if lost.rank not in hosts:
                raise
            self._epochs.follow(
                lost, self._epochs.told(lost), time.monotonic(), {}
            )  # as if it had been lost in the first step
        for keeper in self.keepers:
            keeper.start()

    def _map_kv(self, other: RankProcess) -> None:
        assert self._kv is not None and self._shape is not None, "share_planes comes first, and meet"
        order = MapKV(
            segment=self._kv.segment.details,
            most_rows=self.most_rows,
            deadline=self.deadline,
            balancing=self.balancing,
            shape=self._shape,
            compiled=self._compiled,
        )
        other.ask(order, MEETING_SECONDS)

    def _mapped(self, other: RankProcess) -> None:
        word = other.answer(KVMapped, LOAD_SECONDS)  # it packs its share, if kernels compute it
        if word.error is not None:
            raise ValueError(f"{other.called}: {word.error}")

    def _prepare(self, other: RankProcess) -> None:
        """Of a process that takes the place of one that has ended, all that comes before an epoch."""
        self._load(other)
        self._loaded(other)
        self._map_kv(other)
        self._mapped(other)

    def use_planes(self, planes: Sequence[Planes]) -> int:
        """Tell all ranks of planes, views of the shared ones; the number by which steps name them."""
        assert self._kv is not None
        word = UsePlanes(self._kv.places(planes))
        for other in self.others:
            try:
                other.say(word, self.deadline)
            except RankLost as lost:
                log.warning("%s is lost, which the next step finds out about: %s", other.called, lost.reason)
                other.process.kill()
        self._plane_sets.append(word)
        return len(self._plane_sets) - 1

    # ---- steps -------------------------------------------------------------------------------------------------

    def step(self, compute: Callable[[], Answer]) -> Answer:
        """What `compute` gives when all ranks that there are have taken their part, by `beside`.

        It is called again, with fewer ranks, where one is lost: it writes only what writing twice does not change.
        Raises what it raises, RuntimeError for a mistake that a rank made over its rows, and ExpertsLost,
        StoreUnavailable or RankLost where there is no group any more.
        """
        if self.lost is not None:
            raise self.lost
        try:
            self._settle()
            for _ in range(VAIN_EPOCHS * self.configured):
                try:
                    return compute()
                except RankLost as lost:
                    self._repeat(lost)
            raise RankLost(None, "a step was dropped again and again: it may need a higher --rank-timeout")
        except (RankLost, ExpertsLost, StoreUnavailable) as error:
            log.error("%s; the worker leaves, and its texts go on elsewhere", error)
            self.lost = error
            raise

    def _settle(self) -> None:
        """Before a step: take in ranks that have come back, and begin anew where the leader has left its last step."""
        came = {process.rank: process for keeper in self.keepers if (process := keeper.taken()) is not None}
        if not came and not self._unfinished:
            return
        assert self._epochs is not None
        began, ready = time.monotonic(), {}
        for rank, process in came.items():
            try:
                for word in self._plane_sets:
                    process.say(word, self.deadline)
                ready[rank] = process
            except RankLost as lost:  # its keeper starts the next
                log.warning("%s is lost again: %s", process.called, lost.reason)
        if not ready and not self._unfinished:
            return
        came_back = ", ".join(map(self._epochs.called, sorted(ready)))
        why = f"back in the group: {came_back}" if ready else "the leader has left a step unfinished"
        self._epochs.follow(None, why, began, ready)
        self._epochs.failures = []  # over the step that the leader has left, and raised for itself
        self._unfinished = False

    def _repeat(self, lost: RankLost) -> None:
        """Begin an epoch without whoever is lost. Raises RuntimeError where a rank made a mistake over its rows."""
        assert self._epochs is not None
        self._epochs.follow(lost, self._epochs.told(lost), self._began, {})
        self._unfinished = False
        failures, self._epochs.failures = self._epochs.failures, []
        if failures:
            raise RuntimeError("; ".join(failures))
        self._epochs.counts.repeated_steps += 1

    @contextmanager
    def beside(self, planes: int, parts: Sequence[PackedBatch | None]) -> Iterator[list[StepDone]]:
        """Have the other ranks compute `parts`, in their order, while the leader computes its own inside.

        What they have done is in the list when it is left. Raises RankLost; also inside, where the exchange finds out.
        """
        assert self._epochs is not None
        self._began, self._unfinished, done = time.monotonic(), True, list[StepDone]()
        self._steps += 1
        for other, part in zip(self.others, parts, strict=True):
            other.ask(RunStep(self._steps, planes, part), self.deadline)
        finished = False
        try:
            self._epochs.own.begin_step()
            yield done
            finished = True
        except RankLost as lost:
            raise self._epochs.named(lost) from lost
        finally:
            if not finished:
                self._epochs.own.leave()  # nobody is to wait for the leader
        done += (self._done(other) for other in self.others)
        self._unfinished = False
        self.totals = self._epochs.totals
        self.imbalance = max(self._epochs.own.imbalance, default=self.imbalance)
        self.switch_seconds = max(self.switch_seconds, self._epochs.own.switch_seconds)

    def _done(self, other: RankProcess) -> StepDone:
        assert self._epochs is not None
        word = other.hear(self.deadline)
        if isinstance(word, StepDropped):
            raise self._epochs.named(RankLost(word.lost, word.reason))
        if isinstance(word, StepFailed):
            self._epochs.failures.append(f"{other.called}: {word.error}")
            raise RankLost(None, "a rank made a mistake")
        assert isinstance(word, StepDone) and word.number == self._steps, f"rank {other.rank} says {word!r}"
        self._epochs.heard(other.rank, word.totals)
        return word

    # ---- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all ranks. Call when no step runs; safe to repeat."""
        if self.lobby is not None:
            self.lobby.close()
        if self._epochs is not None:
            self._epochs.close()
            for other in self.others:
                other.channel.close()
        until = time.monotonic() + (STOP_SECONDS if self.lost is None else 0.0)
        keepers, self.keepers = self.keepers, []
        for keeper in keepers:
            keeper.closing()
        for keeper in keepers:
            keeper.close(until)
        if self._kv is not None:
            self._kv.segment.close()
            self._kv = None
