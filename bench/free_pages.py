"""Free memory that a virtual machine reports to its host, and a wait until none is left to report.

The kernel reports blocks of free pages some seconds after they were freed, a part every two seconds or later (free page
reporting, of virtio's balloon device), and the host takes them back. On some hosts everything that computes is held up
meanwhile, on all cores, for up to 0.4 s at a time, without a word of stolen time: gigabytes that were freed just before
a measurement, by what ran earlier or by what is measured as it started, disturb its first minute. Measure longest steps
and tails after this wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

INTERRUPTS = Path("/proc/interrupts")
DEVICE_QUEUE = "reporting_vq"  # an interrupt of the balloon device: the host has taken what was reported
QUIET = 12.0  # seconds without a report: up to 10 lie between two after a process of 2 GB in small pages has ended
MOST = 180.0  # seconds; a machine on which others free memory is never quiet
EVERY = 0.5
TOLD_EVERY = 10.0


def reports(interrupts: Path = INTERRUPTS) -> int:
    """How many reports the host has answered since this machine started; 0 where none are made, or none can be told."""
    try:
        lines = interrupts.read_text().splitlines()
    except OSError:
        return 0
    counts = (line.split() for line in lines if line.rstrip().endswith(DEVICE_QUEUE))
    return sum(int(word) for words in counts for word in words[1:] if word.isdigit())


async def all_reported(
    say: Callable[[str], None],
    *,
    quiet: float = QUIET,
    most: float = MOST,
    every: float = EVERY,
    count: Callable[[], int] = reports,
) -> bool:
    """Wait until no report has been made for `quiet` seconds, or `most` are over; whether it is quiet.

    It returns at once on a machine that has never made one. `say` hears how long it waits already, now and then.
    """
    began = changed = told = time.monotonic()
    known = count()
    while known and (now := time.monotonic()) - changed < quiet:
        if now - began >= most:
            say(f"free memory is still being reported to the host after {now - began:.0f} s; measuring all the same")
            return False
        if now - told >= TOLD_EVERY:
            told = now
            say(f"waiting until free memory has been reported to the host: {now - began:.0f} s")
        await asyncio.sleep(every)
        if (found := count()) != known:
            known, changed = found, time.monotonic()
    return True
