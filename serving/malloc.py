"""The C library's heap: whether a process keeps memory it has freed. It knows nothing of what the memory is for."""

from __future__ import annotations

import ctypes

# mallopt's parameters: https://man7.org/linux/man-pages/man3/mallopt.3.html
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
KEPT_BYTES = 64 << 20  # free memory at the end of a heap that is not given back
LOADED_BYTES = 128 << 10  # of a tensor of a small model
HEAP_BYTES = 8 << 20  # what is larger is mapped on its own, and given back when it is freed


def keep_freed_memory() -> bool:
    """Have malloc keep buffers of up to HEAP_BYTES for the next one; False where there is no such setting (not glibc).

    By default glibc gives a buffer of a megabyte back to the kernel as soon as it is freed, and the next one costs a
    page fault for every 4 KiB: on a decode worker that took more time than all copies of the KV it received.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, HEAP_BYTES))


def give_back_freed_memory() -> bool:
    """Have malloc give buffers of LOADED_BYTES and more back as they are freed; False where it cannot (not glibc).

    For a process that loads: by default glibc keeps buffers of up to 32 MiB once some were freed, and what a model
    takes on its way to its last form then counts twice. `keep_freed_memory` ends it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, LOADED_BYTES))


def give_back_memory() -> bool:
    """Have malloc give all that is free back to the kernel; False where it has none, or cannot (not glibc).

    Takes about a millisecond for each 4 MiB that are free.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
