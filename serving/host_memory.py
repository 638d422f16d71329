"""Zeros in host memory, handed out piece by piece from large mappings that ask for huge pages.

What is read in full at every step, weights and KV, lies so in few pages, and the processor need not look up where each
4 KiB of it are. It knows nothing of what the memory is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE  # bytes; each piece begins a page, so that it can be pinned by itself
LEAST_HUGE = 4 << 20  # bytes of a mapping that asks for huge pages: of a smaller one they would waste too much
HUGE_PAGE = 2 << 20  # bytes, where the system does not tell
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: https://man7.org/linux/man-pages/man2/madvise.2.html


class HostMemory:
    """Pieces of mappings of `step` bytes; a larger piece has a mapping of its own.

    Memory is taken up only as it is written, by a huge page (2 MiB) at a time where there are some. A mapping is given
    back once none of its pieces is used any more. Several threads may take pieces.
    """

    def __init__(self, step: int):
        self.step = step
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, count: int) -> Tensor:
        """Zeros, uint8 [count]. Raises MemoryError if the system gives no more."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        room = -(-count // PAGE) * PAGE
        with self._lock:
            if room > self.step:
                return _mapped(room)[:count]
            if room > len(self._rest):
                self._rest = _mapped(self.step)
            piece, self._rest = self._rest[:count], self._rest[room:]
        return piece


def populate(address: int, count: int) -> None:
    """Have the kernel find pages for these bytes, and clear them, as if each were written; their content stays.

    So it is safe beside others that read and write there. Python's lock is not held. Raises OSError where the system
    cannot (Linux before 5.14, and others), or has no more memory.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    first = address // PAGE * PAGE
    if _madvise()(ctypes.c_void_p(first), ctypes.c_size_t(address + count - first), _POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _madvise() -> Callable[..., Any]:
    return ctypes.CDLL(None, use_errno=True).madvise  # which gives up Python's lock for each call


@cache
def huge_page() -> int:
    """Bytes of a huge page."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return HUGE_PAGE


def _mapped(count: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host has no {count / 2**30:.1f} GiB of memory left") from error
    if count >= LEAST_HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
