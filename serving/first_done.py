"""Waits for whichever of two futures is done first: what asyncio.wait does, without what that takes for any number."""

from __future__ import annotations

import asyncio
from typing import Any


async def first_done(one: asyncio.Future[Any], other: asyncio.Future[Any]) -> None:
    """Return once one of them is done, in whatever way. Neither is cancelled, nor is its exception looked at."""
    if one.done() or other.done():
        return
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not woken.done():
            woken.set_result(None)

    one.add_done_callback(wake)
    other.add_done_callback(wake)
    try:
        await woken
    finally:
        one.remove_done_callback(wake)
        other.remove_done_callback(wake)
