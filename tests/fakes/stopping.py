"""Processes that are stopped for a test: from a known moment on they do nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOP_SECONDS = 60.0


def stop(pid: int) -> None:
    """SIGSTOP, and wait until all threads of the process stand still.

    The signal stops them when the one that it goes to has been scheduled: until then the others go on, and answer.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + STOP_SECONDS
    while not stands_still(pid):
        assert time.monotonic() < until, f"process {pid} does not stop"
        time.sleep(0.001)


def harm(pid: int, how: signal.Signals) -> None:
    """The signal. From SIGSTOP the process stands still once this returns: it answers nothing that is asked then."""
    if how == signal.SIGSTOP:
        stop(pid)
    else:
        os.kill(pid, how)


def stands_still(pid: int) -> bool:
    """True if every thread is stopped."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
