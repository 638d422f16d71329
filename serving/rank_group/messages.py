"""The words between a leader and its ranks, in the order in which they are said.

They are pickled: they hold numbers and arrays, and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.expert_parallel.exchange import ExchangeShape, ExchangeTraffic
from serving.expert_parallel.replanning import BalancePolicy
from serving.expert_parallel.surviving import Brought, Placements

NOTHING_SENT = ExchangeTraffic()
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balancing:
    """How experts move while a group serves: a round every `interval` steps, weights within a budget."""

    policy: BalancePolicy
    interval: int
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadShare:
    """Load the model at `path` with the experts of this rank alone; `threads` compute it. Answered by ShareLoaded.

    `redundant` experts are held more than once at first.
    """

    path: Path
    dtype: str
    rank: int
    ranks: int
    redundant: int
    threads: int


@dataclass(frozen=True, slots=True)
class ShareLoaded:
    """The rank holds so many bytes of weights; or `error` says why it cannot, and it leaves."""

    weight_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in memory that is shared: bytes from its beginning, and strides in elements."""

    first_byte: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


PlanePlaces = Sequence[Sequence[TensorPlace]]  # by layer


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledForm:
    """What all ranks of a group compute with alike: this form of the CPU kernels, for so many positions.

    `wire` is the type of the rows that all experts are sent, as torch names it.
    """

    form: str
    wire: str
    max_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MapKV:
    """Map the KV of the group. `most_rows` a step has at most; `deadline` are the seconds of every wait in it.

    With `compiled` the rank computes by the compiled kernels, else by the model's modules. With `balancing` experts
    move while the group serves. `shape` is that of the exchange before any rank is lost. A rank that is `bridged` has
    no rows of its own, and gets those of other hosts once for each expert. Answered by KVMapped.
    """

    segment: bytes
    most_rows: int
    deadline: float
    balancing: Balancing | None
    shape: ExchangeShape
    compiled: CompiledForm | None = None
    bridged: bool = False


@dataclass(frozen=True, slots=True)
class KVMapped:
    """The rank may be taken into an epoch; or `error` says why not, and it leaves."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Leave the exchange, and with it the epoch. Answered by EpochEnded."""


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The experts that the rank holds of each MoE layer, slot by slot; None before it was in an epoch."""

    held: Brought | None


@dataclass(frozen=True, slots=True)
class HoldExperts:
    """Load what this rank, of this number in the epoch to come, lacks of its experts there. Answered by ExpertsHeld."""

    placements: Placements
    rank: int


@dataclass(frozen=True, slots=True)
class ExpertsHeld:
    """So many experts were loaded; or `lost` are those of each MoE layer that cannot be had, and `reason` says why."""

    loaded: int = 0
    lost: Mapping[int, Sequence[int]] | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginEpoch:
    """Meet the others of epoch `number` by way of the file `store`. Answered by EpochBegun.

    `processes` are their numbers in the system, by rank in the epoch; the rank that is told is `rank` of them. Whoever
    has not come after `meeting` seconds is lost.
    """

    number: int
    rank: int
    processes: tuple[int, ...]
    placements: Placements
    store: Path
    meeting: float


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """The rank is ready for steps; or `error` says why it is not, and it leaves unless another was `lost` to it."""

    error: str | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class UsePlanes:
    """From now on the KV planes with the next number are these. There is no answer."""

    places: PlanePlaces


@dataclass(frozen=True, slots=True)
class RunStep:
    """Take part in step `number`, over the KV planes with this number; with `part` None, without rows of its own.

    Answered by StepDone or StepDropped.
    """

    number: int
    planes: int
    part: PackedBatch | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A RaggedBatch as arrays, and what of it are Python's numbers."""

    arrays: Arrays
    block_size: int
    query_lens: tuple[int, ...]
    context_lens_list: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTotals:
    """What a rank's process has done so far, in all epochs."""

    traffic: ExchangeTraffic = NOTHING_SENT
    moved_experts: int = 0  # that came to be held here for the sake of balance
    moved_bytes: int = 0  # of weights that were copied for that, chunk by chunk: what the budget bounds
    bytes_to_hosts: int = 0  # that left for another host, and
    bytes_from_hosts: int = 0  # that came from it

    def __add__(self, other: RankTotals) -> RankTotals:
        return RankTotals(
            self.traffic + other.traffic,
            self.moved_experts + other.moved_experts,
            self.moved_bytes + other.moved_bytes,
            self.bytes_to_hosts + other.bytes_to_hosts,
            self.bytes_from_hosts + other.bytes_from_hosts,
        )


@dataclass(frozen=True, slots=True)
class StepDone:
    """Step `number` is computed: `rows` are the bytes of the hidden states that were asked for, [R, H]."""

    number: int
    rows: NDArray[np.uint8]
    totals: RankTotals


@dataclass(frozen=True, slots=True)
class StepDropped:
    """Step `number` is not computed, since `lost` is, a rank of the epoch, None where it cannot be told."""

    number: int
    lost: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Step `number` is not computed: this rank made a mistake over its part, and says what was raised."""

    number: int
    error: str


Outcome = StepDone | StepDropped | StepFailed
