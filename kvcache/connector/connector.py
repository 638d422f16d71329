"""A worker's part in the KV pool: prefixes in before a prompt is computed, new blocks out after, and their accounts.

With no node known it does nothing and costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadManager
from kvcache.connector.direct_fetch import DirectFetcher
from kvcache.connector.fetch_cost import DirectCost, FetchCost
from kvcache.connector.prefix_fetch import PrefixFetcher, PrefixStats
from kvcache.connector.write_back import BlockMemory, WriteBack
from kvcache.memory.locations import KVLocations
from kvcache.pool.client import PoolClient
from kvcache.pool.links import PoolLink
from serving.background import BackgroundTasks
from serving.config import PoolConfig
from serving.engine.sequence import SequenceState


class PoolConnector:
    """`start()` on a running event loop, `stop()` before it ends. `busy` is True while prompts wait to be computed.

    `freed` is called when blocks may have come free that somebody waits for, on any thread, with the lock or without
    it. `write_back` is made first (`write_back_to`), for the KV manager to offer blocks to.
    """

    def __init__(
        self,
        client: PoolClient,
        write_back: WriteBack,
        config: PoolConfig,
        kv: KVCacheManager,
        locations: KVLocations,
        cost: FetchCost,
        *,
        busy: Callable[[], bool],
        freed: Callable[[], None],
    ):
        self.client = client
        self.write_back = write_back
        wait, always = config.kvcache_wait, config.kvcache_fetch == "always"
        self.prefixes = PrefixFetcher(
            *(client, kv, locations, cost), wait=wait, always=always, found=write_back.found, freed=freed
        )
        self.fetches = config.kvcache_fetch != "never"
        self.direct: DirectFetcher | None = None  # brings prefixes into leases
        if self.fetches and config.kvcache_direct != "never":
            always = config.kvcache_direct == "always"
            direct_cost = DirectCost(cost)
            self.direct = DirectFetcher(client, kv, locations, direct_cost, wait=wait, always=always, freed=freed)
        self.busy = busy
        self.freed = freed
        self._background = BackgroundTasks()

    def set_nodes(self, addresses: Iterable[str]) -> None:
        self.client.set_nodes(addresses)

    def start(self, restarts: Counter[str] | None = None) -> None:
        """Store from now on. Should that break it begins again, which is counted in `restarts`."""
        self._background = BackgroundTasks(restarts)
        self._background.start("write-back", lambda: self.write_back.run(self._gives_way, self.freed))

    def _gives_way(self) -> bool:
        return self.busy() or self.prefixes.asking > 0

    async def bring(self, seq: SequenceState, begun: Callable[[], None]) -> None:
        """Fill the sequence's leading blocks with what the pool has (kvcache.connector.prefix_fetch)."""
        if self.fetches and self.client.nodes:
            await self.prefixes.bring(seq, begun)

    async def flush(self, seconds: float) -> None:
        """Wait until what was offered is stored, but no longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.write_back.wait_idle()

    async def stop(self) -> None:
        await self._background.stop()
        self.write_back.close()
        await self.client.close()

    def table(self) -> list[int]:
        """Blocks held because they are on their way to the pool."""
        return self.write_back.table(self.write_back.device)

    def extents(self) -> list[int]:
        """Extents of host memory held for the same reason, once for each block in them."""
        host = self.write_back.host
        return self.write_back.table(host) if host is not None else []

    def counters(self) -> dict[str, float]:
        """Running totals for the worker's heartbeat."""
        client, prefixes = self.client.stats, self.prefixes.stats
        direct = self.direct.stats if self.direct is not None else PrefixStats()
        return {
            "external_prefix_cache_queries": float(prefixes.queries),
            "external_prefix_cache_hits": float(prefixes.hits),
            "kvcache_stored_bytes": float(client.bytes_out),
            "kvcache_dropped_blocks": float(self.write_back.dropped),
            "kvcache_timeouts": float(prefixes.timeouts),
            "kvcache_not_worth": float(prefixes.not_worth),
            "kvcache_corrupt": float(client.corrupt + prefixes.malformed + direct.malformed),
            "kvcache_direct_tokens": float(direct.hits),
            "kvcache_direct_fallbacks": float(self.direct.fallbacks if self.direct is not None else 0),
            "kvcache_failures": float(sum(client.failures.values())),
            **{f"kvcache_fetched_bytes/{via}": float(size) for via, size in client.bytes_in.items()},
        }


def pool_client(make_link: Callable[[str], PoolLink], config: PoolConfig) -> PoolClient:
    """A client that knows no nodes yet."""
    return PoolClient(make_link, replication=config.replication, timeout=config.kvcache_timeout)


def write_back_to(
    client: PoolClient,
    config: PoolConfig,
    allocator: BlockAllocator,
    offload: OffloadManager | None,
    locations: KVLocations,
) -> WriteBack:
    """Stores blocks of the device and, of sequences too long for it, blocks within the host's extents."""
    memory = None
    if locations.host is not None:
        assert offload is not None
        host, blocks = locations.host, locations.host.blocks
        memory = BlockMemory(blocks, offload.extents, blocks.num_blocks, host.plan.extent_blocks, host.wait_moves)
    return WriteBack(
        client,
        BlockMemory.on_device(locations.device, allocator),
        locations.lock,
        host=memory,
        bandwidth=config.kvcache_bandwidth,
        stores=config.kvcache_store != "none",
        outputs=config.kvcache_store == "all",
        stop_token=config.reasoning_token_id,
    )
