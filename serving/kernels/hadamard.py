"""Hadamard transforms of neighbouring inputs: they spread a few huge activations over a block, and undo themselves.

The truth that compiled forms are held against. It knows nothing of layers or quantization.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST, LARGEST = 16, 512  # inputs of a block: fewer spread little, more take a longer transform for as little


def block_of(width: int) -> int:
    """How many of `width` inputs are transformed together: the largest power of two that divides it, up to LARGEST.

    0 where that is less than SMALLEST: such rows are not transformed.
    """
    block = min(width & -width, LARGEST)
    return block if block >= SMALLEST else 0


def transformed(x: Tensor, block: int) -> Tensor:
    """x [..., W] in float32, each `block` neighbours times a matrix of ones and minus ones (Sylvester, 1867).

    That matrix times itself is `block` times the identity. Inputs meet at a distance of 1 first, then of 2, 4 and so
    on, as in the compiled kernels: both give the same bits, whatever rows are beside a row.
    """
    assert block & (block - 1) == 0 and x.shape[-1] % block == 0, (block, x.shape)
    y, apart = x.float(), 1
    while apart < block:
        left, right = y.reshape(*x.shape[:-1], x.shape[-1] // (2 * apart), 2, apart).unbind(-2)
        y = torch.stack((left + right, left - right), dim=-2)
        apart *= 2
    return y.reshape(x.shape)
