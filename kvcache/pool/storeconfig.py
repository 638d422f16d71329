"""How big a node's tiers are, what they keep for which namespace, and when blocks go to disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvcache.pool.eviction import QuotaLru


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Sizes in bytes, blocks' headers included. A quota is what a namespace keeps in the lowest tier.

    `write`: "through" writes every block to disk at once, "back" when RAM has no more room for it. `backlog` is how
    many blocks may wait for that, in memory and on top of `ram_bytes`. Raises ValueError.
    """

    ram_bytes: int = 0
    disk_path: Path | None = None
    disk_bytes: int = 0
    write: Literal["through", "back"] = "through"
    quotas: Mapping[str, int] = field(default_factory=dict)
    default_quota: int = 0
    backlog: int = 256

    def __post_init__(self) -> None:
        if min(self.ram_bytes, self.disk_bytes, self.default_quota, *self.quotas.values()) < 0:
            raise ValueError("sizes and quotas of a pool node must not be negative")
        if (self.disk_path is None) != (self.disk_bytes == 0):
            raise ValueError("a pool node's disk needs both a folder and a size")
        if not self.lowest_bytes:
            raise ValueError("a pool node needs RAM or a disk")
        if self.write not in ("through", "back"):
            raise ValueError(f"a pool node writes 'through' or 'back', not {self.write!r}")
        if self.backlog < 1:
            raise ValueError("a pool node's backlog must be at least one block")
        if sum(self.quotas.values()) > self.lowest_bytes:
            raise ValueError(
                f"quotas add up to {sum(self.quotas.values())} bytes, more than the {self.lowest_bytes} of the node's "
                "lowest tier"
            )

    @property
    def lowest_bytes(self) -> int:
        """Capacity of the lowest tier, which decides whether a block is lost."""
        return self.disk_bytes or self.ram_bytes

    def lru(self, capacity: int) -> QuotaLru[Any]:
        """An empty tier. RAM above a bigger disk keeps its share of each quota, the disk all of it."""
        share = min(1.0, capacity / self.lowest_bytes)
        return QuotaLru(capacity, lambda namespace: int(self.quotas.get(namespace, self.default_quota) * share))
