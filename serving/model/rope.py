"""Rotary position embedding as plain numbers: every scaling scheme is reduced to a tuple of inverse frequencies.

Pure arithmetic on configuration values. It knows nothing of tensors, and the decoder knows nothing of the schemes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """How far each pair of head dimensions turns per position (RoFormer, arXiv 2104.09864).

    Dimension i is paired with i + len(frequencies); dimensions past twice that length do not turn.
    """

    frequencies: tuple[float, ...]  # radians per position, one for each pair
    magnitude: float = 1.0  # factor on cos and sin
    long_frequencies: tuple[float, ...] | None = None  # LongRoPE: for requests longer than `long_after` tokens
    long_after: int | None = None


def default_frequencies(theta: float, rotary_dim: int) -> tuple[float, ...]:
    """theta^(-2i / rotary_dim) for each pair i of `rotary_dim` dimensions. Raises ValueError for no base of a power."""
    if not 0 < theta < math.inf:
        raise ValueError(f"rope's theta is a finite number above 0; {theta} is given")
    return tuple(theta ** (-dim / rotary_dim) for dim in range(0, rotary_dim, 2))


def from_parameters(
    parameters: Mapping[str, Any],
    *,
    theta: float,
    rotary_dim: int,
    max_position: int,
    original_max_position: int | None,
) -> Rope:
    """The Rope of a Hugging Face `rope_scaling` or `rope_parameters` mapping (an empty one means no scaling).

    `original_max_position` is the model-level value, used where the mapping has none of its own.
    Raises ValueError for an unknown scheme or a missing key.
    """
    base = default_frequencies(theta, rotary_dim)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    try:
        if kind in ("default", None):
            return Rope(frequencies=base)
        if kind == "linear":
            return Rope(frequencies=tuple(frequency / float(parameters["factor"]) for frequency in base))
        if kind == "llama3":
            return Rope(frequencies=_llama3(base, parameters))
        original = int(parameters.get("original_max_position_embeddings") or original_max_position or max_position)
        factor = float(parameters.get("factor") or max_position / original)
        if kind == "yarn":
            return _yarn(base, parameters, theta, factor, original)
        if kind in ("longrope", "su"):
            return _longrope(base, parameters, factor, original)
    except KeyError as missing:
        raise ValueError(f"rope scaling {kind!r} needs {missing} in the model's config.json") from None
    raise ValueError(
        f"rope scaling {kind!r} is not supported; supported are default, linear, llama3, yarn and longrope"
    )


def divided(
    base: Sequence[float],
    factors: Sequence[float],
    *,
    long_factors: Sequence[float] | None = None,
    long_after: int | None = None,
    magnitude: float = 1.0,
) -> Rope:
    """Frequencies divided pair by pair: LongRoPE's rule (arXiv 2402.13753), and how GGUF files store any scaling.

    Raises ValueError unless there is one factor for each of the `base` frequencies.
    """

    def each(by: Sequence[float]) -> tuple[float, ...]:
        if len(by) != len(base):
            raise ValueError(f"rope scaling has {len(by)} factors for {len(base)} pairs of dimensions")
        return tuple(frequency / float(factor) for frequency, factor in zip(base, by, strict=True))

    return Rope(
        frequencies=each(factors),
        long_frequencies=None if long_factors is None else each(long_factors),
        long_after=long_after,
        magnitude=magnitude,
    )


def longrope_magnitude(factor: float, original_max_position: int) -> float:
    """Attention scale of LongRoPE (arXiv 2402.13753) for a context stretched `factor` times."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original_max_position))


def _llama3(base: tuple[float, ...], parameters: Mapping[str, Any]) -> tuple[float, ...]:
    """Llama 3.1's smooth interpolation: long wavelengths are stretched, short ones kept, the middle is blended."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)  # full turns over the original context
        if turns > high:
            return frequency
        if turns < low:
            return frequency / factor
        keep = (turns - low) / (high - low)
        return (1 - keep) * frequency / factor + keep * frequency

    return tuple(scaled(frequency) for frequency in base)


def _yarn(base: tuple[float, ...], parameters: Mapping[str, Any], theta: float, factor: float, original: int) -> Rope:
    """YaRN (arXiv 2309.00071): a linear ramp over the pairs between keeping and dividing by the factor."""
    rotary_dim = 2 * len(base)

    def pair_turning(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_turning(float(parameters.get("beta_fast") or 32))
    last = pair_turning(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001

    def scaled(pair: int, frequency: float) -> float:
        divided_share = min(max((pair - first) / width, 0.0), 1.0)
        return frequency / factor * divided_share + frequency * (1 - divided_share)

    return Rope(
        frequencies=tuple(scaled(pair, frequency) for pair, frequency in enumerate(base)),
        magnitude=_yarn_magnitude(parameters, factor),
    )


def yarn_scale(factor: float, weight: float) -> float:
    """YaRN's growth of attention scores for a context stretched `factor` times, weighted as configs say (`mscale`)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not one or not all_dims:
        return yarn_scale(factor, 1.0)
    return yarn_scale(factor, float(one)) / yarn_scale(factor, float(all_dims))


def _longrope(base: tuple[float, ...], parameters: Mapping[str, Any], factor: float, original: int) -> Rope:
    given = parameters.get("attention_factor")
    return divided(
        base,
        parameters["short_factor"],
        long_factors=parameters["long_factor"],
        long_after=original,
        magnitude=longrope_magnitude(factor, original) if given is None else float(given),
    )
