"""A worker's part in the KV pool: prefixes in before a prompt is computed, new blocks out after, and their accounts.

With no node known it does nothing and costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress

from kvcache.blocks.manager import KVCacheManager
from kvcache.connector.direct_cost import DirectCost
from kvcache.connector.direct_fetch import DirectFetcher
from kvcache.connector.fetch_cost import FetchCost
from kvcache.connector.prefix_fetch import PrefixFetcher, PrefixStats
from kvcache.connector.write_back import BlockMemory, WriteBack
from kvcache.memory.device import DeviceKV
from kvcache.memory.host import HostKV
from kvcache.pool.client import PoolClient
from kvcache.pool.links import PoolLink
from serving.config import PoolConfig
from serving.engine.sequence import SequenceState

log = logging.getLogger(__name__)


class PoolConnector:
    """`start()` on a running event loop, `stop()` before it ends. `busy` says whether prompts wait to be computed."""

    def __init__(
        self,
        make_link: Callable[[str], PoolLink],
        config: PoolConfig,
        kv: KVCacheManager,
        device_kv: DeviceKV,
        lock: AbstractContextManager[object],
        *,
        busy: Callable[[], bool],
        host: HostKV | None = None,
    ):
        self.client = PoolClient(make_link, replication=config.replication, timeout=config.kvcache_timeout)
        self.pace = FetchCost()
        self.prefixes = PrefixFetcher(
            self.client,
            kv,
            device_kv,
            lock,
            self.pace,
            wait=config.kvcache_wait,
            always=config.kvcache_fetch == "always",
            host=host,
        )
        self.fetches = config.kvcache_fetch != "never"
        self.direct: DirectFetcher | None = None  # brings prefixes into leases
        if self.fetches and config.kvcache_direct != "never":
            self.direct = DirectFetcher(
                PrefixFetcher(self.client, kv, device_kv, lock, self.pace, wait=config.kvcache_wait),
                DirectCost(self.pace),
                always=config.kvcache_direct == "always",
            )
        self.storeback = WriteBack(
            self.client,
            BlockMemory.on_device(device_kv, kv.allocator),
            lock,
            host=_host_memory(kv, host),
            busy=lambda: busy() or self.prefixes.asking > 0,
            bandwidth=config.kvcache_bandwidth,
            outputs=config.kvcache_store == "all",
            stop_token=config.reasoning_token_id,
        )
        self.stores = config.kvcache_store != "none"
        self.prefixes.on_found = self.storeback.found
        kv.on_published = self._published
        kv.on_shortage = self.storeback.give_up
        self._task: asyncio.Task[None] | None = None

    def set_nodes(self, addresses: Iterable[str]) -> None:
        self.client.set_nodes(addresses)

    def start(self) -> None:
        self._task = asyncio.create_task(self.storeback.run(), name="store-back")
        self._task.add_done_callback(self._storing_ended)

    def _storing_ended(self, task: asyncio.Task[None]) -> None:
        """Should it ever break, nothing more is stored, and no block stays held for it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("storing blocks in the KV pool broke; this worker stores no more", exc_info=error)
            self.stores = False
            self.storeback.let_go()

    async def bring(self, seq: SequenceState, begun: Callable[[], None]) -> None:
        """Fill the sequence's leading blocks with what the pool has (kvcache.connector.prefix_fetch)."""
        if self.fetches and self.client.nodes:
            await self.prefixes.bring(seq, begun)

    def _published(self, seq: SequenceState, first: int, last: int) -> None:
        if self.stores and self.client.nodes:
            self.storeback.offer(seq, first, last)

    async def flush(self, seconds: float) -> None:
        """Wait until what was offered is stored, but no longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.storeback.wait_idle()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.storeback.let_go()
        await self.client.close()

    def table(self) -> list[int]:
        """Blocks held because they are on their way to the pool."""
        return self.storeback.table(self.storeback.device)

    def extents(self) -> list[int]:
        """Extents of host memory held for the same reason, once for each block in them."""
        host = self.storeback.host
        return self.storeback.table(host) if host is not None else []

    def counters(self) -> dict[str, float]:
        """Running totals for the worker's heartbeat."""
        client, prefixes = self.client.stats, self.prefixes.stats
        direct = self.direct.prefixes.stats if self.direct is not None else PrefixStats()
        return {
            "external_prefix_cache_queries": float(prefixes.queries),
            "external_prefix_cache_hits": float(prefixes.hits),
            "kvcache_stored_bytes": float(client.bytes_out),
            "kvcache_dropped_blocks": float(self.storeback.dropped),
            "kvcache_timeouts": float(prefixes.timeouts),
            "kvcache_not_worth": float(prefixes.not_worth),
            "kvcache_corrupt": float(client.corrupt + prefixes.malformed + direct.malformed),
            "kvcache_direct_tokens": float(direct.hits),
            "kvcache_direct_fallbacks": float(self.direct.fallbacks if self.direct is not None else 0),
            "kvcache_failures": float(sum(client.failures.values())),
            **{f"kvcache_fetched_bytes/{via}": float(size) for via, size in client.bytes_in.items()},
        }


def _host_memory(kv: KVCacheManager, host: HostKV | None) -> BlockMemory | None:
    """Blocks within extents, of sequences too long for the device: all may be stored while nobody else wants them."""
    if host is None:
        return None
    assert kv.host is not None
    blocks = host.blocks
    return BlockMemory(blocks, kv.host.extents, blocks.num_blocks, host.plan.extent_blocks, host.wait_moves)
