"""The interface of a pool node, in process and over gRPC alike, and what it reports.

Calls raise errors of `serving.errors`: WorkerLost for a broken connection, Overloaded for a full backlog.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.pool.block import PoolBlock, Slab
from serving.messages import PoolReport, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolEvent:
    """Keys that came or went, for routers that place by prefix. `sequence` has no gaps while a stream lasts."""

    kind: str  # "stored", "evicted", or "cleared" when the listener was too slow and must start anew
    keys: tuple[bytes, ...]
    sequence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockEntry:
    """One block as `ls` shows it."""

    key: bytes
    namespace: str
    bytes: int
    tiers: tuple[Tier, ...]
    age_seconds: float
    pinned: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSelection:
    """Which blocks an eviction or a listing means: all of them, a namespace's, or just these keys."""

    namespace: str | None = None
    keys: tuple[bytes, ...] = ()


class PoolLink(Protocol):
    """One node of the pool (kvcache.pool.node.PoolNode, kvcache.pool.remote.RemoteNode)."""

    async def put(self, blocks: Sequence[PoolBlock]) -> int:
        """Store blocks whose digests hold; how many were taken. Raises Overloaded when too much waits."""
        ...

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> list[bool]:
        """Which of the keys are here, in any tier; those found are kept at least so long."""
        ...

    def get(self, keys: Sequence[bytes], first_part: int, last_part: int) -> AsyncGenerator[Slab, None]:
        """Parts first_part..last_part (exclusive; 0 as last_part: all) of the blocks, part by part.

        A key that is not here, or found corrupt, is left out of every slab from then on.
        """
        ...

    async def evict(self, what: BlockSelection) -> int:
        """Drop these blocks from every tier, pinned ones excepted; how many."""
        ...

    async def report(self) -> PoolReport: ...

    def entries(self, what: BlockSelection) -> AsyncGenerator[BlockEntry, None]: ...

    async def verify(self) -> tuple[int, int]:
        """Read everything in every tier: (blocks read, blocks found corrupt and dropped)."""
        ...

    def events(self) -> AsyncGenerator[PoolEvent, None]:
        """First one "stored" event with every key, then changes as they happen."""
        ...

    async def close(self) -> None: ...
