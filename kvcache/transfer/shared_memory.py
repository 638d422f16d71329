"""Memory that two processes of one host share: the lender of its buffers, and the writer that fills them.

The memory is an anonymous file, so it is gone with the process that made it, however that ends. A process that cannot
open it, on another host, in another container or as another user, finds that out at once and takes another transport.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import stat
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvcache.transfer.lent_memory import TRANSFER_BYTES, Bytes, MemoryLender, TransferUnavailable
from serving.messages import TransportOffer

KIND = "shm"
TRANSFERS = 16  # at a time; more go another way. Memory is taken up when it is first written to: 128 MiB in all
REST_SECONDS = 5.0  # how long the buffers of a lost sender rest: its writes are copies, over in a moment
_SECRET_BYTES = 32  # at the file's beginning, and in the offer: they agree if the right file was opened
_FIRST_BUFFER = mmap.PAGESIZE
DETAILS = struct.Struct(f"<QQQ{_SECRET_BYTES}s")  # process, file descriptor, size, secret
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


def available() -> bool:
    """True if this system has anonymous files that others may open (Linux)."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class Segment:
    """Memory of this process, `size` bytes after its first page, that others on the host may map by `details`."""

    def __init__(self, size: int):
        whole = _FIRST_BUFFER + size
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._file = os.memfd_create("millrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, whole)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)  # no write may find the file shorter than it was
        self.memory: Bytes = np.frombuffer(mmap.mmap(self._file, whole), dtype=np.uint8)
        self.memory[:_SECRET_BYTES] = np.frombuffer(secret, dtype=np.uint8)
        self.details = DETAILS.pack(os.getpid(), self._file, whole, secret)

    def close(self) -> None:
        """What others have mapped stays until they let go of it."""
        os.close(self._file)


def mapped(details: bytes) -> Bytes:
    """Another process's segment, all of it. Raises TransferUnavailable where that cannot be had from here."""
    try:
        process, descriptor, size, secret = DETAILS.unpack(details)
    except struct.error as error:
        raise TransferUnavailable("the offer of shared memory is not one") from error
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferUnavailable("its memory cannot be opened from here: another host, container or user") from error
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size != size or not _sealed(file):
            raise TransferUnavailable("the file on offer is not shared memory")
        memory: Bytes = np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise TransferUnavailable(f"its memory cannot be mapped: {error}") from error
    finally:
        os.close(file)
    if memory[:_SECRET_BYTES].tobytes() != secret:
        raise TransferUnavailable("the memory on offer is not the one meant: another host or container")
    return memory


def _sealed(file: int) -> bool:
    with suppress(OSError):
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS)
    return False


class SharedMemoryLender(MemoryLender):
    """Lends a segment of shared memory. Raises TransferUnavailable where there is no such memory."""

    kind = KIND

    def __init__(self) -> None:
        if not available():
            raise TransferUnavailable("this system has no anonymous files to share memory by")
        try:
            self.segment = Segment(TRANSFERS * TRANSFER_BYTES)
        except OSError as error:
            raise TransferUnavailable(f"no memory can be shared: {error}") from error
        offer = TransportOffer(kind=KIND, details=self.segment.details)
        super().__init__(offer, self.segment.memory[_FIRST_BUFFER:], _FIRST_BUFFER, REST_SECONDS)

    def close(self) -> None:
        self.segment.close()


class SharedMemoryWriters:
    """The sending half of a process (kvcache.transfer.remote_write.RemoteWriters)."""

    def prepare(self) -> None:
        """There is nothing to start."""

    def writer(self, offer: TransportOffer) -> SharedMemoryWriter:
        return SharedMemoryWriter(mapped(offer.details))

    def close(self) -> None:
        """Each transfer lets go of what it has mapped."""


class SharedMemoryWriter:
    """One transfer's writes (remote_write.RemoteWriter): plain copies, each over before `write` returns."""

    kind = KIND

    def __init__(self, memory: Bytes):
        self._memory: Bytes | None = memory

    async def connect(self) -> None:
        """The memory is mapped already."""

    def write(self, buffer: int, address: int, payload: bytes | memoryview) -> asyncio.Future[None]:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        memory, end = self._memory, address + len(payload)
        if memory is None or not _FIRST_BUFFER <= address <= end <= len(memory):
            written.set_exception(TransferUnavailable("a buffer lies outside of the memory on offer"))
            written.exception()  # no caller may be left to ask
        else:
            memory[address:end] = np.frombuffer(payload, dtype=np.uint8)
            written.set_result(None)
        return written

    async def settle(self) -> bool:
        self._memory = None
        return True
