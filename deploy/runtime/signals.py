"""What SIGTERM and Ctrl-C do: before anything is served a process leaves at once, and then as its service says.

One that others depend on for a time leaves when they have ended.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from serving.logs import bare_line
from serving.temporary import remove_temporary_folders

ENDING = (signal.SIGTERM, signal.SIGINT)
LONGEST_SECONDS = 365 * 24 * 3600.0  # that a timer may have


def leave_at_once_on_signals() -> None:
    """While a model loads nothing has been accepted that could be lost.

    As process 1 of a container it would else not hear of SIGTERM, and a load in a thread would hold up Ctrl-C.
    """
    for number in ENDING:
        signal.signal(number, lambda number, _: _leave(f"{signal.Signals(number).name} before anything was served"))


def _leave(why: str) -> None:
    try:
        with suppress(OSError, ValueError):  # nobody may read any more what it says
            _say(f"{why}: leaving")
        remove_temporary_folders()
    finally:
        os._exit(0)


class LeavesWhenDone:
    """What signals do to a process that others depend on while it is `needed`, and that leaves at once else.

    It has `seconds` from the first signal on; `asked` says that there was one. Of the main thread.
    """

    def __init__(self, when: str, seconds: float) -> None:
        """From now on; `when` is said of a signal that ends it at once."""
        self._when, self._seconds = when, min(seconds, LONGEST_SECONDS)
        self.asked = self._needed = False
        for number in ENDING:
            signal.signal(number, self._hear)
        signal.signal(signal.SIGALRM, lambda *_: _leave(f"others need it for longer than {seconds:g} s"))

    @contextmanager
    def needed(self) -> Iterator[None]:
        """A signal counts when this is over: whoever calls it is to look whether the process is `asked` to leave."""
        self._needed = True
        try:
            yield
        finally:
            self._needed = False

    def _hear(self, number: int, _: object) -> None:
        name = signal.Signals(number).name
        if not self._needed or not self._seconds:
            _leave(f"{name} {self._when}")
        if not self.asked:  # a timer and no thread, a lock of which may be held by whom the signal interrupts
            self.asked = True
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
            with suppress(OSError, ValueError):  # nobody may read any more what it says
                _say(f"{name}: leaving when nobody needs it any more, in {self._seconds:g} s at the latest")


def _say(line: str) -> None:
    """Without logging, a lock of which may be held by whom the signal interrupts, and without waiting for a reader."""
    if select.select([], [sys.stderr.fileno()], [], 0)[1]:
        os.write(sys.stderr.fileno(), bare_line(line))


def on_signals(leave: Callable[[], object]) -> None:
    """Call this in the running loop instead."""
    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, leave)
