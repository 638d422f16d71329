"""What of a sequence's KV lies in host memory, when the device cannot hold all of it: its oldest tokens, in extents.

Plain state beside a sequence's blocks: it says where KV is, and knows neither why nor how it got there. No torch.

    extents[:copied]       hold the KV of the sequence's first `copied` extents of tokens, and no other copy does
    extents[copied:moved]  are to hold that of the next ones: it lies in the blocks of `moves` until it is copied
    seq.blocks             hold that of the tokens after those: an extent's blocks are written again once it is copied
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OffloadMove:
    """A copy to be made before the sequence's next step: these device blocks, in order, to this extent of the host."""

    blocks: tuple[int, ...]
    extent: int


@dataclass(slots=True)
class OffloadState:
    """See the module. `extents` from `moved` on are held for what is still to move."""

    extent_blocks: int  # device blocks an extent has the tokens of
    extents: list[int]
    moved: int = 0
    copied: int = 0  # never goes back while the sequence is computed: who reads elsewhere looks at it without a lock
    moves: list[OffloadMove] = field(default_factory=list)

    def block(self, index: int) -> int:
        """Where in the host's memory, in blocks of the device's size, its tokens of this block number lie."""
        extent, place = divmod(index, self.extent_blocks)
        return self.extents[extent] * self.extent_blocks + place

    @property
    def blocks(self) -> int:
        """How many blocks' tokens have moved."""
        return self.moved * self.extent_blocks

    def settle(self) -> None:
        """The moves have been copied. Nothing may be written to their blocks before this."""
        self.copied = self.moved
        self.moves.clear()

    def land(self, extents: int) -> None:
        """The KV of its first so many extents has been brought to them: the rest is computed, from there on."""
        assert not self.moves
        self.moved = self.copied = extents

    def arrive(self) -> None:
        """No token of it is computed here: all KV comes from elsewhere, the oldest straight to the extents held."""
        self.land(len(self.extents))

    def begin(self) -> None:
        """All of it is computed here after all, from the first token on; what has come meanwhile counts for nothing."""
        self.land(0)
