"""Guesses from a model's size what its steps take, for the time before any has been seen.

Pure arithmetic over a ModelSpec: floating-point operations and bytes over what a device of the kind roughly does. The
first steps scale it (serving.engine.step_fit); until then only its shape matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.model.spec import ModelSpec
from serving.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Operations and bytes a second, and the seconds a step and each of its sequences take beside the device."""

    operations: float
    bytes: float
    step_seconds: float
    sequence_seconds: float


CPU = DeviceRates(2e11, 2e10, 5e-4, 1e-5)
CUDA = DeviceRates(2e14, 1.5e12, 1e-3, 5e-6)
ATTENTION = 0.3  # of the operations a second that products of matrices reach


def guessed_cost(spec: ModelSpec, *, weight_bytes: float, kv_bytes: float, device: str = "cpu") -> StepCost:
    """`weight_bytes` are read once a step, `kv_bytes` are those of one token's KV. All coefficients are positive."""
    rates = CUDA if device.partition(":")[0] == "cuda" else CPU
    width = spec.heads * spec.head_dim
    matrices = 3 if spec.mlp.startswith("gated") else 2
    attention = spec.hidden * (2 * width + 2 * spec.kv_heads * spec.head_dim)
    layers = spec.layers * (attention + matrices * spec.hidden * spec.intermediate)
    head = spec.hidden * spec.vocab_size  # computed where a token is drawn
    return StepCost(
        fixed=rates.step_seconds + weight_bytes / rates.bytes,
        token=2 * layers / rates.operations,
        pair=4 * spec.layers * width / (ATTENTION * rates.operations),
        sequence=rates.sequence_seconds + 2 * head / rates.operations,
        context=kv_bytes / rates.bytes,
    )


UNKNOWN = StepCost(fixed=2e-3, token=2e-4, pair=5e-8, sequence=2e-4, context=5e-7)
"""The guess for a runner whose model is not known."""
