"""A layer's mixture of experts as Triton launches, as many and as large for every step of so many rows.

Shapes: T rows, H hidden width, E experts, K experts of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from serving.kernels.gpu.grouped_linear import ExpertWeights, grouped_linear, pairs_silu_mul, weighted_sum
from serving.kernels.gpu.routing import HEIGHTS, by_expert, route
from serving.kernels.gpu.rows import Quantized, quantize
from serving.kernels.layer_weights import LinearWeights, MoeWeights


class RowsOfRanks(Protocol):
    """Brings the rows of all ranks to those that hold their experts, and back what these made of them.

    Shapes: t rows of this rank, N of all.
    """

    @property
    def quantized(self) -> bool:
        """Whether rows travel as int8."""
        ...

    def most(self, rows: int) -> int:
        """N of a step of so many rows."""
        ...

    def dispatched(
        self, values_tH: Tensor, scales_t: Tensor | None, chosen_tK: Tensor, weights_tK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The same of all ranks' rows, N in place of t; no expert is held for a row that there is not."""
        ...

    def combine(self, made_NH: Tensor) -> Tensor:
        """What all ranks have made of this rank's rows, [t, H]."""
        ...


class OwnRowsAlone:
    """There are no other ranks (RowsOfRanks)."""

    quantized = False

    def most(self, rows: int) -> int:
        return rows

    def dispatched(
        self, values_tH: Tensor, scales_t: Tensor | None, chosen_tK: Tensor, weights_tK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return values_tH, scales_t, chosen_tK, weights_tK

    def combine(self, made_NH: Tensor) -> Tensor:
        return made_NH


class ExpertMixture:
    """The experts of a layer that are here, over the tensors of `weights`."""

    def __init__(
        self, weights: MoeWeights[LinearWeights], held: range | None = None, ranks: RowsOfRanks | None = None
    ) -> None:
        """`weights` has the experts `held`, of those that `ranks` hold together; None: all there are.

        Raises ValueError for experts that are not alike, or have biases or rotations.
        """
        self.weights = weights
        self.experts = len(weights.router.weight)
        self.held = range(self.experts) if held is None else held
        self.ranks = OwnRowsAlone() if ranks is None else ranks
        self.gate_up = ExpertWeights.of([expert.gate_up for expert in weights.experts])
        self.down = ExpertWeights.of([expert.down for expert in weights.experts])

    @property
    def kind(self) -> tuple[object, ...]:
        """What tiles are chosen by: mixtures of one kind share them."""
        layers = [(layer.outputs, layer.inputs, layer.dtype, layer.aligned) for layer in (self.gate_up, self.down)]
        return (*layers, self.experts, len(self.held), self.weights.top_k)

    def __call__(self, x_TH: Tensor, logits_TE: Tensor) -> Tensor:
        """What the chosen experts make of each row, weighted and added up best first: [T, H] in x's type.

        Of experts of several ranks each rank's are added first.
        """
        chosen_TK, weights_TK = route(logits_TE, self.weights.top_k, normalized=self.weights.normalized)
        values, scales = quantize(x_TH) if self.ranks.quantized else (x_TH, None)
        values, scales, chosen, weights = self.ranks.dispatched(values, scales, chosen_TK, weights_TK)
        return self.ranks.combine(self.made(values, scales, chosen, weights, x_TH.dtype)).to(x_TH.dtype)

    def made(
        self, x_NH: Tensor, scales_N: Tensor | None, chosen_NK: Tensor, weights_NK: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """What the experts held make of rows, weighted and added up: [N, H] in `dtype`, which they compute in."""
        rows, int8 = by_expert(chosen_NK, self.held, self.experts), torch.int8
        if scales_N is None and self.gate_up.dtype is int8:
            x_NH, scales_N = quantize(x_NH)
        gate_up = grouped_linear(x_NH, scales_N, rows, self.gate_up, dtype)
        inner = pairs_silu_mul(gate_up, chosen_NK, self.held, quantized=self.down.dtype is int8)
        values, scales = inner if isinstance(inner, Quantized) else (inner, None)
        parts = grouped_linear(values, scales, rows, self.down, dtype)
        return weighted_sum(parts, chosen_NK, weights_NK, self.held, dtype)

    def tune(self, most_rows: int, dtype: torch.dtype) -> None:
        """Compile and choose tiles for steps of up to so many rows, so that no request waits for it.

        The choice is kept by shapes: one mixture of each kind is enough.
        """
        device, top_k = self.gate_up.table.device, self.weights.top_k
        for rows in rows_of_every_height(self.ranks.most(most_rows), top_k, self.experts):
            x_TH = torch.randn(rows, self.gate_up.inputs, device=device).to(dtype)
            chosen_TK = torch.randint(self.held.start, self.held.stop, (rows, top_k), dtype=torch.int32, device=device)
            self.made(x_TH, None, chosen_TK, torch.ones(rows, top_k, device=device), dtype)


def rows_of_every_height(most_rows: int, top_k: int, experts: int) -> Iterator[int]:
    """Numbers of rows whose blocks have, together, every height that those of up to `most_rows` rows have."""
    yield from sorted({max(1, min(most_rows, height * experts // (2 * top_k))) for height in HEIGHTS} | {most_rows})
