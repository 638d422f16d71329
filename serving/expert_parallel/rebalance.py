"""Keeps the experts of a serving group balanced: counts, plans, copies weights beside the steps, switches between them.

A thread of each rank prepares commits in the order of the plan. How many it has prepared travels with every dispatch;
before a step, each rank switches what all had prepared by the last dispatch of the step before. So all switch at one
boundary, without a message or a wait. What a row's experts compute does not change, wherever they lie.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from serving.expert_parallel.arena import ExpertFormat
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.byte_budget import ByteBudget
from serving.expert_parallel.copies import CHUNK, ExpertCopies, SharedMemoryCopies
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.expert_statistics import ExpertStatistics
from serving.expert_parallel.layer import ExpertParallelMlp, moe_layers
from serving.expert_parallel.physical import PhysicalExperts
from serving.expert_parallel.planner import PlanningFailed, PlanningProcess, packed, unpacked
from serving.expert_parallel.replanning import BalancePolicy, LayerCommit
from serving.expert_parallel.rounds import RoundBoard, RoundsEnded
from serving.expert_parallel.stages import LayerBuffers
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement

log = logging.getLogger(__name__)

INTERVAL_STEPS = 1000
BYTES_PER_SECOND = 1e9

OnPlaced = Callable[[int, ExpertPlacement], object]
"""(MoE layer, counted from the first one; where its experts are from the present step on)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceStatus:
    """What one rank has done so far. `failure` says why it does no more; it serves on with the experts it has."""

    rounds: int = 0
    planned: int = 0  # commits of all rounds
    prepared: int = 0
    switched: int = 0
    slots: int = 0  # of this rank, filled anew
    bytes: int = 0  # that came in for them
    copied: int = 0  # of these and of those on their way, as the budget counts them: chunk by chunk
    switch_seconds: float = 0.0  # the longest that a step's begin has taken
    imbalance: tuple[float, ...] = ()  # of each layer, by the loads of the last round; rank 0 alone knows them
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A commit whose weights are where they will be needed."""

    layer: int
    placement: ExpertPlacement
    physical: PhysicalExperts
    slots: tuple[nn.Module, ...]


class LiveRebalance:
    """One rank's part, for a model that `apply_expert_parallel` has spread. Close it before the exchange.

    It goes with one exchange from its first dispatch to its last. `begin_step` is for the thread that computes.
    """

    def __init__(
        self, layers: Sequence[ExpertParallelMlp], placements: Sequence[ExpertPlacement], copies: ExpertCopies,
        board: RoundBoard, closing: threading.Event, budget: ByteBudget, policy: BalancePolicy,
        *, interval: int = INTERVAL_STEPS, on_placed: OnPlaced | None = None,
    ) -> None:  # fmt: skip
        """The layers' experts are copied into the arena of `copies`; `interval`: steps between two rounds.

        `on_placed` is told of each switch, by the thread that computes.
        """
        self._on_placed = on_placed
        self._layers, self._copies, self._board, self._budget = layers, copies, board, budget
        self._policy, self._interval, self._closing = policy, interval, closing
        self._exchange = layers[0].exchange
        self._modules = [copies.arena.holding(number, layer.slots) for number, layer in enumerate(layers)]
        for layer, modules, placement in zip(layers, self._modules, placements, strict=True):
            layer.hold(modules[:-1], layer.physical, placement)
        self._buffers = [LayerBuffers(placement) for placement in placements]
        self._statistics = ExpertStatistics(len(layers), placements[0].experts)
        for number, layer in enumerate(layers):
            layer.count = self._statistics.of_layer(number)
        self._window = np.zeros((len(layers), placements[0].experts))
        self._placements = list(placements)
        self._changed = threading.Condition()
        self._planner = PlanningProcess()
        self._ready: deque[_Prepared] = deque()
        self._last = [0] * len(layers)  # the number of each layer's last commit
        self._switched, self._steps, self._longest = 0, 0, 0.0
        self._counts: Tensor | None = None  # handed over for a round
        self._copied = 0  # bytes, by the thread
        self._done = RebalanceStatus()  # by the thread
        self._thread = threading.Thread(target=self._work, name="rebalance", daemon=True)
        self._thread.start()

    @classmethod
    def join(
        cls, model: Decoder, placements: Sequence[ExpertPlacement], store: Store,
        *, join_copies: Callable[..., ExpertCopies] = SharedMemoryCopies.join, policy: BalancePolicy | None = None,
        budget: ByteBudget | None = None, interval: int = INTERVAL_STEPS, on_placed: OnPlaced | None = None,
    ) -> LiveRebalance:  # fmt: skip
        """Meet the other ranks in `store`, which is for this alone.

        Raises what `join_copies` does, and ValueError for experts of different forms.
        """
        layers = [mlp for _, mlp in moe_layers(model) if isinstance(mlp, ExpertParallelMlp)]
        shape, rank = layers[0].exchange.shape, layers[0].exchange.rank
        form = ExpertFormat.of([expert for layer in layers for expert in layer.slots])
        copies = join_copies(form, len(layers), shape.slots, rank, shape.ranks, store)
        closing = threading.Event()
        budget = budget or ByteBudget(BYTES_PER_SECOND, CHUNK, time.monotonic())
        board = RoundBoard(store, rank, shape.ranks, closing)
        policy = policy or BalancePolicy()
        return cls(
            layers, placements, copies, board, closing, budget, policy, interval=interval, on_placed=on_placed
        )  # fmt: skip

    @property
    def placements(self) -> list[ExpertPlacement]:
        """Where each layer's experts are for the step that was begun last."""
        return list(self._placements)

    @property
    def status(self) -> RebalanceStatus:
        return replace(self._done, switched=self._switched, switch_seconds=self._longest, copied=self._copied)

    def begin_step(self) -> None:
        """Switch what all ranks have prepared. Before every step of the group, on each rank, idle ones included."""
        began = time.monotonic()
        while self._switched < self._exchange.agreed:
            ready = self._ready.popleft()
            self._layers[ready.layer].hold(ready.slots, ready.physical, ready.placement)
            self._placements[ready.layer] = ready.placement
            self._switched += 1
            if self._on_placed is not None:
                self._on_placed(ready.layer, ready.placement)
        self._exchange.announce(self._done.prepared)
        self._steps += 1
        if self._steps % self._interval == 0 and self._counts is None:
            self._counts = self._statistics.taken()
        with self._changed:
            self._changed.notify()
        self._longest = max(self._longest, time.monotonic() - began)

    def close(self) -> None:
        """Take part in no further round. The experts stay where they are."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()
        self._planner.close()
        self._copies.close()

    def _work(self) -> None:
        try:
            while True:
                self._round(self._done.rounds)
                self._done = replace(self._done, rounds=self._done.rounds + 1)
        except RoundsEnded:
            return
        except (RankLost, StoreUnavailable, RuntimeError, OSError, ValueError) as error:
            log.error("experts are balanced no longer, and served on from where they are: %s", error)
            self._done = replace(self._done, failure=str(error))
        except BaseException as error:  # a mistake of ours, which the thread reports
            self._done = replace(self._done, failure=f"{type(error).__name__}: {error}")
            raise

    def _round(self, number: int) -> None:
        self._wait_until(lambda: self._counts is not None)
        counts, self._counts = self._counts, None
        assert counts is not None
        self._board.tell_counts(number, counts)
        if self._board.rank == 0:
            self._board.tell_plan(number, self._plan(self._board.all_counts(number)))
        commits = unpacked(self._board.plan(number))
        if self._board.rank == 0 and commits:
            slots, worst = sum(len(commit.stage) for commit in commits), max(self._done.imbalance)
            log.info("the heaviest rank has %.2f of the mean load of a layer: %d experts move", worst, slots)
        self._done = replace(self._done, planned=self._done.planned + len(commits))
        for commit in commits:
            self._prepare(commit)

    def _plan(self, counts: NDArray[np.int64]) -> bytes:
        """Of rank 0."""
        self._window = self._policy.kept * self._window + counts.reshape(self._window.shape)
        placements = [buffers.placement for buffers in self._buffers]
        found = [one.imbalance(loads) for one, loads in zip(placements, self._window.tolist(), strict=True)]
        self._done = replace(self._done, imbalance=tuple(found))
        try:
            return self._planner.planned(placements, self._window, self._policy, lambda: self._pace(0))
        except PlanningFailed as error:
            log.error("no plan for the experts in this round: %s", error)
            return packed(())

    def _prepare(self, commit: LayerCommit) -> None:
        """Fill the spare buffers of a stage, once the layer's last stage has been switched and has left them."""
        buffers, own = self._buffers[commit.layer], self._exchange.rank
        self._wait_until(lambda: self._switched >= self._last[commit.layer])
        came = self._copies.run(commit.layer, buffers.transfers(commit.stage), self._pace)
        buffers.switch(commit.stage)
        modules = self._modules[commit.layer]
        slots = tuple(modules[number] for number in buffers.buffers[own])
        physical = PhysicalExperts(buffers.placement, own)
        self._ready.append(_Prepared(commit.layer, buffers.placement, physical, slots))
        self._last[commit.layer] = self._done.prepared + 1
        self._done = replace(
            self._done,
            prepared=self._done.prepared + 1,
            slots=self._done.slots + sum(change.rank == own for change in commit.stage),
            bytes=self._done.bytes + came,
        )

    def _pace(self, size: int) -> None:
        if self._closing.is_set():
            raise RoundsEnded
        while size > 0:
            piece = min(size, self._budget.burst)
            if self._closing.wait(self._budget.spend(piece, time.monotonic())):
                raise RoundsEnded
            self._copied += piece
            size -= piece

    def _wait_until(self, true: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: true() or self._closing.is_set())
        if self._closing.is_set():
            raise RoundsEnded
