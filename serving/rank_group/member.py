"""What a rank of a group does in every epoch, the leader and the others alike: hold its experts, meet, and leave.

It knows neither sequences nor who decides on epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore

from serving.expert_parallel.byte_budget import ByteBudget
from serving.expert_parallel.copies import CHUNK, ExpertCopies, SharedMemoryCopies
from serving.expert_parallel.exchange import ExchangeShape, ExpertExchange
from serving.expert_parallel.layer import exchange_shape
from serving.expert_parallel.local import LocalExchange
from serving.expert_parallel.rebalance import LiveRebalance
from serving.expert_parallel.rehosting import ExpertLoader, HeldExperts
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.expert_parallel.surviving import Brought, Placements
from serving.loader.experts import CheckpointExperts
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement
from serving.rank_group.computing import RankComputing, TorchComputing
from serving.rank_group.messages import Balancing, BeginEpoch, RankTotals

NEVER_ENDS = -1  # processes that use the file of a store: it is removed by its leader


def loader_of(path: Path, dtype: str) -> ExpertLoader:
    """Reads experts of the model at `path`, which is not opened until the first is wanted."""
    opened = cache(partial(CheckpointExperts, path, dtype))

    def load(layer: int, expert: int) -> nn.Module:
        return opened()(layer, expert)

    return load


class EpochMember:
    """One rank's part. `model` holds the experts of its share (share.load_share); `most_rows` a step has at most."""

    def __init__(
        self,
        model: Decoder,
        load: ExpertLoader,
        most_rows: int,
        deadline: float,
        balancing: Balancing | None,
        computing: RankComputing | None = None,
        *,
        bridged: bool = False,
    ) -> None:
        """`computing` with the model's own modules unless it is given. `bridged`: see MapKV."""
        self.model = model
        self.computing: RankComputing = computing or TorchComputing(model)
        self.experts = HeldExperts(model, lambda layer, expert: self.computing.expert(load(layer, expert)))
        self._most_rows, self._deadline, self._balancing = most_rows, deadline, balancing
        self._shape: ExchangeShape | None = None
        self._bridged = bridged
        self._rebalance: LiveRebalance | None = None
        self._before = RankTotals()  # of epochs that are over
        self.placements: Placements = ()  # of the step that was begun last
        self.exchange: ExpertExchange | None = None

    def hold(self, placements: Placements, rank: int, seconds: float) -> int:
        """Load the experts that `rank` lacks: how many they were. Raises ExpertsLost."""
        return self.experts.fetch(placements, rank, seconds)

    @torch.inference_mode(False)  # experts that move get weights that outlive the step
    def begin(self, order: BeginEpoch) -> None:
        """Meet the others. Raises RankLost, StoreUnavailable, ExchangeUnavailable, and ValueError."""
        if self._shape is None:
            self._shape = exchange_shape(self.model, order.placements[0], self._most_rows)
            if self._bridged:
                self._shape = replace(self._shape, top_k=1)
        self.placements = order.placements
        ranks, slots = len(order.processes), len(order.placements[0].slots[0])
        shape = replace(self._shape, ranks=ranks, slots=slots)
        if ranks == 1:
            self.exchange = LocalExchange(shape)
            self.experts.place(order.placements, self.exchange)
            self.computing.placed()
            return
        store = FileStore(str(order.store), NEVER_ENDS)
        others = {rank: process for rank, process in enumerate(order.processes) if rank != order.rank}
        self.exchange = SharedMemoryExchange.join(
            shape,
            order.rank,
            PrefixStore("exchange", store),
            deadline=self._deadline,
            meeting=order.meeting,
            processes=others,
        )
        self.experts.place(order.placements, self.exchange)
        if self._balancing is not None:
            join_copies = partial(SharedMemoryCopies.join, meeting=order.meeting, processes=others)
            self._rebalance = self._balanced(self._balancing, order, PrefixStore("rebalance", store), join_copies)
        self.computing.placed()

    def _balanced(
        self, balancing: Balancing, order: BeginEpoch, store: PrefixStore, join_copies: Callable[..., ExpertCopies]
    ) -> LiveRebalance:
        burst = min(CHUNK, max(1, int(balancing.bytes_per_second)))
        return LiveRebalance.join(
            self.model,
            order.placements,
            store,
            join_copies=join_copies,
            policy=balancing.policy,
            budget=ByteBudget(balancing.bytes_per_second, burst, time.monotonic()),
            interval=balancing.interval,
            on_placed=self._placed,
        )

    def begin_step(self) -> None:
        """Before every step, on each rank alike, also where it has no rows: switch to experts that have moved."""
        if self._rebalance is not None:
            self._rebalance.begin_step()

    def _placed(self, layer: int, placement: ExpertPlacement) -> None:
        """Experts of a MoE layer have moved."""
        self.placements = (*self.placements[:layer], placement, *self.placements[layer + 1 :])
        self.computing.moved(layer)

    @property
    def balances(self) -> bool:
        """Whether experts move in this epoch, of which the ranks tell each other by the file they have met by."""
        return self._rebalance is not None

    @property
    def imbalance(self) -> Sequence[float]:
        """Of each MoE layer, the heaviest rank's load over the mean in the last round; the leader alone knows it."""
        return () if self._rebalance is None else self._rebalance.status.imbalance

    @property
    def switch_seconds(self) -> float:
        """The longest that experts that move have held up a step of this rank as it began, in this epoch."""
        return 0.0 if self._rebalance is None else self._rebalance.status.switch_seconds

    @property
    def totals(self) -> RankTotals:
        if self.exchange is None:
            return self._before
        now = RankTotals(self.exchange.traffic)
        if self._rebalance is not None:
            status = self._rebalance.status
            now = replace(now, moved_experts=status.slots, moved_bytes=status.copied)
        return self._before + now

    def end(self) -> Brought | None:
        """Leave the epoch, of which the others learn at once: the experts held, slot by slot of each MoE layer."""
        self.leave()
        if self._rebalance is not None:
            self._rebalance.close()
        self._before = self.totals
        self._rebalance = self.exchange = None
        return self.experts.held()

    def leave(self) -> None:
        """Take part in no exchange any more."""
        if self.exchange is not None:
            self.exchange.close()
