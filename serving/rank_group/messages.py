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

from serving.expert_parallel.exchange import ExchangeTraffic

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadShare:
    """Load the model at `path` with the experts of this rank alone; `threads` compute it. Answered by ShareLoaded."""

    path: Path
    dtype: str
    rank: int
    ranks: int
    threads: int
    log_level: int


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
class MeetGroup:
    """Map the KV of the group, and meet the others by way of the file `store`. Answered by GroupMet.

    `max_tokens` is the most rows of one step; `deadline` the seconds that a rank may keep others waiting in it.
    """

    segment: bytes
    store: Path
    max_tokens: int
    deadline: float


@dataclass(frozen=True, slots=True)
class GroupMet:
    """The rank is ready for steps; or `error` says why it cannot be, and it leaves."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class UsePlanes:
    """From now on the KV planes with the next number are these. There is no answer."""

    places: PlanePlaces


@dataclass(frozen=True, slots=True)
class RunStep:
    """Take part in step `number`, over the KV planes with this number; with `part` None, without rows of its own.

    Answered by StepDone.
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
class StepDone:
    """Step `number` is computed: `rows` are the bytes of the hidden states that were asked for, [R, H].

    `traffic` is what the rank has sent to others so far.
    """

    number: int
    rows: NDArray[np.uint8]
    traffic: ExchangeTraffic
