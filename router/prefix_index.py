"""Which worker holds which KV blocks, as far as the router knows: from the workers' KV events and its own placements.

Bounded by bytes: the keys used longest ago are forgotten first. It is an estimate: a wrong entry costs time, never
text. Pure.

    key (8 bytes of a block's hash) ──► bit mask of workers, one bit a worker
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from serving.messages import KVEvents

KEY_BYTES = 8  # of each block's 32-byte hash: at a million blocks two keys meet with a chance of 3 in a hundred million
ENTRY_BYTES = 176  # of a key, its mask, and their place in the dict, at the most (tests measure it)
MOST_BITS = 512  # of a mask, at least: every snapshot takes a new bit, and bits out of use are taken back together
EVICTED_SHARE = 16  # one part in so many of all keys goes at a time


class PrefixIndex:
    """`capacity` is in bytes. Workers are known by instance."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._most_bits = MOST_BITS
        self._holders: dict[bytes, int] = {}  # least recently used first
        self._bits: dict[str, int] = {}  # a worker's bit; one that is gone has none, and its entries mean nothing
        self._next: dict[str, int] = {}  # the first KV event of a worker that is not in here yet
        self._used_bits = 0

    @property
    def most_keys(self) -> int:
        return max(1, self.capacity // (ENTRY_BYTES + self._most_bits // 8))

    def __len__(self) -> int:
        return len(self._holders)

    def since(self, instance: str) -> int:
        """The sequence number of the first KV event to ask this worker for; 0 asks for all it holds."""
        return self._next.get(instance, 0)

    def apply(self, instance: str, events: KVEvents) -> None:
        """Take a worker's events in. A gap before them is closed by the snapshot that is asked for next."""
        if events.reset:
            self._bits.pop(instance, None)  # a new bit: what the old one says means nothing any more
        elif events.first != self.since(instance):
            self._next.pop(instance, None)
            return
        self.stored(instance, events.stored[: self.most_keys])
        self._removed(instance, events.removed)
        self._next[instance] = events.next

    def stored(self, instance: str, keys: Iterable[bytes]) -> None:
        """The worker holds these blocks, or will as soon as it has computed what was placed on it."""
        bit, holders, most = self._bit(instance), self._holders, self.most_keys
        for key in keys:
            short = key[:KEY_BYTES]
            holders[short] = holders.pop(short, 0) | bit
            if len(holders) > most:  # many at a time: the way to a dict's first key leads past all that were deleted
                for oldest in list(islice(holders, max(1, most // EVICTED_SHARE))):
                    del holders[oldest]

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
        if self._used_bits >= self._most_bits:
            self._take_back_bits()
        bit = self._bits[instance] = 1 << self._used_bits
        self._used_bits += 1
        return bit

    def _take_back_bits(self) -> None:
        """Number the workers that are here anew: masks grow with these, not with all that ever were."""
        numbered = {old: 1 << number for number, old in enumerate(self._bits.values())}
        live, holders = sum(numbered), self._holders
        self._holders = {}
        for key, mask in holders.items():
            here, made = mask & live, 0
            while here:
                bit = here & -here
                made |= numbered[bit]
                here ^= bit
            if made:
                self._holders[key] = made
        self._bits = {instance: numbered[old] for instance, old in self._bits.items()}
        self._used_bits = len(self._bits)
        self._most_bits = max(MOST_BITS, 2 * self._used_bits)


def _note(found: dict[int, int], mask: int, blocks: int) -> None:
    """Every worker in the mask holds so many leading blocks."""
    while mask:
        bit = mask & -mask
        found[bit] = blocks
        mask ^= bit
