"""How many tokens requests of a service class have come to, and so how many one more may. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WEIGHT = 0.05  # of the newest request
UNKNOWN = 128.0  # tokens, before any request of the class has ended


class OutputLengths:
    """Means by class that forget, of requests that were given no fewer tokens than they wanted or all they asked."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def ended(self, service_class: str, tokens: int) -> None:
        """A request has ended after so many output tokens."""
        count = self._counts[service_class] = self._counts.get(service_class, 0) + 1
        mean = self._means.get(service_class, UNKNOWN)
        self._means[service_class] = mean + max(WEIGHT, 1 / count) * (tokens - mean)

    def expected(self, service_class: str, so_far: int, most: int) -> int:
        """Further tokens of a request that has had `so_far` and may have `most` more; at least one."""
        mean = self._means.get(service_class, UNKNOWN)
        return max(1, min(most, round(mean - so_far) if so_far < mean else round(mean)))

    def kept(self) -> dict[str, Any]:
        """All of it as plain data, for `from_kept`."""
        return {name: [mean, self._counts[name]] for name, mean in self._means.items()}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> OutputLengths:
        """As they were kept. Raises ValueError, TypeError or AttributeError for what cannot be that."""
        made = cls()
        for name, (mean, count) in kept.items():
            if not 0.0 <= mean < math.inf or count < 1:
                raise ValueError(f"no mean length: {mean} of {count} requests")
            made._means[name], made._counts[name] = float(mean), int(count)
        return made
