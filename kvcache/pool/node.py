"""A node of the KV pool: asynchronous calls to one block store, and events of the blocks that come and go there.

The store blocks, so its calls run in a few threads. It knows neither how nodes are reached nor who owns a key.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from typing import TypeVar

from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.block_index import Change
from kvcache.pool.links import BlockEntry, BlockSelection, PoolEvent
from kvcache.pool.store import BlockStore
from serving.errors import Draining, Overloaded, WorkerLost
from serving.messages import PoolReport, PoolStat

READERS = 4  # threads that look up and read
WRITERS = 2  # threads that store, so that reading never waits behind writing; two more do what operators ask for
MOST_PUTS = 16  # puts that may wait for a writer
EVENT_ROOM = 1 << 16  # keys a listener may be behind before it has to start anew

T = TypeVar("T")


class PoolNode:
    """Serves one store (PoolLink), and closes it when it stops. Create it on a running event loop."""

    def __init__(self, name: str, store: BlockStore, *, address: str = "", event_room: int = EVENT_ROOM):
        self.name = name
        self.store = store
        self.address = address  # where its gRPC is reached, for what it reports
        self.instance = uuid.uuid4().hex
        self.draining = False
        self.calls = 0  # in progress
        self.puts = 0
        self._event_room = event_room
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._reading = ThreadPoolExecutor(READERS, thread_name_prefix=f"{name}-read")
        self._writing = ThreadPoolExecutor(WRITERS, thread_name_prefix=f"{name}-write")
        self._administering = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-admin")
        self._verifying = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-verify")  # which may take an hour
        self._leaving = threading.Event()
        self._listeners: set[_Listener] = set()
        self._loop = asyncio.get_running_loop()
        store.listeners.append(self._changed)

    # ---- blocks ------------------------------------------------------------------------------------------------

    async def put(self, blocks: Sequence[PoolBlock]) -> int:
        if self.draining:
            raise Draining(f"pool node {self.name} is leaving and takes no more blocks")
        if self.puts >= MOST_PUTS:
            raise Overloaded(f"{self.puts} puts wait at pool node {self.name}", code="puts", retry_after=1.0)
        self.puts += 1
        try:
            return await self._run(self._writing, self.store.put, blocks)
        finally:
            self.puts -= 1

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> list[bool]:
        return await self._run(self._reading, self.store.lookup, keys, pin_seconds)

    async def get(self, keys: Sequence[bytes], first_part: int, last_part: int) -> AsyncGenerator[Slab, None]:
        with self._counted():
            slabs = _SlabReader(self.store.read(keys, first_part, last_part))
            ahead = self._start(self._reading, slabs.read)
            try:
                while (slab := await ahead) is not None:
                    ahead = self._start(self._reading, slabs.read)  # the next is read while this one travels
                    yield slab
            finally:
                ahead.cancel()
                if not self._closed:
                    self._reading.submit(slabs.close)

    async def evict(self, what: BlockSelection) -> int:
        return await self._run(self._administering, self.store.evict, what)

    async def entries(self, what: BlockSelection) -> AsyncGenerator[BlockEntry, None]:
        for entry in await self._run(self._administering, self.store.entries, what):
            yield entry

    async def verify(self) -> tuple[int, int]:
        """Ends early when the caller is gone, and with Draining when the node leaves."""
        gone = threading.Event()
        try:
            counts = await self._run(
                self._verifying, self.store.verify, lambda: gone.is_set() or self._leaving.is_set()
            )
        finally:
            gone.set()
        if self._leaving.is_set():
            raise Draining(f"pool node {self.name} is leaving: not everything has been read")
        return counts

    # ---- what there is, and what changes -----------------------------------------------------------------------

    async def report(self) -> PoolReport:
        """The heartbeat."""
        return PoolReport(stat=await self._run(self._reading, self._stat), address=self.address, draining=self.draining)

    def _stat(self) -> PoolStat:
        store = self.store
        return PoolStat(
            name=self.name,
            instance=self.instance,
            tiers=store.tier_stats(),
            namespaces=store.namespace_stats(),
            lookups=store.lookups,
            found=store.found,
            stored=store.stored,
            refused=store.refused,
            pinned=store.pinned,
            backlog=store.backlog,
        )

    async def events(self) -> AsyncGenerator[PoolEvent, None]:
        """Ends when the node closes. Changes made while the keys were listed are told twice, which does no harm."""
        numbers = count()
        while True:
            listener = _Listener(self._event_room)
            self._listeners.add(listener)
            try:
                change: Change | None = ("stored", tuple(await self._run(self._administering, self.store.keys)))
                while change is not None:
                    yield PoolEvent(kind=change[0], keys=change[1], sequence=next(numbers))
                    change = await listener.change()
            finally:
                self._listeners.discard(listener)
            if self._closed:
                return
            yield PoolEvent(kind="cleared", keys=(), sequence=next(numbers))

    def _changed(self, kind: str, keys: tuple[bytes, ...]) -> None:
        """The store calls from any thread."""
        self._loop.call_soon_threadsafe(self._tell, kind, keys)

    def _tell(self, kind: str, keys: tuple[bytes, ...]) -> None:
        for listener in self._listeners:
            listener.add(kind, keys)

    # ---- drain and stop -------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Take no more blocks; wait for calls in progress, for so long at most."""
        self.draining = True
        self._leaving.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def close(self) -> None:
        """A link is closed by its client; the node itself goes on."""

    async def stop(self) -> None:
        """End all streams and threads, then close the store: what waits for the disk is written."""
        if self._closed:
            return
        self._closed = True
        self._leaving.set()
        for listener in self._listeners:
            listener.end()
        for threads in (self._reading, self._writing, self._administering, self._verifying):
            await asyncio.to_thread(threads.shutdown)
        await asyncio.to_thread(self.store.close)
        self.store.listeners.remove(self._changed)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.calls -= 1
            if self.calls == 0:
                self._idle.set()

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[..., T], *given: object) -> T:
        with self._counted():
            return await self._start(threads, work, *given)

    def _start(self, threads: ThreadPoolExecutor, work: Callable[..., T], *given: object) -> asyncio.Future[T]:
        if self._closed:
            raise WorkerLost(f"pool node {self.name} is closed")
        return self._loop.run_in_executor(threads, work, *given)


class _SlabReader:
    """One read of the store, a slab at a time. It may be closed while a thread still reads."""

    def __init__(self, slabs: Generator[Slab, None, None]):
        self._slabs = slabs
        self._lock = threading.Lock()

    def read(self) -> Slab | None:
        with self._lock:
            return next(self._slabs, None)

    def close(self) -> None:
        """Close the store's iterator, in a thread that reads."""
        with self._lock:
            self._slabs.close()


class _Listener:
    """The changes one stream of events has not sent yet, of `room` keys at most."""

    def __init__(self, room: int):
        self._room = room
        self._changes: asyncio.Queue[Change | None] = asyncio.Queue()

    def add(self, kind: str, keys: tuple[bytes, ...]) -> None:
        self._room -= len(keys)
        if self._room < 0:
            self.end()
        else:
            self._changes.put_nowait((kind, keys))

    def end(self) -> None:
        """Too many came to keep, or the node closes."""
        while not self._changes.empty():
            self._changes.get_nowait()
        self._changes.put_nowait(None)

    async def change(self) -> Change | None:
        """The next change; None at the end."""
        change = await self._changes.get()
        if change is not None:
            self._room += len(change[1])
        return change
