"""Host memory behind the device's KV: how it is cut, who holds what of it, and when a sequence's KV moves there.

The pure half of host offload: it moves names of blocks and extents, never bytes. No torch, no clock, no locks.

A sequence that the device cannot hold keeps a fixed number of device blocks for its newest tokens, its residents. When
they are full, its oldest tokens there move to the host, an extent at a time, and their blocks are used again:

    token    0 ........ moved extents ........ | ..... resident blocks ..... |
    lies on  the host                          the device

KV moves once and never back: attention reads it through staging buffers (kvcache.memory.host), segment by segment.
KV that is computed elsewhere is written where it belongs as it arrives, without a move (OffloadState.arrive,
kvcache.memory.locations).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from kvcache.blocks.allocator import BlockAllocator
from serving.engine.offload import OffloadMove, OffloadState
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from serving.kvspec import LayerKV

JOINT_TOKENS = 128  # kernels join partial attention at multiples of this position: cut there, no bit changes
SEGMENT_TOKENS = 1024  # of one layer: enough for a copy to run at full speed, and for the next to hide behind
STAGING_SHARE = 8  # the staging buffers take at most one part in so many of the device's KV
RESIDENT_PARTS = (3, 4)  # the most of the device's blocks that one such sequence may hold: others run beside it


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPlan:
    """How a worker's KV memory is cut when it has host memory too."""

    block_size: int  # tokens
    device_blocks: int  # the staging buffers not included
    extent_blocks: int
    extents: int
    segment_extents: int  # extents of one layer a staging buffer holds

    @property
    def extent_tokens(self) -> int:
        return self.extent_blocks * self.block_size

    @property
    def most_resident(self) -> int:
        """The most device blocks a sequence that is partly on the host holds."""
        return max(self.extent_blocks, self.device_blocks * RESIDENT_PARTS[0] // RESIDENT_PARTS[1])

    @property
    def least_resident(self) -> int:
        """The fewest it is opened with; fewer would mean to stream more with every step, for as long as it runs."""
        return max(self.extent_blocks, self.most_resident // 2)

    @property
    def tokens(self) -> int:
        """The longest sequence that fits: with host memory, or on the device alone."""
        both = self.most_resident * self.block_size + self.extents * self.extent_tokens
        return max(both, self.device_blocks * self.block_size)


def plan_host(specs: Sequence[LayerKV], device_blocks: int, block_size: int, host_bytes: int) -> OffloadPlan:
    """Cut `host_bytes` of host memory, and the memory of `device_blocks` blocks, for layers of these specs.

    Raises ValueError where there is too little of either to be of use.
    """
    extent_tokens = lcm(JOINT_TOKENS, block_size)
    token_bytes = sum(spec.token_bytes for spec in specs)
    extent_of_layer = max(spec.token_bytes for spec in specs) * extent_tokens
    staging = device_blocks * block_size * token_bytes // STAGING_SHARE
    segment_extents = max(1, min(SEGMENT_TOKENS // extent_tokens, staging // (2 * extent_of_layer)))
    kinds = len(set(specs))  # layers of one spec share their buffers
    taken = -(-2 * kinds * segment_extents * extent_of_layer // (block_size * token_bytes))
    plan = OffloadPlan(
        block_size=block_size,
        device_blocks=device_blocks - taken,
        extent_blocks=extent_tokens // block_size,
        extents=host_bytes // (token_bytes * extent_tokens),
        segment_extents=segment_extents,
    )
    least = taken + 2 * plan.extent_blocks
    if device_blocks < least:
        raise ValueError(f"--host-kv-memory needs {least} KV blocks on the device at least, not {device_blocks}")
    if plan.tokens == plan.device_blocks * block_size:
        more = plan.device_blocks * block_size * token_bytes
        raise ValueError(f"--host-kv-memory {host_bytes} makes no sequence longer; give it {more} bytes or more")
    return plan


class OffloadManager:
    """The extents of a worker's host memory, and the resident blocks of the sequences that hold them."""

    def __init__(self, plan: OffloadPlan):
        self.plan = plan
        self.extents = BlockAllocator(plan.extents, plan.extent_tokens, caching=False)
        self.tokens_moved = 0

    def open(self, seq: SequenceState, allocator: BlockAllocator, *, headroom: int) -> None:
        """Hold blocks of `allocator`, and extents for what of `seq.tokens` and one more will not fit in them.

        As many blocks as may be while `headroom` of them stay available. Raises NoRoom and takes nothing.
        """
        plan = self.plan
        resident = min(plan.most_resident, allocator.available - headroom)
        if resident < plan.least_resident:
            raise NoRoom(f"{plan.least_resident} KV blocks for a long sequence and {headroom} spare needed")
        blocks = -(-(len(seq.tokens) + 1) // plan.block_size)
        extents = self.extents.allocate(max(0, -(-(blocks - resident) // plan.extent_blocks)))
        seq.blocks = allocator.allocate(resident)
        seq.offload = OffloadState(plan.extent_blocks, extents)

    def make_room(self, seq: SequenceState, count: int) -> int:
        """Make room on the device for the next `count` tokens, moving older ones out; how many there is room for.

        At least one. Raises NoRoom, moving nothing, when the host has no extent left; not for the tokens it was opened
        with. What it moves must be copied before the sequence's next step writes.
        """
        offload = seq.offload
        assert offload is not None
        lacking = seq.computed + count - self._held(seq)
        if lacking > 0:
            computed = seq.computed // self.plan.extent_tokens - offload.moved  # whole extents on the device
            self._move(seq, offload, min(computed, -(-lacking // self.plan.extent_tokens)))
        room = min(count, self._held(seq) - seq.computed)
        assert room > 0, "resident blocks are an extent at least, so when they are full there is one to move"
        return room

    def _move(self, seq: SequenceState, offload: OffloadState, count: int) -> None:
        """Name the oldest `count` resident extents to be moved; their blocks come after the others from now on."""
        short = offload.moved + count - len(offload.extents)
        if short > 0:
            offload.extents += self.extents.allocate(short)
        for _ in range(count):
            blocks, kept = seq.blocks[: offload.extent_blocks], seq.blocks[offload.extent_blocks :]
            offload.moves.append(OffloadMove(tuple(blocks), offload.extents[offload.moved]))
            seq.blocks = [*kept, *blocks]
            offload.moved += 1
        self.tokens_moved += count * self.plan.extent_tokens

    def _held(self, seq: SequenceState) -> int:
        return seq.held_blocks * self.plan.block_size

    def release(self, seq: SequenceState) -> None:
        """Give the extents back. Safe to call twice, and for a sequence that has none."""
        offload, seq.offload = seq.offload, None
        if offload is not None:
            self.extents.release(offload.extents)

    def unaccounted(self, sequences: Iterable[SequenceState], others: Iterable[int] = ()) -> int:
        """References to extents that neither these sequences nor `others` explain; 0 unless some leaked."""
        held = [seq.offload.extents for seq in sequences if seq.offload is not None]
        return self.extents.check([*held, list(others)])
