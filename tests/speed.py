"""How quick Python is on this machine, for bounds of CPU time: they hold for the machine they were set on."""

from __future__ import annotations

import time
from functools import cache

LOOP_SECONDS = 0.033  # that the loop takes, about, on one core of a Zen 5, where the bounds were set; a Zen 3: 0.059
TURNS = 200_000


@cache
def slowness() -> float:
    """Times the CPU time of a Zen 5 that this machine takes, the least of five: 1 where it is as quick, or quicker."""
    return max(1.0, min(_loop() for _ in range(5)) / LOOP_SECONDS)


def _loop() -> float:
    began, kept = time.process_time(), {}
    for i in range(TURNS):
        kept[i & 1023] = (i, str(i))
    return time.process_time() - began
