"""The log of block keys a worker has stored and removed, from which a router keeps its index of the worker's prefixes.

Pure: no torch, no clock. Written and read under the engine's lock.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from serving.messages import KVEvents

KEY_BYTES = 8  # of a block key's 32: enough to tell the blocks of one worker apart
LOG_EVENTS = 65_536


class KVEventLog:
    """The last `limit` events, numbered from 0, and the keys present now."""

    def __init__(self, limit: int = LOG_EVENTS):
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=limit)  # a key, and True if it was stored
        self._present: dict[bytes, int] = {}  # cut keys → blocks; more than one where two keys are cut to the same
        self._next = 0  # number of the next event

    def stored(self, key: bytes) -> None:
        short = key[:KEY_BYTES]
        count = self._present.get(short, 0)
        self._present[short] = count + 1
        if not count:
            self._append(short, True)

    def removed(self, key: bytes) -> None:
        short = key[:KEY_BYTES]
        count = self._present[short] - 1
        if count:
            self._present[short] = count
        else:
            del self._present[short]
            self._append(short, False)

    def _append(self, short: bytes, stored: bool) -> None:
        self._events.append((short, stored))
        self._next += 1

    def since(self, sequence: int) -> KVEvents:
        """The events from number `sequence` on, the last of each key; all keys where the log does not reach back.

        0 stands for a first contact: it is answered with all keys too. Of a restarted worker, ask from 0.
        """
        first = self._next - len(self._events)
        if sequence != self._next and not max(1, first) <= sequence < self._next:
            return KVEvents(first=-1, next=self._next, reset=True, stored=tuple(self._present))
        last = dict(islice(self._events, sequence - first, None))
        return KVEvents(
            first=sequence,
            next=self._next,
            stored=tuple(key for key, stored in last.items() if stored),
            removed=tuple(key for key, stored in last.items() if not stored),
        )
