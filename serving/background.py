"""Background tasks that outlive their own mistakes: one that breaks is logged, counted and begun again.

It knows nothing of what the tasks do. A task that has returned is done; one that is cancelled stays so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.1  # seconds before a broken task begins again; doubles while it keeps breaking young
LONGEST_PAUSE = 10.0
YOUNG = 30.0  # seconds

Work = Callable[[], Coroutine[Any, Any, None]]


class BackgroundTasks:
    """`start` tasks on a running event loop, `stop` them all. `restarts` counts by name, over several of these."""

    def __init__(self, restarts: Counter[str] | None = None, *, first_pause: float = FIRST_PAUSE):
        self.restarts: Counter[str] = Counter() if restarts is None else restarts
        self.first_pause = first_pause
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, work: Work) -> None:
        """Run `work()` to its end, and anew whenever it breaks."""
        task = asyncio.create_task(self._keep(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def every(self, seconds: float, name: str, do: Callable[[], None]) -> None:
        """Call `do` again and again, with a pause of so many seconds before each call."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                do()

        self.start(name, repeat)

    async def stop(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, work: Work) -> None:
        clock, pause = asyncio.get_running_loop().time, self.first_pause / 2
        while True:
            began = clock()
            running = asyncio.create_task(work(), name=name)
            try:
                await asyncio.wait([running])
            finally:
                running.cancel()
                await asyncio.wait([running])
            error = asyncio.CancelledError("nobody asked for it") if running.cancelled() else running.exception()
            if error is None:
                return
            self.restarts[name] += 1
            pause = self.first_pause if clock() - began > YOUNG else min(2 * pause, LONGEST_PAUSE)
            log.error("%s broke and begins again in %.1f s", name, pause, exc_info=error)
            await asyncio.sleep(pause)
