"""The search for scales of one linear layer: smoothing of its inputs, clipping of its output channels.

Pure functions of tensors; they know no model. Shapes: M calibration tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.kernels import hadamard, int8

SMALLEST, LARGEST = 1 / 32, 32.0  # bounds of smoothing, relative to its geometric mean


def output_error(x: Tensor, weight: Tensor, smoothing: Tensor, exact: Tensor | None = None, rotation: int = 0) -> float:
    """mean over tokens of ‖Q(W·s) Q(s⁻¹x) − Wx‖² / ‖Wx‖² for x [M, K], weight [N, K] and smoothing s [K].

    `exact` is Wx [M, N] where it is known already. With `rotation` both are transformed before they are quantized.

    Relative to each token's own output, so that a few tokens with huge activations weigh as much as any others.
    """
    exact = x @ weight.t() if exact is None else exact
    values, scale = int8.quantize_rows(rotated(weight * smoothing, rotation))
    error = int8.linear(x / smoothing, values, scale, None, rotation) - exact
    return float((error.square().sum(-1) / exact.square().sum(-1).clamp_min(1e-12)).mean())


def rotated(rows: Tensor, rotation: int) -> Tensor:
    """Rows [M, K] times the orthogonal matrix that `int8.linear` multiplies inputs by; 0: as they are."""
    return hadamard.transformed(rows, rotation) / rotation**0.5 if rotation else rows


def input_sizes(x: Tensor) -> Tensor:
    """Root mean squares of each input of x [M, K], [2, K]: over tokens as they are, and over tokens scaled to equal
    length, so that a few huge ones do not dominate."""
    length = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    return torch.stack([_root_mean_square(x), _root_mean_square(x / length)])


def _root_mean_square(rows: Tensor) -> Tensor:
    return rows.square().mean(0).sqrt()


def candidates(sizes: Tensor, weight: Tensor, strengths: Sequence[float], shared: int = 1) -> list[Tensor]:
    """Smoothing vectors s [K] = a^α / w^(1 − α) for each row a of `sizes` [R, K] and each α > 0, and ones.

    w is the root mean square of an input's weights in weight [N, K]. At α = 1/2 every input contributes alike to both
    factors of the product, and the sum of their rounding errors is least where values are spread evenly. Each `shared`
    neighbouring inputs are scaled alike.
    """
    weight_size = _joined(_root_mean_square(weight), shared)
    found = [torch.ones_like(sizes[0])]
    for size in sizes:
        for strength in strengths:
            if strength:
                smoothing = _joined(size, shared) ** strength / weight_size ** (1 - strength)
                smoothing = smoothing / smoothing.log().mean().exp()
                found.append(smoothing.clamp(SMALLEST, LARGEST).repeat_interleave(shared))
    return found


def _joined(size: Tensor, shared: int) -> Tensor:
    """One root mean square [K / shared] of each `shared` neighbouring ones."""
    return size.square().view(-1, shared).mean(1).sqrt().clamp_min(1e-6)


def smoothing(
    x: Tensor, sizes: Tensor, weight: Tensor, strengths: Sequence[float], shared: int = 1, rotation: int = 0
) -> Tensor:
    """s* = argmin ‖Q(W·s)(s⁻¹X) − WX‖ over `candidates`, with s⁻¹X quantized as well; [K]. Never worse than ones."""
    exact = x @ weight.t()
    return min(candidates(sizes, weight, strengths, shared), key=lambda s: output_error(x, weight, s, exact, rotation))


def clipped_scales(weight: Tensor, clips: Sequence[float], x: Tensor | None = None) -> Tensor:
    """For each output channel the scale [N] = α · max|w| / 127 of the α in `clips` that errs least.

    The error of a channel is ‖(w − Q(w; α)) Xᵀ‖ on inputs x [M, K], or ‖w − Q(w; α)‖ without any.
    """
    largest = weight.abs().amax(-1).clamp_min(1e-12) / int8.LARGEST
    errors = torch.stack([_channel_errors(weight, clip * largest, x) for clip in clips])
    return torch.tensor(clips, device=weight.device)[errors.argmin(0)] * largest


def _channel_errors(weight: Tensor, scale: Tensor, x: Tensor | None) -> Tensor:
    difference = rounded(weight, scale).float() * scale[:, None] - weight
    return (difference if x is None else difference @ x.t()).square().sum(-1)


def rounded(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 of weight [N, K] in units of scale [N]; what lies beyond 127 units is 127."""
    return (weight / scale[:, None]).round().clamp(-int8.LARGEST, int8.LARGEST).to(torch.int8)
