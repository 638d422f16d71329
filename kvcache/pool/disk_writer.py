"""The thread that writes blocks to disk, one by one. Which block is next, and how it is written, is handed in."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvcache.pool.block import PoolBlock


class DiskWriter:
    """Calls `following` under the store's lock for a block, and `write` without it, which has to change the answer."""

    def __init__(
        self,
        changed: threading.Condition,
        *,
        following: Callable[[], PoolBlock | None],
        write: Callable[[PoolBlock], None],
        clock: Callable[[], float],
    ):
        self._changed = changed
        self._following = following
        self._write = write
        self._clock = clock
        self._give_up_at = float("inf")
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="kvcache-disk", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Returns when nothing waits, or so much time has passed and the block in hand is written. Without the lock."""
        with self._changed:
            self._ending = True
            self._give_up_at = self._clock() + seconds
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (block := self._next()) is not None:
            self._write(block)

    def _next(self) -> PoolBlock | None:
        with self._changed:
            while (block := self._following()) is None and not self._ending:
                self._changed.wait()
            return None if self._clock() >= self._give_up_at else block
