"""Which cores a worker computes on, and with how many threads.

Memory follows: a page of weights or KV lies on the NUMA node of the core that writes it first, so a worker bound to
the cores of one node keeps its memory there.
"""

from __future__ import annotations

import os
import re


def use_cores(cpus: str | None, threads: int | None) -> int:
    """Bind this process to `cpus` (such as 0-3,8) and give torch its compute threads; how many those are.

    Call before threads are started. Raises ValueError for a list that cannot be read or cores that are not there.
    """
    if cpus is not None:
        try:
            os.sched_setaffinity(0, parse_cpus(cpus))
        except OSError as error:
            raise ValueError(f"--cpus {cpus}: {error.strerror}; this process may use {_allowed()}") from None
    import torch  # which a router, that only parses such lists, does not need

    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def parse_cpus(text: str) -> set[int]:
    """`0-3,8` → {0, 1, 2, 3, 8}. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--cpus {text}: {part!r} is neither a core such as 3 nor a range such as 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _allowed() -> str:
    return ", ".join(map(str, sorted(os.sched_getaffinity(0))))
