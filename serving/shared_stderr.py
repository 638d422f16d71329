"""Standard error as several processes share it: each line is written whole before another process writes one.

A pipe keeps lines of at most 4096 bytes in one piece, and mixes longer ones with those of others when it is full. It
knows nothing of what a line says.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

PATIENCE = 1.0  # seconds that a line waits for those of others
IMPATIENT_FOR = 10.0  # seconds after such a wait was in vain
LOOK = 0.0005  # seconds between looks at the lock: it has no wait with an end


class WholeLines:
    """Writes to a stream, with a lock where that is a pipe or a socket. A file takes a line in one piece by itself.

    The lock is the process's (POSIX), so that children who inherit the stream wait for it too; it ends with it. Who is
    stopped with it in hand delays others by `patience` seconds now and then, no more: they write without it.
    """

    def __init__(self, stream: TextIO, patience: float = PATIENCE):
        self.stream = stream
        self._patience = patience
        self._impatient_until = 0.0  # on the monotonic clock

    def write(self, text: str) -> int:
        with self._alone():
            written = self.stream.write(text)
            self.stream.flush()  # while we are alone
        return written

    def flush(self) -> None:
        """Nothing waits: lines are out when they are written."""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        shared = self._shared()
        if shared is None:
            yield
            return
        with suppress(OSError):  # not to be locked: a line that may be torn is better than none
            self._lock(shared)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.lockf(shared, fcntl.LOCK_UN)

    def _lock(self, shared: int) -> None:
        """Raises OSError for a stream that cannot be locked, or is not in time."""
        now = time.monotonic()
        ends = now if now < self._impatient_until else now + self._patience
        while True:
            try:
                fcntl.lockf(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):  # another process has it
                if time.monotonic() >= ends:
                    if ends > now:
                        self._impatient_until = ends + IMPATIENT_FOR
                    raise
            time.sleep(LOOK)

    def _shared(self) -> int | None:
        """The descriptor, where lines of several processes may mix. Raises ValueError for a stream that is closed."""
        try:
            number = self.stream.fileno()
            mode = os.fstat(number).st_mode
        except OSError:  # a stream in memory has none
            return None
        return number if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
