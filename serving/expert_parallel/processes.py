"""Watches the processes of a group's other ranks on this host: whether one has ended, or is about to.

The kernel signals a pidfd, and closes sockets, when it has freed the memory of a process that is killed: some 50 ms
later for one that has loaded torch. It marks the process as exiting before that, once a core runs it, and has SIGKILL
pending for it from the moment it is sent.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

EXITING = 0x4  # PF_EXITING of the kernel's task flags
FLAGS = 6  # their place in /proc/PID/stat after the command's name
KILLED = 1 << (signal.SIGKILL - 1)
PENDING = 28  # the place of the main thread's signals that are pending; this one can be neither blocked nor taken back


class ProcessWatch:
    """Descriptors of other ranks' processes; `pids` by rank, without the own."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """A process that has ended already is taken for one that ends now."""
        self.descriptors: dict[int, int] = {}
        self.pids: dict[int, int] = {}  # of those that have a descriptor
        self._ended: set[int] = set()
        for rank, pid in pids.items():
            try:
                self.descriptors[rank] = os.pidfd_open(pid)
                self.pids[rank] = pid
            except ProcessLookupError:
                self._ended.add(rank)

    def ended(self, wait_seconds: float = 0.0, *, besides: Collection[int] = ()) -> int | None:
        """A rank whose process has ended or is ending, the lowest; None where all live on after this wait.

        Its main thread has stopped for good; others of the process may write for a moment yet. `besides` are ranks
        that are not asked for.
        """
        watched = {rank: pid for rank, pid in self.pids.items() if rank not in besides}
        ended = self.all_ended(wait_seconds, besides=besides) or {r for r, pid in watched.items() if is_ending(pid)}
        return min(ended, default=None)

    def all_ended(self, wait_seconds: float = 0.0, *, besides: Collection[int] = ()) -> set[int]:
        """The ranks whose processes have ended, with all their threads; none where all live on after this wait."""
        before = self._ended.difference(besides)
        watched = {rank: descriptor for rank, descriptor in self.descriptors.items() if rank not in besides}
        poller = select.poll()
        for descriptor in watched.values():
            poller.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(0.0 if before else wait_seconds * 1000)}
        return before | {rank for rank, descriptor in watched.items() if descriptor in ready}

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            with suppress(OSError):
                os.close(descriptor)
        self.descriptors.clear()
        self.pids.clear()


def is_ending(pid: int) -> bool:
    """Whether the main thread of this process is killed, exits or has exited. False where the system does not tell.

    A number that another process has by now is one whose first process has ended.
    """
    try:
        return says_ending(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return False


def says_ending(stat: bytes) -> bool:
    """Of what /proc/PID/stat holds, whose second word is a name in parentheses that may have any other character."""
    told = stat.rpartition(b")")[2].split()
    return _has(told[FLAGS : FLAGS + 1], EXITING) or _has(told[PENDING : PENDING + 1], KILLED)


def _has(told: list[bytes], bit: int) -> bool:
    return bool(told) and told[0].isdigit() and bool(int(told[0]) & bit)
