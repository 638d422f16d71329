"""A forward pass of ranks that share a model's weights and have a device each (serving.forward.forward.Forward).

The leader gives all ranks the same batch and launches its own share of it; each writes the KV of its heads where it has
them. The host waits once a step, at its end: there a lost rank is told of.

Shapes: R rows of the batch whose logits or hidden states are wanted, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.forward import Forward
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Planes
from serving.rank_group.device_group import GroupOnDevices
from serving.rank_group.parts import pack

Computed = TypeVar("Computed")


class DeviceForward:
    """The leader's: `own` computes its share, over the KV of its heads."""

    def __init__(self, own: Forward, ranks: GroupOnDevices) -> None:
        self.form = f"{own.form} tp{ranks.size}"  # step costs are kept by form
        self.own, self.ranks = own, ranks

    def over(self, planes: Sequence[Planes]) -> Forward:
        raise ValueError("ranks with a device each keep KV as the leader's forward pass was made with alone")

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._computed(batch, layer_done, lambda: self.own.logits(batch, layer_done))

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._computed(batch, layer_done, lambda: self.own.greedy(batch, layer_done))

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        return self._computed(batch, layer_done, lambda: self.own.greedy_and_logits(batch, layer_done, rows))

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._computed(batch, layer_done, lambda: self.own.hidden(batch, layer_done), head=False)

    def _computed(
        self,
        batch: RaggedBatch,
        layer_done: LayerDone | None,
        launch: Callable[[], Computed],
        *,
        head: bool = True,
    ) -> Computed:
        """What `launch` gives, once every rank's device has computed it. Raises RankLost.

        A graph pads what it exchanges: so one rank's step is replayed where all are.
        """
        with self.ranks.run(pack(batch), head=head, launched=layer_done is not None):
            return launch()
