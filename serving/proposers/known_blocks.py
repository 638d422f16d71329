"""Which blocks hold a proposer's KV of what they are named for, so that sequences that share a prefix share it too.

A proposer's planes have as many blocks as the worker's KV, and a sequence's lie in both at the same numbers. Who holds
a block is the KV manager's affair; here is only what a proposer has computed into it, by its content's key
(kvcache.blocks.prefix): a block that has been given to other content has another key. No torch.
"""

from __future__ import annotations

from serving.engine.proposed import ProposerState
from serving.engine.sequence import SequenceState


class KnownBlocks:
    """The key of what each block was filled for."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._keys: dict[int, bytes] = {}

    def leading(self, seq: SequenceState) -> int:
        """How many leading tokens of the sequence lie in blocks that have been filled for just these."""
        keys = self._keys
        count = 0
        for block, key in zip(seq.blocks, seq.prefix.keys, strict=False):
            if keys.get(block) != key:
                break
            count += 1
        return count * self.block_size

    def settle(self, seq: SequenceState, state: ProposerState) -> None:
        """Take back what `state` says of blocks that the sequence does not hold any more.

        Its blocks are replaced where others have filled equal ones.
        """
        if seq.blocks[: len(state.blocks)] == state.blocks:
            return
        kept = next(
            (i for i, (old, new) in enumerate(zip(state.blocks, seq.blocks, strict=False)) if old != new),
            min(len(state.blocks), len(seq.blocks)),
        )
        del state.blocks[kept:]
        state.sure = min(state.sure, kept * self.block_size)
        state.named = min(state.named, kept)
        state.guessed = []

    def begin(self, seq: SequenceState, state: ProposerState, upto: int) -> None:
        """KV of the sequence's tokens up to there, from `state.sure` on, is about to be written."""
        for block in seq.blocks[state.sure // self.block_size : -(-upto // self.block_size)]:
            self._keys.pop(block, None)

    def written(self, seq: SequenceState, state: ProposerState, upto: int) -> None:
        """KV of all tokens up to there is in the sequence's blocks: `state` knows, and full ones are named."""
        size = self.block_size
        state.sure = upto
        state.blocks += seq.blocks[len(state.blocks) : -(-upto // size)]
        keys = seq.prefix.keys
        if state.first == 0:
            for index in range(state.named, min(upto // size, len(keys))):
                self._keys[seq.blocks[index]] = keys[index]
                state.named = index + 1
