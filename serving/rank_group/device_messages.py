"""The words between a leader and ranks that have a device each, beside those of ranks that share a model.

They are pickled: they hold numbers and arrays, and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from serving.config import EngineConfig
from serving.model.decoder import Planes
from serving.rank_group.layout_messages import LoadLayout
from serving.rank_group.messages import PackedBatch


class LoadOnDevice(LoadLayout):
    """The same onto the rank's `device`, where it will also keep the KV of its heads."""


class RankKV(Protocol):
    """The KV that a rank keeps on its device."""

    @property
    def planes(self) -> Sequence[Planes]: ...

    def does(self, word: Any) -> object:
        """What the leader asks of it beside the steps, on any thread."""


KeepKV = Callable[[torch.device], RankKV]
"""Makes it, in the rank's process. Raises ValueError where it cannot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeForward:
    """Give up the KV and the forward pass there were, and make others, over what `keep` makes.

    All ranks do so at once, the leader too. Answered by Ready.
    """

    keep: KeepKV
    config: EngineConfig
    max_position: int


@dataclass(frozen=True, slots=True)
class ReadMemory:
    """Answered by the MemoryReading of this rank's device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOnDevice:
    """Compute step `number`, with `head` its logits too. Answered by LayoutDone, once the device has computed it.

    With `launched` no graph may compute it: the leader has none that tells of its layers.
    """

    number: int
    batch: PackedBatch
    head: bool
    launched: bool
