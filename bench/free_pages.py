"""Free memory that a virtual machine reports to its host, and a wait until none is left to report.

The kernel reports blocks of free pages some seconds after they were freed, a part every two seconds or later (free page
reporting, of virtio's balloon device), and the host takes them back. On some hosts everything that computes is held up
during some of these, on all cores, for up to 0.5 s, without a word of stolen time: gigabytes that were freed just
before a measurement, by what ran earlier or by what is measured as it started, disturb its first minute. Measure
longest steps after this wait, and tell how often memory was reported meanwhile. Medians do not mind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

INTERRUPTS = Path("/proc/interrupts")
DEVICE_QUEUE = "reporting_vq"  # an interrupt of the balloon device: the host has taken what was reported
QUIET = 12.0  # seconds without a report: up to 10 lie between two after a process of 2 GB in small pages has ended
MOST = 300.0  # seconds; a machine on which others free memory is never quiet
EVERY = 0.5
TOLD_EVERY = 10.0


def reports(interrupts: Path = INTERRUPTS) -> int | None:
    """How many reports the host has answered since this machine started.

    None: that cannot be told. There is no balloon device, or it has no interrupt of its own for its reports.
    """
    try:
        head, *lines = interrupts.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # no such table, or an empty one
        return None
    cores = len(head.split())
    found = [line.split()[1 : 1 + cores] for line in lines if line.rstrip().endswith(DEVICE_QUEUE)]
    return sum(int(count) for counts in found for count in counts if count.isdigit()) if found else None


def told_since(before: int | None, count: Callable[[], int | None] = reports) -> str:
    """A line on how often it was reported since `reports` was `before`, for whoever reads what was measured."""
    now = count()
    if before is None or now is None or now < before:  # a core that is taken away takes its counts with it
        return "whether free memory was reported to a host meanwhile cannot be told here"
    return f"free memory was reported to the host {now - before} times meanwhile"


async def all_reported(say: Callable[[str], None], count: Callable[[], int | None] = reports) -> None:
    """Wait until no report has been made for QUIET seconds, or MOST are over.

    It returns at once where reports cannot be told. `say` hears how long it waits already, now and then.
    """
    began = changed = told = time.monotonic()
    known = count()
    while known is not None and (now := time.monotonic()) - changed < QUIET:
        if now - began >= MOST:
            say(f"no {QUIET:.0f} s without a report of free memory to the host in {MOST:.0f}; measuring all the same")
            return
        if now - told >= TOLD_EVERY:
            told = now
            say(f"waiting until free memory has been reported to the host: {now - began:.0f} s")
        await asyncio.sleep(EVERY)
        if (found := count()) != known:
            known, changed = found, time.monotonic()
