"""How long a request may wait for a place, in all its tries together. Pure."""

from __future__ import annotations

LEAST = 1.0  # seconds for a request that comes again, whatever it has waited before


def patience_left(whole: float, waited: float, deadline: float | None, now: float) -> tuple[float, bool]:
    """Seconds of a patience of `whole` seconds, of which `waited` are over; True if the deadline comes before.

    A request that comes again has LEAST seconds at least: it may have to go on where others wait.
    """
    patience = max(whole - waited, min(whole, LEAST))
    left = patience if deadline is None else deadline - now
    return (max(0.0, left), True) if left < patience else (patience, False)
