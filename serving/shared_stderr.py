"""Standard error as several processes share it: each line is written whole before another process writes one.

A pipe keeps lines of at most 4096 bytes in one piece, and mixes longer ones with those of others when it is full. It
knows nothing of what a line says.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


class WholeLines:
    """Writes to a stream, with a lock where that is a pipe or a socket. A file takes a line in one piece by itself.

    The lock is the process's (POSIX), so that children who inherit the stream wait for it too; it ends with it.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

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
        if shared is not None:
            with suppress(OSError):  # not to be locked: a line that may be torn is better than none
                fcntl.lockf(shared, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if shared is not None:
                with suppress(OSError):
                    fcntl.lockf(shared, fcntl.LOCK_UN)

    def _shared(self) -> int | None:
        """The descriptor, where lines of several processes may mix. Raises ValueError for a stream that is closed."""
        try:
            number = self.stream.fileno()
            mode = os.fstat(number).st_mode
        except OSError:  # a stream in memory has none
            return None
        return number if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
