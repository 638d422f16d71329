"""Watches the processes of a group's other ranks on this host: whether one has ended is known at once, by its pidfd."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from contextlib import suppress


class ProcessWatch:
    """Descriptors of other ranks' processes; `pids` by rank, without the own."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """A process that has ended already is taken for one that ends now."""
        self.descriptors: dict[int, int] = {}
        self._ended: set[int] = set()
        for rank, pid in pids.items():
            try:
                self.descriptors[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(rank)

    def ended(self, wait_seconds: float = 0.0) -> int | None:
        """A rank whose process has ended, the lowest; None where all live on after this wait."""
        return min(self.all_ended(wait_seconds), default=None)

    def all_ended(self, wait_seconds: float = 0.0) -> set[int]:
        """The ranks whose processes have ended; none where all live on after this wait."""
        if self._ended:
            wait_seconds = 0.0
        poller = select.poll()
        for descriptor in self.descriptors.values():
            poller.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(wait_seconds * 1000)}
        return self._ended | {rank for rank, descriptor in self.descriptors.items() if descriptor in ready}

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            with suppress(OSError):
                os.close(descriptor)
        self.descriptors.clear()
