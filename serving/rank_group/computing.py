"""How the ranks of an expert-parallel group compute their parts of a step: what the leader and the others do alike.

The plain form are the model's own modules; `compiled` has the other. Who computes which rows is not known here.

Shapes: R rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from serving.batch.ragged import RaggedBatch
from serving.expert_parallel.layer import idle_step
from serving.forward.forward import best_tokens
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Decoder, Planes
from serving.sampling.sampler import Sampler
from serving.sampling.torch_sampling import TorchSampling


class RankSteps(Protocol):
    """A rank's part in steps over some KV planes. What it raises are RankLost, and mistakes over its rows."""

    def rows(self, batch: RaggedBatch, written: LayerDone | None) -> Tensor:
        """What the leader goes on from, [R, H] of `RankComputing.new_rows`, of `batch.logits_rows`.

        `written(layer)` is called, on any thread, when all ranks have written the layer's KV of this step and of the
        layers before it. Layers may be left out.
        """

    def idle(self) -> None:
        """Take part without rows."""


class RankComputing(Protocol):
    """One rank's computation. `form` names the arithmetic, as that of a forward pass."""

    form: str

    def expert(self, module: nn.Module) -> nn.Module:
        """An expert that was loaded, as the rank holds it."""

    def placed(self) -> None:
        """All MoE layers have new experts, or a new exchange (EpochMember)."""

    def moved(self, layer: int) -> None:
        """A MoE layer, counted from the first one, has."""

    def over(self, planes: Sequence[Planes]) -> RankSteps: ...

    def new_rows(self, count: int) -> Tensor:
        """Room [count, H] for rows, as they travel between ranks."""

    def logits(self, rows: Tensor) -> Tensor:
        """[R, V] float32; this and what follows is the leader's, who has the head."""

    def greedy(self, rows: Tensor) -> Tensor: ...

    def greedy_and_logits(self, rows: Tensor, wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As those of a forward pass (serving.forward.forward)."""

    def hidden(self, rows: Tensor) -> Tensor:
        """Hidden states [R, H] float32 after the final norm."""

    def sampler(self) -> Sampler:
        """What draws from these logits."""


class TorchComputing:
    """By the modules of `model`, whose MoE layers have been joined to the group's exchange."""

    form = "torch"

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def expert(self, module: nn.Module) -> nn.Module:
        return module

    def placed(self) -> None:
        """The modules have changed by themselves."""

    def moved(self, layer: int) -> None:
        """As `placed`."""

    def over(self, planes: Sequence[Planes]) -> TorchSteps:
        return TorchSteps(self.model, planes)

    def new_rows(self, count: int) -> Tensor:
        weight = self.model.norm.weight
        return weight.new_empty(count, len(weight))

    def logits(self, rows: Tensor) -> Tensor:
        return self.model.logits(rows)

    def greedy(self, rows: Tensor) -> Tensor:
        return best_tokens(self.logits(rows))

    def greedy_and_logits(self, rows: Tensor, wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits = self.logits(rows)
        return best_tokens(logits), logits[wanted]

    def hidden(self, rows: Tensor) -> Tensor:
        return rows.float()

    def sampler(self) -> Sampler:
        return Sampler(TorchSampling())


class TorchSteps:
    def __init__(self, model: Decoder, planes: Sequence[Planes]) -> None:
        self._model, self._planes = model, planes

    def rows(self, batch: RaggedBatch, written: LayerDone | None) -> Tensor:
        sparse = () if self._model.spec.moe is None else self._model.spec.moe.sparse

        def exchanged(layer: int) -> None:
            """A rank takes part in a MoE layer's exchange once it has written that layer's KV, and those before."""
            if written is not None and sparse[layer]:
                written(layer)

        hidden: Tensor = self._model(batch, self._planes, None if written is None else exchanged)
        return hidden[batch.logits_rows]

    @torch.inference_mode()
    def idle(self) -> None:
        idle_step(self._model)
