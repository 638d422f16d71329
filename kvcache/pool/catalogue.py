"""Every block that a node holds in any tier, counted once, and the changes its listeners have yet to hear of.

Pure. Not thread-safe; the store's lock guards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcache.pool.links import BlockSelection
from kvcache.pool.shelf import Held

Change = tuple[str, tuple[bytes, ...]]
"""("stored" | "evicted", keys)"""


@dataclass(slots=True)
class Total:
    """What a namespace holds."""

    bytes: int = 0
    blocks: int = 0


class Catalogue:
    """Blocks by key; `totals` by namespace, those that hold nothing left out."""

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {}
        self._held: dict[bytes, Held] = {}
        self._changes: list[tuple[str, list[bytes]]] = []

    def add(self, held: Held, *, tell: bool = True) -> None:
        assert held.key not in self._held, "a block is catalogued once"
        self._held[held.key] = held
        total = self.totals.setdefault(held.namespace, Total())
        total.bytes += held.size
        total.blocks += 1
        if tell:
            self._note("stored", held.key)

    def remove(self, key: bytes, *, tell: bool = True) -> None:
        held = self._held.pop(key)
        total = self.totals[held.namespace]
        total.bytes -= held.size
        total.blocks -= 1
        if not total.blocks:
            del self.totals[held.namespace]
        if tell:
            self._note("evicted", key)

    def get(self, key: bytes) -> Held | None:
        return self._held.get(key)

    def keys(self) -> list[bytes]:
        return list(self._held)

    def select(self, what: BlockSelection) -> list[Held]:
        """The blocks meant, in the order of their keys as given, else in the order they came."""
        chosen: Iterable[Held] = self._held.values()
        if what.keys:
            chosen = [self._held[key] for key in dict.fromkeys(what.keys) if key in self._held]
        return [held for held in chosen if what.namespace is None or held.namespace == what.namespace]

    def take_changes(self) -> list[Change]:
        """What was added and removed since the last call, in that order."""
        changes, self._changes = self._changes, []
        return [(kind, tuple(keys)) for kind, keys in changes]

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def _note(self, kind: str, key: bytes) -> None:
        if not self._changes or self._changes[-1][0] != kind:
            self._changes.append((kind, []))
        self._changes[-1][1].append(key)
