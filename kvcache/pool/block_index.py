"""Every block that a node holds in any tier, counted once, and the changes not yet told to listeners.

Pure. Not thread-safe; the store's lock guards it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from kvcache.pool.eviction import BlockRecord
from kvcache.pool.links import BlockSelection

Change = tuple[str, tuple[bytes, ...]]
"""("stored" | "evicted", keys)"""


@dataclass(slots=True)
class NamespaceTotal:
    """What a namespace holds."""

    bytes: int = 0
    blocks: int = 0


class BlockIndex:
    """Blocks by key; `totals` by namespace, those that hold nothing left out."""

    def __init__(self) -> None:
        self.totals: dict[str, NamespaceTotal] = {}
        self._records: dict[bytes, BlockRecord] = {}
        self._changes: list[tuple[str, bytes]] = []

    def add(self, record: BlockRecord) -> None:
        assert record.key not in self._records, "a block is indexed once"
        self._records[record.key] = record
        total = self.totals.setdefault(record.namespace, NamespaceTotal())
        total.bytes += record.size
        total.blocks += 1
        self._changes.append(("stored", record.key))

    def remove(self, key: bytes) -> None:
        record = self._records.pop(key)
        total = self.totals[record.namespace]
        total.bytes -= record.size
        total.blocks -= 1
        if not total.blocks:
            del self.totals[record.namespace]
        self._changes.append(("evicted", key))

    def get(self, key: bytes) -> BlockRecord | None:
        return self._records.get(key)

    def keys(self) -> list[bytes]:
        return list(self._records)

    def select(self, what: BlockSelection) -> list[BlockRecord]:
        """The blocks meant, in the order of their keys as given, else in the order they came."""
        chosen: Iterable[BlockRecord] = self._records.values()
        if what.keys:
            chosen = [self._records[key] for key in dict.fromkeys(what.keys) if key in self._records]
        return [record for record in chosen if what.namespace is None or record.namespace == what.namespace]

    def take_changes(self) -> list[Change]:
        """What was added and removed since the last call, in that order."""
        changes, self._changes = self._changes, []
        return [(kind, tuple(key for _, key in run)) for kind, run in groupby(changes, itemgetter(0))]

    def __contains__(self, key: object) -> bool:
        return key in self._records
