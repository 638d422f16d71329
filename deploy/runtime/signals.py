"""What SIGTERM and Ctrl-C do: before anything is served a process leaves at once, and then as its service says."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable

from serving.logs import bare_line
from serving.temporary import remove_temporary_folders

ENDING = (signal.SIGTERM, signal.SIGINT)


def leave_at_once_on_signals(when: str = "before anything was served") -> None:
    """While a model loads nothing has been accepted that could be lost. `when` is said of the signal.

    As process 1 of a container it would else not hear of SIGTERM, and a load in a thread would hold up Ctrl-C.
    """

    def leave(number: int, _: object) -> None:
        try:
            _say(f"{signal.Signals(number).name} {when}: leaving")
            remove_temporary_folders()
        finally:
            os._exit(0)

    for number in ENDING:
        signal.signal(number, leave)


def _say(line: str) -> None:
    """Without logging, a lock of which may be held by whom the signal interrupts, and without waiting for a reader."""
    if select.select([], [sys.stderr.fileno()], [], 0)[1]:
        os.write(sys.stderr.fileno(), bare_line(line))


def on_signals(leave: Callable[[], object]) -> None:
    """Call this in the running loop instead."""
    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, leave)
