"""One controller only: whoever holds the lock acts, all others watch.

On one host a locked file says who; a Kubernetes Lease or a named Ray actor stands behind the same two methods.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol


class ControllerLock(Protocol):
    """Raises ActuatorError where the place cannot be asked."""

    async def held(self) -> bool:
        """Take the lock, or renew it. False: another controller has it, and this one must not act."""
        ...

    async def release(self) -> None:
        """Let others have it. Safe to repeat."""
        ...


class FileLock:
    """Held by one process of this host until it ends, however it ends: a lock on an open file (flock)."""

    def __init__(self, path: Path):
        self.path = path
        self._file: int | None = None

    async def held(self) -> bool:
        if self._file is not None:
            return True
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    async def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
