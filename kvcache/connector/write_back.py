"""Stores a worker's newly computed blocks in the KV pool, in the background.

A block is held until it has been copied, so that it is not overwritten; how many may be held is bounded, and further
ones are dropped. Copying gives way to prompts that wait, and keeps to a bandwidth.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvcache.blocks.allocator import BlockAllocator
from kvcache.connector.block_io import part_bytes, read_blocks
from kvcache.memory.device import DeviceKV
from kvcache.pool.block import PoolBlock, namespace_of
from serving.engine.sequence import SequenceState

BATCH_BYTES = 2 << 20  # copied and sent at a time: a prompt that comes meanwhile shares the cores with no more
GIVE_WAY_SECONDS = 0.02  # between looks at whether prompts still wait
PATIENCE_SECONDS = 1.0  # of giving way in a row; from then on blocks leave in turn with the prompts
REST = 9  # then it rests so many times as long as it copied
HELD_SHARE = 4  # one in so many blocks of the device may be held for being stored; routers count on the others
KNOWN_KEYS = 200_000


class PoolWriter(Protocol):
    """What is asked of the pool (kvcache.pool.client.PoolClient)."""

    @property
    def nodes(self) -> Sequence[str]:
        """Its nodes' addresses: without any, blocks are not offered."""
        ...

    async def put(self, blocks: Sequence[PoolBlock]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class BlockMemory:
    """Blocks that may be offered: their bytes in `device_kv`, their holders in `owners`, `each` of them at a time."""

    device_kv: DeviceKV
    owners: BlockAllocator
    most: int  # blocks that may be held for being stored
    each: int = 1  # more than one on the host, where extents are held
    settle: Callable[[], None] = lambda: None  # called before bytes are read, on any thread

    @staticmethod
    def on_device(device_kv: DeviceKV, owners: BlockAllocator) -> BlockMemory:
        return BlockMemory(device_kv, owners, max(1, device_kv.num_blocks // HELD_SHARE))

    def hold(self, block: int) -> None:
        self.owners.acquire([block // self.each])

    def release(self, block: int) -> None:
        self.owners.release([block // self.each])


@dataclass(frozen=True, slots=True)
class BlockOffer:
    key: bytes
    memory: BlockMemory
    block: int
    namespace: str
    kv_dtype: str  # what the block holds

    @property
    def batch(self) -> tuple[BlockMemory, str, str]:
        """What the blocks of one batch have in common."""
        return self.memory, self.namespace, self.kv_dtype


class WriteBack:
    """See the module. `offer` in the engine's thread (kvcache.blocks.manager.BlockListener), `run` on the event loop.

    `bandwidth` is bytes a second, 0 for no bound. With `stores` off it takes no block, with `outputs` off only those of
    prompts, and with `stop_token` none from that token of an output on (where reasoning begins).

    Of sequences too long for the `device`, what lies on the `host` is offered.
    """

    def __init__(
        self,
        writer: PoolWriter,
        device: BlockMemory,
        lock: AbstractContextManager[object],
        *,
        host: BlockMemory | None = None,
        bandwidth: int = 0,
        stores: bool = True,
        outputs: bool = True,
        stop_token: int | None = None,
    ):
        self.writer = writer
        self.device = device
        self.host = host
        self.lock = lock
        self.bandwidth = bandwidth
        self.stores = stores
        self.outputs = outputs
        self.stop_token = stop_token
        self.dropped = 0  # blocks not offered because too many were on their way
        self._waiting: deque[BlockOffer] = deque()
        self._sending: list[BlockOffer] = []
        self._held: Counter[BlockMemory] = Counter()  # how many of these two are of which
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys the pool has, or has been offered
        self._gave_way = 0.0  # seconds in a row
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- in the engine's thread, under its lock ----------------------------------------------------------------

    def offer(self, seq: SequenceState, first: int, last: int) -> None:
        """The blocks first..last (exclusive) of the sequence have just become full."""
        if not self.stores or not self.writer.nodes:
            return
        if not seq.incoming.prefilled_here:  # the prefill worker offers what it has computed
            first = max(first, seq.start // self.device.device_kv.block_size)
        last = min(last, self._storable(seq) // self.device.device_kv.block_size)
        fresh = [index for index in range(first, last) if seq.prefix.keys[index] not in self._known]
        if not fresh:
            return
        memory = self.device if seq.offload is None else self.host
        assert memory is not None
        room = memory.most - self._held[memory]
        self.dropped += max(0, len(fresh) - room)
        namespace = namespace_of(seq.request.tenant)
        for index in fresh[: max(0, room)]:
            block = seq.block(index)
            memory.hold(block)
            self._held[memory] += 1
            self._waiting.append(BlockOffer(seq.prefix.keys[index], memory, block, namespace, seq.kv_dtype))
            self._note(seq.prefix.keys[index])
        self._loop.call_soon_threadsafe(self._begin)

    def _storable(self, seq: SequenceState) -> int:
        """Up to which token the sequence's KV may be stored."""
        if not self.outputs:
            return seq.prompt_len
        if self.stop_token is not None and self.stop_token in seq.tokens[seq.prompt_len :]:
            return seq.tokens.index(self.stop_token, seq.prompt_len)
        return len(seq.tokens)

    def found(self, keys: Iterable[bytes], here: bool) -> None:
        """The pool has these, and they need not be offered; or it lacks them, and they may be offered again."""
        for key in keys:
            if here:
                self._note(key)
            else:
                self._known.pop(key, None)

    def _note(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)

    def give_up(self) -> None:
        """Blocks have run out: drop what has not been copied yet."""
        self.dropped += len(self._waiting)
        for offer in self._waiting:
            self._known.pop(offer.key, None)
        self._release(self._waiting)
        self._waiting.clear()

    def table(self, memory: BlockMemory) -> list[int]:
        """What is held of a memory's owners, once for each block, for the audit."""
        offers = (*self._waiting, *self._sending)
        return [offer.block // memory.each for offer in offers if offer.memory is memory]

    # ---- on the event loop -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._idle.clear()
        self._news.set()

    async def wait_idle(self) -> None:
        """Wait until everything offered so far has been sent, or has failed to be."""
        await asyncio.sleep(0)  # what the engine's thread has just offered is told first
        await self._idle.wait()

    async def run(self, busy: Callable[[], bool], freed: Callable[[], None] = lambda: None) -> None:
        """Store what is offered, until cancelled. `busy` is True while prompts wait to be computed.

        `freed` is called, without the lock, when blocks may have come free that somebody waits for.

        A run that broke may be followed by another: it lets go of what the last one was sending.
        """
        self._sent(freed)
        if self._waiting:
            self._news.set()
        else:
            self._idle.set()
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._give_way(busy)
                await self._send(freed)
            self._idle.set()

    def close(self) -> None:
        """Release what is held and take nothing more, once `run` has ended."""
        self.stores = False
        with self.lock:
            self._release([*self._waiting, *self._sending])
            self._waiting.clear()
            self._sending = []

    async def _give_way(self, busy: Callable[[], bool]) -> None:
        """Wait while prompts wait, at most PATIENCE_SECONDS in a row."""
        while busy() and self._gave_way < PATIENCE_SECONDS:
            await asyncio.sleep(GIVE_WAY_SECONDS)
            self._gave_way += GIVE_WAY_SECONDS
        if not busy():
            self._gave_way = 0.0

    async def _send(self, freed: Callable[[], None]) -> None:
        """Copy and send the next few blocks, then rest: for the bandwidth's sake, and that of prompts that wait."""
        began = self._loop.time()
        with self.lock:
            self._sending = self._next()
        if not self._sending:
            return
        copying = asyncio.create_task(asyncio.to_thread(self._copy, self._sending))
        try:
            blocks = await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait([copying])  # it reads blocks that are released next
            raise
        self._sent(freed)
        await self.writer.put(blocks)
        took = self._loop.time() - began
        size = sum(len(block.payload) for block in blocks)
        slow = size / self.bandwidth - took if self.bandwidth else 0.0
        turn = REST * took if self._gave_way else 0.0
        await asyncio.sleep(max(0.0, slow, turn))

    def _sent(self, freed: Callable[[], None]) -> None:
        """What was being copied has been, or is not any more."""
        with self.lock:
            self._release(self._sending)
            self._sending = []
        freed()

    def _next(self) -> list[BlockOffer]:
        """The next blocks of one namespace, memory and kind, about BATCH_BYTES in all."""
        count = max(1, BATCH_BYTES // sum(part_bytes(self.device.device_kv)))
        batch: list[BlockOffer] = []
        while self._waiting and len(batch) < count and self._waiting[0].batch == (batch or self._waiting)[0].batch:
            batch.append(self._waiting.popleft())
        return batch

    def _copy(self, batch: Sequence[BlockOffer]) -> list[PoolBlock]:
        first, blocks, keys = batch[0], [offer.block for offer in batch], [offer.key for offer in batch]
        first.memory.settle()
        return read_blocks(first.memory.device_kv.kept_as(first.kv_dtype), blocks, keys, first.namespace)

    def _release(self, offers: Iterable[BlockOffer]) -> None:
        for offer in offers:
            offer.memory.release(offer.block)
            self._held[offer.memory] -= 1
