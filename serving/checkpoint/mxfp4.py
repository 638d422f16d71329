"""MXFP4 (OCP Microscaling Formats 1.0): groups of 32 numbers of 4 bits, e2m1, that share an exponent of 8 bits.

Shapes: R rows, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # numbers that share a scale, in 16 bytes; of each byte the low half comes first
EXPONENT_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of three bits; the fourth is the sign


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """[R, 32 G] float32, exactly, of blocks uint8 [R, G, 16] and scales uint8 [R, G].

    Raises ValueError where the two do not fit together.
    """
    if blocks.shape != (*scales.shape, GROUP // 2) or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        given = (f"{list(part.shape)} of {part.dtype}" for part in (blocks, scales))
        raise ValueError(f"MXFP4 blocks {next(given)} do not fit scales {next(given)}")
    table = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)  # [R, G, 32]
    return torch.ldexp(table[halves.int()], scales.int()[..., None] - EXPONENT_BIAS).flatten(-2)
