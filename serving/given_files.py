"""Reads files that a flag names: regular ones, of a bounded size, so that no reader waits for what never comes.

A FIFO without a writer would keep it waiting, a device give it bytes for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 16 << 20


def check_regular(path: str | Path) -> None:
    """Raises OSError for what is no regular file, or no file at all. Links are followed."""
    _check(os.stat(path).st_mode, path)  # noqa: PTH116 - a flag's text as it is


def read_given(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """All of it. Raises OSError, also for a file of more than `most` bytes."""
    check_regular(path)  # before it is opened, which devices notice
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        _check(os.fstat(opened).st_mode, path)  # it may be another one by now
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
    return data


def read_given_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """All of it, in UTF-8. Raises OSError and UnicodeDecodeError."""
    return read_given(path, most).decode()


def _check(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
