"""One get over several nodes: each sends its share, and what one fails to send is asked of the next owner of the key.

It knows owners only as addresses to stream from. No part leaves here whose digest has not been computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from kvcache.pool.block import DIGEST_BYTES, Slab, SlabPart, part_digest

WINDOW = 4  # slabs that may wait for the reader: bounds memory, keeps the wire busy

Stream = Callable[[str, Sequence[bytes], int, int], AsyncGenerator[Slab, None]]
"""Slabs of these keys and parts (first, last) from the node at an address. It ends early when the node fails."""


class Fetch:
    """Parts `first` to `last` (exclusive) of blocks of `parts` parts; `owners` may have each key, best first.

    Of every key the parts come in order and without a gap, perhaps from several nodes: the key is whole at the end, or
    left out from some part on.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        owners: Iterable[Sequence[str]],
        first: int,
        last: int,
        parts: int,
        stream: Stream,
    ):
        self.keys = keys
        self.last = last
        self.parts = parts
        self.stream = stream
        self.corrupt = 0  # parts that do not match their digests
        self._untried = [list(reversed(addresses)) for addresses in owners]
        self._next = [first] * len(keys)  # the part each key goes on from
        self._room = asyncio.Semaphore(WINDOW)
        self._ready: asyncio.Queue[Slab | asyncio.Task[None]] = asyncio.Queue()
        self._pumps: set[asyncio.Task[None]] = set()

    async def slabs(self) -> AsyncGenerator[Slab, None]:
        """Good parts as they come, with indices into `keys`."""
        try:
            self._ask_for(range(len(self.keys)))
            while self._pumps:
                item = await self._ready.get()
                if isinstance(item, Slab):
                    self._room.release()
                    yield item
                else:
                    self._pumps.discard(item)
                    item.result()
        finally:
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def _ask_for(self, indices: Iterable[int]) -> None:
        """Ask for what these keys still lack, each at the next node that may have it."""
        shares: dict[tuple[str, int], list[int]] = {}
        for index in indices:
            if self._next[index] < self.last and self._untried[index]:
                shares.setdefault((self._untried[index].pop(), self._next[index]), []).append(index)
        for (address, first), share in shares.items():
            pump = asyncio.create_task(self._pump(address, share, first), name=f"get-{address}")
            self._pumps.add(pump)
            pump.add_done_callback(self._ready.put_nowait)

    async def _pump(self, address: str, indices: list[int], first: int) -> None:
        """All that one node sends of these keys."""
        keys = [self.keys[index] for index in indices]
        async with aclosing(self.stream(address, keys, first, self.last)) as slabs:
            async for slab in slabs:
                good, corrupt = await asyncio.to_thread(self._check, slab, indices)
                self.corrupt += corrupt
                if good is not None:
                    await self._room.acquire()
                    self._ready.put_nowait(good)
        self._ask_for(indices)

    def _check(self, slab: Slab, indices: list[int]) -> tuple[Slab | None, int]:
        """The good parts, by indices into `keys`, and how many were corrupt. A key with a bad part is left alone.

        Runs in a thread; until its pump ends, no other pump reads these keys.
        """
        if not is_whole(slab, len(indices)):
            return None, max(1, len(slab.indices))
        good: list[SlabPart] = []
        corrupt = 0
        for place, digest, data in slab.parts():
            index = indices[place]
            if self._next[index] != slab.part:
                continue  # asked of another node from here on
            if part_digest(self.keys[index], slab.part, self.parts, data) != digest:
                corrupt += 1
                continue
            self._next[index] += 1
            good.append((index, digest, data))
        if not good:
            return None, corrupt
        if len(good) < len(slab.indices):
            return Slab.of(slab.part, good, slab.via), corrupt
        return replace(slab, indices=tuple(index for index, _, _ in good)), corrupt  # no bytes are copied


def is_whole(slab: Slab, keys: int) -> bool:
    """True if its fields agree with one another and name indices below `keys`. Call it before slicing by them."""
    return (
        len(slab.sizes) == len(slab.indices)
        and len(slab.digests) == DIGEST_BYTES * len(slab.indices)
        and sum(slab.sizes) == len(slab.payload)
        and all(size >= 0 for size in slab.sizes)
        and all(0 <= index < keys for index in slab.indices)
    )
