"""What the KV's way from a prefill to a decode worker costs: seconds, fixed and for each token, by pair of workers.

Fitted to what requests waited between their first token and the next, beyond a step. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from serving.fading_line import FadingLine

FADE = 0.98  # of the memory of handoffs, a handoff
PRIOR = ((0, 0.002), (4096, 0.02))  # tokens and seconds of handoffs that none has seen: they fade like others
MOST_PAIRS = 65_536
KEPT_PAIRS = 4096  # over a restart: the last ones that were met first


class LinkCost(FadingLine):
    """seconds = fixed + tokens · each, by weighted least squares; neither is negative.

    It is asked for more often than it sees anything: the line is found when the first one asks.
    """

    __slots__ = ("_line",)

    def __init__(self) -> None:
        super().__init__(FADE)
        self._line: tuple[float, float, float] | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        FadingLine.observe(self, tokens, seconds)
        self._line = None

    def seconds(self, tokens: int) -> float:
        line = self._line
        if line is None:
            slope = self.slope if self.spread > 1e-6 * self.xx else 0.0
            line = self._line = self.x / self.weight, self.y / self.weight, slope
        mean_x, mean_y, slope = line
        found = mean_y + slope * (tokens - mean_x)
        return found if found > 0.0 else 0.0


class LinkCosts:
    """By the instances of prefill and decode worker. A pair that has handed nothing over yet costs what all have."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], LinkCost] = {}
        self._all = _prior()

    def observed(self, prefill: str, decode: str, tokens: int, seconds: float) -> None:
        """A handoff of so many tokens kept its request waiting so long."""
        pair = self._pairs.get((prefill, decode))
        if pair is None and len(self._pairs) < MOST_PAIRS:
            pair = self._pairs[prefill, decode] = _prior()
        for known in (pair, self._all):
            if known is not None:
                known.observe(tokens, max(0.0, seconds))

    def seconds(self, prefill: str, decode: str, tokens: int) -> float:
        return self._pairs.get((prefill, decode), self._all).seconds(tokens)

    def retain(self, instances: Collection[str]) -> None:
        """All other workers are gone."""
        for pair in [pair for pair in self._pairs if not (pair[0] in instances and pair[1] in instances)]:
            del self._pairs[pair]

    def kept(self) -> dict[str, Any]:
        """What was learned as plain data, for `from_kept`."""
        pairs = islice(reversed(self._pairs.items()), KEPT_PAIRS)
        return {"all": _sums(self._all), "pairs": [[*pair, *_sums(cost)] for pair, cost in pairs]}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> LinkCosts:
        """As they were kept. Raises ValueError, TypeError or KeyError for what cannot be that."""
        made = cls()
        made._all = _line(kept["all"])
        for prefill, decode, *sums in reversed(kept["pairs"][:KEPT_PAIRS]):
            made._pairs[str(prefill), str(decode)] = _line(sums)
        return made


def _sums(cost: LinkCost) -> list[float]:
    return [cost.weight, cost.x, cost.y, cost.xx, cost.xy]


def _line(sums: Sequence[float]) -> LinkCost:
    made = LinkCost()
    made.weight, made.x, made.y, made.xx, made.xy = sums
    if not all(0.0 <= each < math.inf for each in sums) or not made.weight:
        raise ValueError(f"no sums of handoffs: {sums}")
    return made


def _prior() -> LinkCost:
    cost = LinkCost()
    for tokens, seconds in PRIOR:
        cost.observe(tokens, seconds)
    return cost
