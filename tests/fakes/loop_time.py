"""Hours that pass at once in a test's own loop: timers that were to run by then run, and sockets go on as they do.

Knows nothing of clocks other than the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def passing_time() -> Callable[[float], None]:
    """A function that lets so many seconds pass in the running loop, which has to be asyncio's own.

    They have passed as long as the loop lives: were they taken back, timers set since would be late by as much.
    """
    loop, ahead = asyncio.get_running_loop(), 0.0
    real = loop.time

    def let_pass(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    loop.time = lambda: real() + ahead  # type: ignore[method-assign]
    return let_pass
