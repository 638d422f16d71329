"""Gives sequences their blocks: prefix reuse when one is opened, growth as it decodes, publication of full blocks.

The pure half of a worker's KV cache: it moves block ids between the allocator and sequences, never bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.offload import OffloadManager
from kvcache.blocks.prefix import extend_keys, root_key
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom

T = TypeVar("T")


class BlockListener(Protocol):
    """Where full blocks are offered to (kvcache.connector.write_back). Called under the engine's lock."""

    def offer(self, seq: SequenceState, first: int, last: int) -> None:
        """The sequence's blocks first..last (exclusive) have just become full."""

    def give_up(self) -> None:
        """Blocks have run out: release those held only for being stored."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptBlocks:
    """Blocks of the device, and extents of the host, that KV is being copied into."""

    blocks: tuple[int, ...]
    extents: tuple[int, ...]


class KVCacheManager:
    """The device blocks of one worker's sequences. `fingerprint` roots the block keys (see kvcache.blocks.prefix).

    With a `host`, sequences longer than the device's KV keep their older KV there. Their device blocks are written
    again as older tokens move out, so they are never shared here; what lies on the host can be shared elsewhere.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        fingerprint: str,
        host: OffloadManager | None = None,
        listener: BlockListener | None = None,
    ):
        self.allocator = allocator
        self.block_size = allocator.block_size  # tokens
        self.fingerprint = fingerprint
        self.host = host
        self.listener = listener
        self.queries = 0  # tokens looked up in the prefix index
        self.hits = 0  # tokens found there
        self.kept: list[KeptBlocks] = []

    def root(self, tenant: str, long_rope: bool, fingerprint: str | None = None) -> bytes:
        """The root of a sequence's block keys; `fingerprint` is its KV layout's, by default the worker's own."""
        return root_key(fingerprint or self.fingerprint, tenant, long_rope)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def least_blocks(self, seq: SequenceState) -> int:
        """How many blocks the sequence needs to be opened, if nothing of it is here already."""
        blocks = self.blocks_for(len(seq.tokens) + 1)
        if self.host is None or not self.is_too_long(seq):
            return blocks
        plan = self.host.plan
        return max(plan.least_resident, blocks - plan.extents * plan.extent_blocks)

    def open(self, seq: SequenceState, *, headroom: int = 0, waits: bool = False) -> None:
        """Hold blocks for all of `seq.tokens` and one more, reusing the longest cached prefix.

        At least one token is left to compute, so that there are logits to sample from. `headroom` blocks must stay
        available beyond what is taken. Raises NoRoom and takes nothing when they do not. Of a sequence that `waits` for
        its turn the blocks to be written are reserved, and those cached in them are kept, until `begin` or `settle`.
        """
        assert not seq.opened and (seq.waits_kept or seq.computed == 0)
        if self.host is not None and self.is_too_long(seq):
            host = self.host
            self._pressing(lambda: host.open(seq, self.allocator, headroom=headroom))
            return
        matched = self._match(seq)
        needed, newly = self.blocks_for(len(seq.tokens) + 1) - len(matched), matched[len(seq.blocks) :]
        self.allocator.acquire(newly)
        try:
            self._pressing(lambda: self.allocator.reserve(needed, headroom=headroom))
        except NoRoom:
            self.allocator.release(newly, used=False)
            raise
        self.allocator.found(matched)
        seq.blocks, seq.reserved, seq.computed, seq.waits_kept = matched, needed, 0, False
        if not waits:
            self.settle(seq)
        self._count_reuse(seq, len(matched))
        self.queries += len(seq.tokens)

    def begin(self, seq: SequenceState) -> None:
        """Before the first chunk of a waiting sequence: `open`, or `rematch` for one that is. Raises NoRoom.

        It has all its blocks from then on.
        """
        if seq.opened:
            self.rematch(seq)
            self.settle(seq)
        else:
            self.open(seq)

    def keep_cached(self, seq: SequenceState) -> None:
        """Keep what is cached of a sequence that waits until it is opened or released, or makes way: not evicted then.

        It counts as computed, so that it is known what is left. Said again, it keeps what has come since, too.
        """
        matched = self._match(seq)
        if newly := matched[len(seq.blocks) :]:
            self.allocator.acquire(newly)
            seq.blocks, seq.waits_kept = matched, True
            seq.computed = len(matched) * self.block_size

    def make_way(self, seq: SequenceState, waiting: Iterable[SequenceState]) -> None:
        """Before `begin`: those of these with blocks that `keep_cached` has kept let go of them, as far as it takes.

        In this order; all of them, where that is not enough.
        """
        lacking = self._lacking_to_begin(seq)
        if not lacking or not (keeping := [other for other in waiting if other.waits_kept]):
            return
        self.keep_cached(seq)  # or what others let go of it would look like room
        enough = self.allocator.available + lacking
        for other in keeping:
            if self.allocator.available >= enough:
                return
            self.release(other)

    def _lacking_to_begin(self, seq: SequenceState) -> int:
        """How many blocks too few are available to `begin` the sequence; none, if the host is what is full.

        Where it is, the listener gives up what it holds there, as `begin` would have it: only then is this known.
        """
        if seq.opened:
            return 0
        if self.host is None or not self.is_too_long(seq):
            return self.lacking(seq)
        if self._resident(seq, self.host) > self.host.plan.most_resident and self.listener is not None:
            self.listener.give_up()
        resident = self._resident(seq, self.host)
        return max(0, resident - self.allocator.available) if resident <= self.host.plan.most_resident else 0

    def _resident(self, seq: SequenceState, host: OffloadManager) -> int:
        """Blocks of the device that a sequence too long for it needs beside the extents which are available."""
        plan, blocks = host.plan, self.blocks_for(len(seq.tokens) + 1)
        return max(plan.least_resident, blocks - host.extents.available * plan.extent_blocks)

    def refresh(self, waiting: Iterable[SequenceState]) -> None:
        """`rematch` those of these that wait with blocks reserved, where others have filled some of them."""
        for seq in waiting:
            known, keys = seq.computed // self.block_size, seq.prefix.keys
            if seq.reserved and known < len(keys) and self.allocator.holds(keys[known]):
                self.rematch(seq)

    def lacking(self, seq: SequenceState, *, headroom: int = 0) -> int:
        """How many blocks too few are available to `open` the sequence; of one for the host too, none are counted."""
        if self.host is not None and self.is_too_long(seq):
            return 0
        matched = self._match(seq)
        needed = self.blocks_for(len(seq.tokens) + 1) - len(matched)
        return max(0, needed + headroom - self.allocator.available + self.allocator.cached_among(matched))

    def settle(self, seq: SequenceState) -> None:
        """Take the blocks that are reserved for the sequence: they are about to be written."""
        if seq.reserved:
            seq.blocks = [*seq.blocks, *self.allocator.allocate_reserved(seq.reserved)]
            seq.reserved = 0

    def rematch(self, seq: SequenceState) -> None:
        """Before the first chunk of a waiting sequence: take up prefix blocks that others have filled meanwhile."""
        if seq.offload is not None:
            return
        known = seq.computed // self.block_size
        matched = self._match(seq)
        if len(matched) <= known:
            return
        taken_up = matched[known:]
        self.allocator.acquire(taken_up)
        self.allocator.found(taken_up)
        replaced = seq.blocks[known : len(matched)]
        self.allocator.release(replaced)
        spared = len(matched) - known - len(replaced)
        self.allocator.cancel_reserved(spared)
        seq.reserved -= spared
        seq.blocks[known : len(matched)] = taken_up
        self._count_reuse(seq, len(matched))

    def grow(self, seq: SequenceState) -> None:
        """Hold a block for the KV of the sequence's last token. Raises NoRoom."""
        if seq.offload is not None:
            self.make_room(seq, seq.uncomputed)
            return
        needed = -(-len(seq.tokens) // self.block_size) - len(seq.blocks)
        if needed > 0:
            seq.blocks.extend(self._pressing(lambda: self.allocator.allocate(needed)))

    def make_room(self, seq: SequenceState, count: int) -> int:
        """How many of the next `count` tokens a step may compute; all, unless the device holds only part of it."""
        if seq.offload is None:
            return count
        host = self.host
        assert host is not None
        return self._pressing(lambda: host.make_room(seq, count))

    def publish(self, seq: SequenceState) -> None:
        """Make the sequence's full, computed blocks reusable; on the host, by others alone.

        Not those of a sequence some of whose KV has come with loss: another's text would change by it.
        """
        offload = seq.offload  # leading blocks' tokens lie where they will stay until the sequence is released
        full = seq.computed // self.block_size if offload is None else offload.copied * offload.extent_blocks
        if full <= seq.prefix.published or seq.incoming.lossy or not self.allocator.caching:
            return
        extend_keys(seq.prefix.keys, seq.prefix.root, seq.tokens, self.block_size, upto=full * self.block_size)
        for i in range(seq.prefix.published, full) if offload is None else ():
            self.allocator.publish(seq.blocks[i], seq.prefix.keys[i])
        first, seq.prefix.published = seq.prefix.published, full
        if self.listener is not None:
            self.listener.offer(seq, first, full)

    def shareable_keys(self, seq: SequenceState) -> list[bytes]:
        """The keys of the blocks that may come from elsewhere: all full ones, but for one token left to compute."""
        if not self.allocator.caching or not seq.request.reuses_kv:
            return []
        reusable = len(seq.tokens) - 1
        extend_keys(seq.prefix.keys, seq.prefix.root, seq.tokens, self.block_size, upto=reusable)
        return seq.prefix.keys[: reusable // self.block_size]

    def known_blocks(self, seq: SequenceState) -> int:
        """How many of its leading blocks are here already."""
        return len(self._match(seq))

    def fetched(self, seq: SequenceState, blocks: int) -> None:
        """The KV of its first `blocks` blocks has been brought into them: it counts as computed, and is shared.

        Of a sequence that goes to the host, what makes whole extents there.
        """
        if seq.offload is not None:
            extents = blocks // seq.offload.extent_blocks
            seq.offload.land(extents)
            seq.prefix.published = blocks = extents * seq.offload.extent_blocks
        seq.computed = seq.cached = blocks * self.block_size
        self.publish(seq)

    def release(self, seq: SequenceState) -> None:
        """Give all blocks back. Safe to call twice."""
        blocks, seq.blocks = seq.blocks, []
        self.allocator.cancel_reserved(seq.reserved)
        self.allocator.release(blocks, used=not seq.waits_kept)
        seq.reserved, seq.waits_kept = 0, False
        seq.computed = seq.prefix.published = 0
        if self.host is not None:
            self.host.release(seq)

    def keep(self, seq: SequenceState, start: int, end: int) -> KeptBlocks:
        """Hold what tokens start..end are copied into, though the sequence may end meanwhile. Then `let_go`.

        All of a sequence whose KV may move to the host meanwhile: it is not known then which blocks are written.
        """
        first, last = start // self.block_size, self.blocks_for(end)
        offload = seq.offload
        if offload is None:
            kept = KeptBlocks(tuple(seq.blocks[first:last]), ())
        elif offload.moves or offload.moved < len(offload.extents):
            kept = KeptBlocks(tuple(seq.blocks), tuple(offload.extents))
        else:
            size, before = offload.extent_blocks, offload.blocks  # those of the host come first
            on_device = slice(max(first - before, 0), max(last - before, 0))
            kept = KeptBlocks(tuple(seq.blocks[on_device]), tuple(offload.extents[first // size : -(-last // size)]))
        self.allocator.acquire(kept.blocks)
        if self.host is not None:
            self.host.extents.acquire(kept.extents)
        self.kept.append(kept)
        return kept

    def let_go(self, kept: KeptBlocks) -> bool:
        """Nothing is copied into them any more. True if some come free, as the copy outlasted its sequence.

        Others may wait for those: wake the engine.
        """
        before = self._free()
        self.kept.remove(kept)
        self.allocator.release(kept.blocks)
        if self.host is not None:
            self.host.extents.release(kept.extents)
        return self._free() > before

    def _free(self) -> int:
        """Blocks of the device and extents of the host that may be taken."""
        return self.allocator.available + (self.host.extents.available if self.host is not None else 0)

    def unaccounted(self, sequences: Iterable[SequenceState], others: Iterable[int] = ()) -> int:
        """References that neither these sequences nor `others`, single blocks, explain; 0 unless blocks leaked.

        Reserved blocks are counted likewise.
        """
        sequences, kept = list(sequences), [one.blocks for one in self.kept]
        leaked = self.allocator.check([*(seq.blocks for seq in sequences), *kept, list(others)])
        return leaked + abs(self.allocator.reserved - sum(seq.reserved for seq in sequences))

    def unaccounted_on_host(self, sequences: Iterable[SequenceState], others: Iterable[int] = ()) -> int:
        """The same of host memory."""
        assert self.host is not None
        return self.host.unaccounted(sequences, chain(others, *(one.extents for one in self.kept)))

    def is_too_long(self, seq: SequenceState) -> bool:
        return self.blocks_for(len(seq.tokens) + 1) > self.allocator.num_blocks

    def _pressing(self, take: Callable[[], T]) -> T:
        """What `take` gives; where there is no room, once more after the listener has given up its blocks."""
        try:
            return take()
        except NoRoom:
            if self.listener is None:
                raise
        self.listener.give_up()
        return take()

    def _match(self, seq: SequenceState) -> list[int]:
        return [] if self.is_too_long(seq) else self.allocator.match(self.shareable_keys(seq))

    def _count_reuse(self, seq: SequenceState, blocks: int) -> None:
        self.hits += blocks * self.block_size - seq.computed
        seq.computed = seq.cached = blocks * self.block_size
        seq.prefix.published = blocks
