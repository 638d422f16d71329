"""How many cores a worker computes on."""

from __future__ import annotations

import os

import torch


def use_threads(threads: int | None, workers_on_host: int = 1) -> int:
    """Set torch's compute threads for this process: `threads`, or this process's share of the cores it may use."""
    count = threads or max(1, len(os.sched_getaffinity(0)) // workers_on_host)
    torch.set_num_threads(count)
    return count
