"""Memory of one process that others of its host may map: an anonymous file, sealed, found through /proc.

The memory is gone with the processes that map it, however those end. Whoever cannot open it, on another host, in
another container or as another user, finds that out at once. What it is used for is not known here.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

FIRST_BYTE = mmap.PAGESIZE  # of what users of a segment may write: its first page holds the secret
_SECRET_BYTES = 32  # at the file's beginning, and in the offer: they agree if the right file was opened
DETAILS = struct.Struct(f"<QQQ{_SECRET_BYTES}s")  # process, file descriptor, size, secret
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class SegmentUnavailable(Exception):
    """Another process's memory cannot be had from here."""


def available() -> bool:
    """True if this system has anonymous files that others may open (Linux)."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class Segment:
    """Memory of this process, `size` bytes after its first page, that others on the host may map by `details`."""

    def __init__(self, size: int, name: str = "millrace-kv"):
        whole = FIRST_BYTE + size
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, whole)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)  # no write may find the file shorter than it was
        self.memory: Bytes = np.frombuffer(mmap.mmap(self._file, whole), dtype=np.uint8)
        self.memory[:_SECRET_BYTES] = np.frombuffer(secret, dtype=np.uint8)
        self.details = DETAILS.pack(os.getpid(), self._file, whole, secret)

    def close(self) -> None:
        """What others have mapped stays until they let go of it."""
        os.close(self._file)


def mapped(details: bytes, *, writable: bool = True) -> Bytes:
    """Another process's segment, all of it. Raises SegmentUnavailable where that cannot be had from here."""
    try:
        process, descriptor, size, secret = DETAILS.unpack(details)
    except struct.error as error:
        raise SegmentUnavailable("the offer of shared memory is not one") from error
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentUnavailable("its memory cannot be opened from here: another host, container or user") from error
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size != size or not _sealed(file):
            raise SegmentUnavailable("the file on offer is not shared memory")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        memory: Bytes = np.frombuffer(mmap.mmap(file, size, access=access), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise SegmentUnavailable(f"its memory cannot be mapped: {error}") from error
    finally:
        os.close(file)
    if memory[:_SECRET_BYTES].tobytes() != secret:
        raise SegmentUnavailable("the memory on offer is not the one meant: another host or container")
    return memory


def process_of(details: bytes) -> int:
    """The process whose segment it is."""
    process: int = DETAILS.unpack(details)[0]
    return process


def _sealed(file: int) -> bool:
    with suppress(OSError):
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS)
    return False
