"""What is quantized to INT8 and how its scales are sought, as data; and the scales once found.

Knows names of a decoder's modules, not the modules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from serving.kernels import hadamard


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Scheme:
    """W8A8: weights with one scale per output channel, activations with one per token.

    `high` are regular expressions over module names, such as `layers.3.mlp.down`; a module that one of them matches
    whole stays in the model's own type. In them `last` stands for the number of the last layer. Inputs of modules that
    one of `rotated` matches whole go through Hadamard transforms before they are quantized; where their width has no
    block (`hadamard.block_of`), such a module stays as it is. `strengths` are the exponents tried for smoothing, 0
    being none; `clips` the shares of a channel's largest weight tried as the largest that is representable; `rows` how
    many calibration tokens a layer's search looks at.
    """

    high: tuple[str, ...] = ("head", r"layers\.\d+\.mlp\.down", r"layers\.(0|last)\.mlp\.gate_up")
    rotated: tuple[str, ...] = ()
    strengths: tuple[float, ...] = (0.0, 0.4, 0.5, 0.6)
    clips: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85)
    rows: int = 256

    def keeps(self, name: str, layers: int) -> bool:
        """True if the module `name` of a decoder of that many layers stays as it is."""
        return _matches(name, self.high, layers)

    def rotation(self, name: str, layers: int, width: int) -> int | None:
        """How many of the `width` inputs of that module are joined, 0 being none; None: it stays as it is."""
        if not _matches(name, self.rotated, layers):
            return 0
        return hadamard.block_of(width) or None


def _matches(name: str, patterns: Sequence[str], layers: int) -> bool:
    return any(re.fullmatch(pattern.replace("last", str(layers - 1)), name) for pattern in patterns)


PORTABLE = Int8Scheme()
"""What every system computes that reads `compressed-tensors`: transforms of inputs are none of it."""

ROTATED = Int8Scheme(high=("head",), rotated=(r"layers\.\d+\.(attention\.qkv|mlp\.gate_up|mlp\.down)",))
"""Every linear of every layer, those after a norm and after the gate with their inputs transformed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Of one linear layer, float32 on the CPU.

    Its weight is W = (int8 · scale[:, None]) / smoothing[None, :] to within rounding, and the layer before it divides
    its inputs by `smoothing`. Where inputs are transformed, int8 · scale[:, None] is transformed alike.
    """

    smoothing: Tensor | None  # [in]
    scale: Tensor  # [out]
