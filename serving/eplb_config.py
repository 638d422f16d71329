"""How experts are balanced while a model is served, as `--eplb-config` says it: a JSON object with vLLM's keys.

Reads text, moves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from serving.options import ConfigError

LONGEST = 200  # characters of a wrong text that are repeated
PARAM = "eplb_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class EplbConfig:
    """Defaults are vLLM's; `bytes_per_second` is ours."""

    num_redundant_experts: int = 0  # of each MoE layer: how many more slots there are than experts
    window_size: int = 1000  # about how many steps' loads a round goes by; those of its own interval at least
    step_interval: int = 3000  # steps from one round to the next
    bytes_per_second: int = 1_000_000_000  # of weights, that a rank may take in while it serves

    @property
    def kept(self) -> float:
        """Of the loads that one round went by, the share that goes into the next: older ones fade."""
        return max(0.0, 1.0 - self.step_interval / self.window_size)


LEAST = {"num_redundant_experts": 0, "window_size": 1, "step_interval": 1, "bytes_per_second": 1}
MOST = 1 << 40


def read_eplb_config(text: str | None) -> EplbConfig:
    """Raises ConfigError for what is no such object, or names what cannot be had."""
    if text is None:
        return EplbConfig()
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise _wrong(f"{_shortened(text)} is no JSON object", 'write it as {"num_redundant_experts": 2}')
    known = [field.name for field in fields(EplbConfig)]
    if unknown := sorted(given.keys() - set(known)):
        raise _wrong(f"{_shortened(', '.join(unknown), str)} not known", f"known are {', '.join(known)}")
    for key, number in given.items():
        if type(number) is not int or not LEAST[key] <= number <= MOST:
            usual = getattr(EplbConfig(), key)
            what = f"{key} {_shortened(number)} is no whole number from {LEAST[key]} to {MOST}"
            raise _wrong(what, f"{usual} is usual")
    return EplbConfig(**given)


def _shortened(given: Any, form: Callable[[Any], str] = repr) -> str:
    text = form(given)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} and so on"


def _wrong(what: str, instead: str) -> ConfigError:
    return ConfigError(f"--eplb-config: {what}; {instead}", param=PARAM)
