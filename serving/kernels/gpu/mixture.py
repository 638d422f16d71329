"""A layer's mixture of experts as Triton launches, as many and as large for every step of so many rows.

Shapes: T rows, H hidden width, E experts, K experts of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from serving.kernels.gpu.grouped_linear import ExpertWeights, grouped_linear, weighted_sum
from serving.kernels.gpu.routing import HEIGHTS, ExpertRows, by_expert, route
from serving.kernels.gpu.rows import Quantized, quantize, silu_mul
from serving.kernels.layer_weights import LinearWeights, MoeWeights


class Mixture:
    """The experts of a layer, all of them here, over the tensors of `weights`."""

    def __init__(self, weights: MoeWeights[LinearWeights]) -> None:
        """Raises ValueError for experts that are not alike, or have biases or rotations."""
        self.weights = weights
        self.gate_up = ExpertWeights.of([expert.gate_up for expert in weights.experts])
        self.down = ExpertWeights.of([expert.down for expert in weights.experts])

    @property
    def kind(self) -> tuple[object, ...]:
        """What tiles are chosen by: mixtures of one kind share them."""
        layers = [(layer.outputs, layer.inputs, layer.dtype, layer.aligned) for layer in (self.gate_up, self.down)]
        return (*layers, len(self.weights.experts), self.weights.top_k)

    def __call__(self, x_TH: Tensor, logits_TE: Tensor) -> Tensor:
        """What the chosen experts make of each row, weighted and added up best first: [T, H] in x's type."""
        chosen_TK, weights_TK = route(logits_TE, self.weights.top_k, normalized=self.weights.normalized)
        parts = self.computed(x_TH, by_expert(chosen_TK, len(self.weights.experts)))
        return weighted_sum(parts, chosen_TK, weights_TK, x_TH.dtype)

    def computed(self, x_TH: Tensor, rows: ExpertRows) -> Tensor:
        """What each of a row's experts makes of it, [T · K, H] in x's type."""
        gate_up = grouped_linear(*_taken(x_TH, self.gate_up), rows, self.gate_up, x_TH.dtype)
        inner = silu_mul(gate_up, quantized=self.down.dtype is torch.int8)
        return grouped_linear(*_taken(inner, self.down), rows, self.down, x_TH.dtype)

    def tune(self, most_rows: int, dtype: torch.dtype) -> None:
        """Compile and choose tiles for steps of up to so many rows, so that no request waits for it.

        The choice is kept by shapes: one mixture of each kind is enough.
        """
        experts, device = len(self.weights.experts), self.gate_up.table.device
        for rows in rows_of_every_height(most_rows, self.weights.top_k, experts):
            x_TH = torch.randn(rows, self.gate_up.inputs, device=device).to(dtype)
            self(x_TH, torch.randn(rows, experts, device=device).to(dtype))


def rows_of_every_height(most_rows: int, top_k: int, experts: int) -> Iterator[int]:
    """Numbers of rows whose blocks have, together, every height that those of up to `most_rows` rows have."""
    yield from sorted({max(1, min(most_rows, height * experts // (2 * top_k))) for height in HEIGHTS} | {most_rows})


def _taken(x: Tensor | Quantized, layer: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    """Rows as a layer of experts takes them, and their scales where they are int8."""
    if layer.dtype is not torch.int8:
        assert isinstance(x, Tensor)
        return x, None
    return x if isinstance(x, Quantized) else quantize(x)
