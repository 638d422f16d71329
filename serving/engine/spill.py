"""What of a sequence's KV lies in host memory, when the device cannot hold all of it: its oldest tokens, in extents.

Plain state beside a sequence's blocks: it says where KV is, and knows neither why nor how it got there. No torch.

    extents[:moved]   hold the KV of the sequence's first `moved` extents of tokens, and nobody else does
    seq.blocks      hold that of the tokens after those: an extent's blocks are used again once it has moved
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Move:
    """A copy to be made before the sequence's next step: these device blocks, in order, to this extent of the host."""

    blocks: tuple[int, ...]
    extent: int


@dataclass(slots=True)
class Spill:
    """See the module. `extents` from `moved` on are held for what is still to move."""

    extent_blocks: int  # device blocks an extent has the tokens of
    extents: list[int]
    moved: int = 0
    moves: list[Move] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """How many blocks' tokens have moved."""
        return self.moved * self.extent_blocks
