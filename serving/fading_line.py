"""Seconds as a line over tokens, fitted by least squares to what was seen, old observations fading.

Pure; it knows nothing of what is timed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FadingLine:
    """Sums over observations; each one fades by the factor `fade` with every later one."""

    fade: float
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        fade = self.fade
        self.weight = fade * self.weight + 1.0
        self.x = fade * self.x + tokens
        self.y = fade * self.y + seconds
        self.xx = fade * self.xx + tokens**2
        self.xy = fade * self.xy + tokens * seconds

    @property
    def spread(self) -> float:
        """How far the tokens seen lie apart: `weight`² times their variance."""
        return self.weight * self.xx - self.x**2

    @property
    def slope(self) -> float:
        """Seconds a token, never negative. Ask only where the spread is not 0."""
        return max(0.0, (self.weight * self.xy - self.x * self.y) / self.spread)
