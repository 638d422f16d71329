"""A forward pass of ranks that share a model and have a device each (serving.forward.forward.Forward).

The leader gives all ranks the same batch and launches its own share of it; each writes the KV of its heads where it has
them. The host waits once a step, at its end: there a lost rank is told of.

Shapes: R rows of the batch whose logits or hidden states are wanted, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.forward import Forward
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Planes
from serving.model.spec import ModelSpec
from serving.rank_group.device_group import GroupOnDevices
from serving.rank_group.parts import ToldLayers, arrived, pack

Computed = TypeVar("Computed")


class DeviceForward:
    """The leader's: `own` computes its share, over the KV of its heads."""

    def __init__(self, own: Forward, ranks: GroupOnDevices, spec: ModelSpec) -> None:
        """`spec` is the whole model's."""
        form = "ep" if ranks.layout.spread_experts else "tp"
        self.form = f"{own.form} {form}{ranks.size}"  # step costs are kept by form
        self.own, self.ranks, self.spec = own, ranks, spec

    def over(self, planes: Sequence[Planes]) -> Forward:
        raise ValueError("ranks with a device each keep KV as the leader's forward pass was made with alone")

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        left = partial(_nothing, batch, self.spec.vocab_size)
        return self._computed(batch, layer_done, self.own.logits, left)

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._computed(batch, layer_done, self.own.greedy, partial(_no_tokens, batch))

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        def launch(batch: RaggedBatch, layer_done: LayerDone | None) -> tuple[Tensor, Tensor]:
            return self.own.greedy_and_logits(batch, layer_done, rows)

        def left() -> tuple[Tensor, Tensor]:
            return _no_tokens(batch), _nothing(batch, self.spec.vocab_size)[list(rows)]

        return self._computed(batch, layer_done, launch, left)

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        left = partial(_nothing, batch, self.spec.hidden)
        return self._computed(batch, layer_done, self.own.hidden, left, head=False)

    def _computed(
        self,
        batch: RaggedBatch,
        layer_done: LayerDone | None,
        launch: Callable[[RaggedBatch, LayerDone | None], Computed],
        left: Callable[[], Computed],
        *,
        head: bool = True,
    ) -> Computed:
        """What `launch` gives, once every rank's device has computed it; what `left` gives where it leaves its barrier.

        A graph pads what it exchanges: so one rank's step is replayed where all are. Raises RankLost.
        """
        come = arrived(batch, self.spec.layers)
        if come is None:
            return left()
        told = None if layer_done is None else ToldLayers(layer_done)
        # The leader is in a layer once its sums with all ranks over the layers before are done, and so is their KV.
        # Where ranks share rows, one without any may be ahead of the others.
        before = None if told is None or self.ranks.layout.sequence > 1 else told.upto
        with self.ranks.run(pack(come), head=head, launched=before is not None):
            computed = launch(come, before)
        if told is not None:
            told.upto(self.spec.layers)
        return computed


def _nothing(batch: RaggedBatch, width: int) -> Tensor:
    return torch.zeros(len(batch.logits_rows), width, device=batch.tokens.device)


def _no_tokens(batch: RaggedBatch) -> Tensor:
    return torch.zeros(len(batch.logits_rows), dtype=torch.int64, device=batch.tokens.device)
