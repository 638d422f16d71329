"""The words between a leader and ranks that share a model with it, beside those of any group (messages)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.parallel.layout import ParallelLayout
from serving.rank_group.messages import PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadLayout:
    """Load what this rank of the layout holds of the model at `path`. Answered by ShareLoaded."""

    path: Path
    dtype: str
    rank: int
    layout: ParallelLayout
    threads: int
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meet:
    """Meet the others by way of the file `store`. Answered by Ready.

    `deadline` are the seconds that a rank may keep others waiting in a step.
    """

    store: Path
    deadline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetLayout(Meet):
    """Map the KV of the group too."""

    segment: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """It is done; or `error` says why it cannot be, and the rank leaves."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Compute step `number` over the KV planes with this number, with `head` its logits too. Answered by LayoutDone."""

    number: int
    planes: int
    batch: PackedBatch
    head: bool


@dataclass(frozen=True, slots=True)
class LayoutDone:
    """Step `number` is computed: `rows` are the bytes of the hidden states that this rank was to give, [R, H].

    `bytes_sent` is what it has sent to other ranks so far.
    """

    number: int
    rows: NDArray[np.uint8]
    bytes_sent: int
