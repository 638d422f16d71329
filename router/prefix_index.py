"""Which worker holds which KV blocks, as far as the router knows: from the workers' KV events and its own placements.

Bounded by bytes: the keys used longest ago are forgotten first. It is an estimate: a wrong entry costs time, never
text. Pure.

    key (8 bytes of a block's hash) ──► bit mask of workers, one bit a worker
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from serving.messages import KVEvents

KEY_BYTES = 8  # of each block's 32-byte hash: at a million blocks two keys meet with a chance of 3 in a hundred million
ENTRY_BYTES = 176  # of a key, its mask, and their place in the dict, at the most (tests measure it)
MOST_NUMBERS = 512  # workers ever seen, restarts included, until all is forgotten and learned anew


class PrefixIndex:
    """`capacity` is in bytes. Workers are known by instance."""

    def __init__(self, capacity: int):
        self.most_keys = max(1, capacity // (ENTRY_BYTES + MOST_NUMBERS // 8))
        self._holders: dict[bytes, int] = {}  # least recently used first
        self._bits: dict[str, int] = {}  # a worker's bit; one that is gone has none, and its entries mean nothing
        self._next: dict[str, int] = {}  # the first KV event of a worker that is not in here yet
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._holders)

    def since(self, instance: str) -> int:
        """The sequence number of the first KV event to ask this worker for; 0 asks for all it holds."""
        return self._next.get(instance, 0)

    def apply(self, instance: str, events: KVEvents) -> None:
        """Take a worker's events in. A gap before them is closed by the snapshot that is asked for next."""
        if events.reset:
            self._bits.pop(instance, None)  # a new bit: what the old one says is forgotten
        elif events.first != self.since(instance):
            self._next.pop(instance, None)
            return
        self.stored(instance, events.stored)
        self._removed(instance, events.removed)
        self._next[instance] = events.next

    def stored(self, instance: str, keys: Iterable[bytes]) -> None:
        """The worker holds these blocks, or will as soon as it has computed what was placed on it."""
        bit, holders = self._bit(instance), self._holders
        for key in keys:
            short = key[:KEY_BYTES]
            holders[short] = holders.pop(short, 0) | bit
        while len(holders) > self.most_keys:
            del holders[next(iter(holders))]

    def _removed(self, instance: str, keys: Iterable[bytes]) -> None:
        bit, holders = self._bit(instance), self._holders
        for key in keys:
            short = key[:KEY_BYTES]
            mask = holders.get(short, 0) & ~bit
            if mask:
                holders[short] = mask
            else:
                holders.pop(short, None)

    def retain(self, instances: Collection[str]) -> None:
        """All other workers are gone."""
        for gone in [known for known in self._bits.keys() | self._next.keys() if known not in instances]:
            self._bits.pop(gone, None)
            self._next.pop(gone, None)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of the chain `keys` each worker holds; workers that hold none are left out."""
        found: dict[int, int] = {}
        mask = sum(self._bits.values())
        for number, key in enumerate(keys):
            here = mask & self._holders.get(key[:KEY_BYTES], 0)
            if here != mask:
                _note(found, mask & ~here, number)
                mask = here
            if not mask:
                break
        _note(found, mask, len(keys))
        return {instance: blocks for instance, bit in self._bits.items() if (blocks := found.get(bit, 0))}

    def _bit(self, instance: str) -> int:
        bit = self._bits.get(instance)
        if bit is not None:
            return bit
        if self._numbers == MOST_NUMBERS:  # masks would grow for ever: begin anew, and ask every worker for a snapshot
            self._holders.clear()
            self._bits.clear()
            self._next.clear()
            self._numbers = 0
        bit = self._bits[instance] = 1 << self._numbers
        self._numbers += 1
        return bit


def _note(found: dict[int, int], mask: int, blocks: int) -> None:
    """Every worker in the mask holds so many leading blocks."""
    while mask:
        bit = mask & -mask
        found[bit] = blocks
        mask ^= bit
