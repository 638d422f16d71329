"""Which worker holds which KV blocks, as far as the router knows: from the workers' KV events and its own placements.

Bounded by bytes: the keys used longest ago are forgotten first. It is an estimate: a wrong entry costs time, never
text. Pure.

    key (8 bytes of a block's hash) ──► bit mask of workers, one bit a worker

Beside them it remembers which blocks are still to come with open requests, for half as many at the most: those of
requests beyond that count as there.

The keys lie in shards, so that what goes through all of a dict (its growth, evicting, taking bits back, a snapshot)
goes through some thousand keys at a time, and no request waits for a million.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from serving.messages import KVEvents

KEY_BYTES = 8  # of each block's 32-byte hash: at a million blocks two keys meet with a chance of 3 in a hundred million
ENTRY_BYTES = 176  # of a key, its mask, and their place in the dict, at the most (tests measure it)
MOST_BITS = 512  # of a mask, at least: every snapshot of a worker takes a new bit
EVICTED_SHARE = 16  # one part in so many of a shard's keys goes at a time
SHARD_KEYS = 4096  # of a shard, at least
MOST_SHARDS = 256
SWEPT_BITS = 64  # bits out of use at which they are taken back, a shard with each report


class PrefixIndex:
    """`capacity` is in bytes. Workers are known by instance."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._most_bits = MOST_BITS
        shards = min(MOST_SHARDS, max(1, self.most_keys // SHARD_KEYS))
        self._last = (1 << shards.bit_length() - 1) - 1  # shards are a power of two
        self._shards: list[dict[bytes, int]] = [{} for _ in range(self._last + 1)]  # least recently used first
        self._bits: dict[str, int] = {}  # a worker's bit; one that is gone has none, and its entries mean nothing
        self._names: list[str] = []  # who has, or had, the bit of that number
        self._next: dict[str, int] = {}  # the first KV event of a worker that is not in here yet
        self._expected: dict[str, dict[bytes, int]] = {}  # by instance: blocks to come, and with how many prompts
        self._to_come = 0  # of all
        self._live = 0  # all bits of workers
        self._stale = 0  # bits that nobody has any more, and masks may still have
        self._sweeping = 0  # stale bits that the first `_swept` shards are free of
        self._swept = 0
        self._free = 0  # bits that are in no mask

    @property
    def most_keys(self) -> int:
        return max(1, self.capacity // (ENTRY_BYTES + self._most_bits // 8))

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def since(self, instance: str) -> int:
        """The sequence number of the first KV event to ask this worker for; 0 asks for all it holds."""
        return self._next.get(instance, 0)

    def apply(self, instance: str, events: KVEvents) -> None:
        """Take a worker's events in. A gap before them is closed by the snapshot that is asked for next."""
        if events.reset:
            self._drop_bit(instance)  # a new bit: what the old one says means nothing any more
        elif events.first != self.since(instance):
            self._next.pop(instance, None)
            return
        self.stored(instance, events.stored[: self.most_keys])
        if (expected := self._expected.get(instance)) is not None:
            for key in events.stored:
                self._to_come -= expected.pop(key[:KEY_BYTES], 0) > 0
            if events.reset:  # they are still to come, and the new bit is not theirs yet
                self.stored(instance, expected)
        self._removed(instance, events.removed)
        self._next[instance] = events.next
        if self._sweeping or self._stale.bit_count() >= SWEPT_BITS:
            self._sweep()

    def expect(self, instance: str, keys: Sequence[bytes]) -> list[bytes]:
        """The worker will hold these blocks, once a prompt is computed. Returns those to come: `settle` them."""
        bit, shards, last = self._bit(instance), self._shards, self._last
        expected, coming = self._expected.setdefault(instance, {}), list[bytes]()
        for key in keys if self._to_come + len(keys) <= self.most_keys // 2 else ():
            short = key[:KEY_BYTES]
            count = expected.get(short, 0)
            if count or not shards[hash(short) & last].get(short, 0) & bit:
                expected[short] = count + 1
                self._to_come += not count
                coming.append(key)
        if not expected:
            del self._expected[instance]
        self.stored(instance, keys)
        return coming

    def settle(self, instance: str, coming: Iterable[bytes], *, there: bool) -> None:
        """What `expect` gave is there; or not, and no longer counted on but for what events or other prompts say."""
        expected, lost = self._expected.get(instance), list[bytes]()
        if expected is None:
            return
        for key in coming:
            short = key[:KEY_BYTES]
            count = expected.pop(short, 0)
            if count > 1 and not there:
                expected[short] = count - 1
            elif count:
                self._to_come -= 1
                if not there:
                    lost.append(short)
        if not expected:
            del self._expected[instance]
        if lost and instance in self._bits:
            self._removed(instance, lost)

    def stored(self, instance: str, keys: Iterable[bytes]) -> None:
        """The worker holds these blocks."""
        bit, shards, last, most = self._bit(instance), self._shards, self._last, self._most_in_shard
        for key in keys:
            short = key[:KEY_BYTES]
            holders = shards[hash(short) & last]
            holders[short] = holders.pop(short, 0) | bit
            if len(holders) > most:  # many at a time: the way to a dict's first key leads past all that were deleted
                for oldest in list(islice(holders, max(1, most // EVICTED_SHARE))):
                    del holders[oldest]

    def _removed(self, instance: str, keys: Iterable[bytes]) -> None:
        bit, shards, last = self._bit(instance), self._shards, self._last
        for key in keys:
            short = key[:KEY_BYTES]
            holders = shards[hash(short) & last]
            mask = holders.get(short, 0) & ~bit
            if mask:
                holders[short] = mask
            else:
                holders.pop(short, None)

    def retain(self, instances: Collection[str]) -> None:
        """All other workers are gone."""
        for gone in [known for known in self._bits.keys() | self._next.keys() if known not in instances]:
            self._drop_bit(gone)
            self._next.pop(gone, None)
        for gone in self._expected.keys() - instances:
            self._to_come -= len(self._expected.pop(gone))

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of the chain `keys` each worker holds; workers that hold none are left out."""
        found: dict[str, int] = {}
        mask, shards, last = self._live, self._shards, self._last
        for number, key in enumerate(keys):
            short = key[:KEY_BYTES]
            here = mask & shards[hash(short) & last].get(short, 0)
            if here != mask:
                if number:
                    self._note(found, mask ^ here, number)
                if not here:
                    return found
                mask = here
        if keys:
            self._note(found, mask, len(keys))
        return found

    def _note(self, found: dict[str, int], mask: int, blocks: int) -> None:
        """Every worker in the mask holds so many leading blocks."""
        while mask:
            bit = mask & -mask
            found[self._names[bit.bit_length() - 1]] = blocks
            mask ^= bit

    # ---- snapshots -------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        return len(self._shards)

    @property
    def mask_bytes(self) -> int:
        """Of the widest mask."""
        return (len(self._names) + 7) // 8

    def numbers(self) -> dict[str, tuple[int, int]]:
        """The number of each worker's bit in the masks of `entries`, and its first KV event that is not in there."""
        return {instance: (bit.bit_length() - 1, self.since(instance)) for instance, bit in self._bits.items()}

    def entries(self, shard: int) -> Mapping[bytes, int]:
        """Keys and masks of one shard, the least recently used first."""
        return self._shards[shard]

    def restore(self, numbers: Mapping[str, tuple[int, int]], entries: Iterable[tuple[bytes, int]]) -> None:
        """Take in what another index gave as `numbers` and `entries`; only into one that is still empty.

        Raises ValueError for numbers that no index gives.
        """
        named = {number: instance for instance, (number, _) in numbers.items()}
        known = all(0 <= number < 1 << 16 and 0 <= first < 1 << 63 for number, first in numbers.values())
        if self._names or len(named) != len(numbers) or not known:
            raise ValueError("not the workers of an index, or not into an empty one")
        self._names = [named.get(number, "") for number in range(max(named, default=-1) + 1)]
        self._bits = {instance: 1 << number for number, instance in named.items()}
        self._next = {instance: first for instance, (_, first) in numbers.items()}
        self._live = sum(self._bits.values())
        self._free = (1 << len(self._names)) - 1 ^ self._live
        self._make_room_for_bits()
        shards, last, most, live = self._shards, self._last, self._most_in_shard, self._live
        for key, mask in entries:
            holders = shards[hash(key) & last]
            if mask & live and len(holders) < most:
                holders[key] = mask & live

    # ---- bits ------------------------------------------------------------------------------------------------------

    @property
    def _most_in_shard(self) -> int:
        return max(1, self.most_keys // len(self._shards))

    def _bit(self, instance: str) -> int:
        bit = self._bits.get(instance)
        if bit is not None:
            return bit
        if not self._free and len(self._names) >= self._most_bits:
            while self._sweeping or self._stale:
                self._sweep()
        if self._free:
            bit = self._free & -self._free
            self._free ^= bit
            self._names[bit.bit_length() - 1] = instance
        else:
            bit = 1 << len(self._names)
            self._names.append(instance)
            self._make_room_for_bits()
        self._bits[instance] = bit
        self._live |= bit
        return bit

    def _make_room_for_bits(self) -> None:
        """Wider masks leave room for fewer keys."""
        if len(self._names) > self._most_bits:
            self._most_bits = 2 * len(self._names)
            for holders in self._shards:
                for oldest in list(islice(holders, max(0, len(holders) - self._most_in_shard))):
                    del holders[oldest]

    def _drop_bit(self, instance: str) -> None:
        bit = self._bits.pop(instance, 0)
        self._live &= ~bit
        self._stale |= bit

    def _sweep(self) -> None:
        """Take stale bits out of one more shard; once they are in none, workers may have them."""
        if not self._sweeping:
            self._sweeping, self._stale, self._swept = self._stale, 0, 0
        kept = ~self._sweeping
        holders = self._shards[self._swept]
        self._shards[self._swept] = {key: left for key, mask in holders.items() if (left := mask & kept)}
        self._swept += 1
        if self._swept == len(self._shards):
            self._free |= self._sweeping
            self._sweeping = 0
