"""KV memory has pages before requests write to it: the kernel finds and clears some while a new worker waits for work.

Otherwise the first requests wait for that. It is told whether anybody waits, and knows nothing of blocks: that their
first ones are taken first, and lie at the beginning of each plane, is all it goes by.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

from torch import Tensor

from serving.host_memory import huge_page, populate
from serving.unused_memory import unused_memory

log = logging.getLogger(__name__)

MOST = 512 << 20  # bytes: more than the first requests write to, where clearing it is a large part of their time
PARTS_OF_UNUSED = 8  # of what memory is left meanwhile one such part: beside others that do the same most stays
LARGEST = 32 << 20  # bytes of a page: a request waits for one at most, and larger ones take a second
PAUSE = 1.0  # seconds after a start, and after requests were seen, before it goes on


def in_turn(planes: Sequence[range], page: int, most: int) -> Iterator[range]:
    """The addresses to populate: the first page of each plane, then the second of each, as long as they are `most`.

    Each lies within a page of so many bytes, and has all of the plane that does. A page counts once, and whole.
    """
    taken = set[int]()
    for turn in count():
        starts = [plane.start // page * page + turn * page for plane in planes]
        if all(start >= plane.stop for start, plane in zip(starts, planes, strict=True)):
            return
        for start, plane in zip(starts, planes, strict=True):
            if start >= plane.stop:
                continue
            taken.add(start)
            if len(taken) * page > most:
                return
            yield range(max(start, plane.start), min(start + page, plane.stop))


class EarlyPages:
    """Pages for `planes`, which lie in host memory. `idle` says that nobody waits for the worker just now."""

    def __init__(
        self,
        planes: Sequence[Tensor],
        idle: Callable[[], bool],
        *,
        touch: Callable[[int, int], None] = populate,
        unused: Callable[[], int] = unused_memory,
    ):
        self.planes = list(planes)  # held until the last page is there
        self.idle = idle
        self.bytes = 0  # that have pages by now
        self._touch = touch
        self._unused = unused

    async def run(self) -> None:
        """Populate a page at a time, in a thread, with as long a pause after each, until there are enough.

        A request waits for one of them at most. It ends early where memory is short or the kernel cannot.
        """
        page = huge_page()
        if page > LARGEST:
            log.info("KV gets its pages as it is written: huge pages are %d MiB here", page >> 20)
            return
        planes = [range(plane.data_ptr(), plane.data_ptr() + plane.nbytes) for plane in self.planes]
        began, self.bytes = time.monotonic(), 0
        await asyncio.sleep(PAUSE)
        for piece in in_turn(planes, page, MOST):
            await self._until_idle()
            seconds = await asyncio.to_thread(partial(self._populate, piece, page))
            if seconds is None:
                break
            await asyncio.sleep(seconds)
        log.info("%.0f MiB of KV have pages, %.1f s after the start", self.bytes / 2**20, time.monotonic() - began)

    async def _until_idle(self) -> None:
        while True:
            if self.idle():
                return
            await asyncio.sleep(PAUSE)

    def _populate(self, piece: range, page: int) -> float | None:
        """Seconds that it took; None: there is to be no more."""
        began = time.monotonic()
        if self.bytes + page > self._unused() // PARTS_OF_UNUSED:
            return None
        try:
            self._touch(piece.start, len(piece))
        except OSError as error:
            log.info("KV gets its pages as it is written: %s", error)
            return None
        self.bytes += len(piece)
        return time.monotonic() - began
