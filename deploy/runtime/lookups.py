"""Looks names up without holding up the event loop, nor the end of the process: a resolver may take minutes to answer.

It knows nothing of what the names are for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_a_daemon(work: Callable[[], T]) -> T:
    """What `work` returns, done by a thread that is left alone where this is cancelled, and where the process ends.

    Threads of the event loop's own are waited for at the end. Raises the OSError or ValueError that `work` raises.
    """
    told: Future[T] = Future()
    told.set_running_or_notify_cancel()  # from now on the thread may answer, also where nobody listens any more

    def run() -> None:
        try:
            told.set_result(work())
        except (OSError, ValueError) as error:
            told.set_exception(error)
        finally:
            if not told.done():
                told.set_exception(RuntimeError("the look-up broke: the log has its error"))

    threading.Thread(target=run, name="look-up", daemon=True).start()
    return await asyncio.wrap_future(told)
