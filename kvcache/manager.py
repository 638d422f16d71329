"""Gives sequences their blocks: prefix reuse when one is opened, growth as it decodes, publication of full blocks.

The pure half of a worker's KV cache: it moves block ids between the pool and sequences, never bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.blocks import BlockPool
from kvcache.prefix import extend_keys, root_key
from serving.engine.sequence import Sequence
from serving.errors import NoRoom


class KVManager:
    """Blocks of one worker's pool for its sequences. `fingerprint` roots the block keys (see kvcache.prefix)."""

    def __init__(self, pool: BlockPool, fingerprint: str):
        self.pool = pool
        self.fingerprint = fingerprint
        self.queries = 0  # tokens looked up in the prefix index
        self.hits = 0  # tokens found there

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def root(self, tenant: str, long_rope: bool) -> bytes:
        return root_key(self.fingerprint, tenant, long_rope)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def open(self, seq: Sequence, *, headroom: int = 0) -> None:
        """Hold blocks for all of `seq.tokens` and one more, reusing the longest cached prefix.

        At least one token is left to compute, so that there are logits to sample from. `headroom` blocks must stay
        available beyond what is taken. Raises NoRoom and takes nothing when they do not.
        """
        assert not seq.blocks and seq.computed == 0
        matched = self._match(seq)
        needed = self.blocks_for(len(seq.tokens) + 1) - len(matched)
        self.pool.acquire(matched)
        try:
            if needed + headroom > self.pool.available:
                raise NoRoom(f"{needed} more KV blocks and {headroom} spare needed, {self.pool.available} available")
            fresh = self.pool.allocate(needed)
        except NoRoom:
            self.pool.release(matched)
            raise
        seq.blocks = [*matched, *fresh]
        self._count_reuse(seq, len(matched))
        self.queries += len(seq.tokens)

    def rematch(self, seq: Sequence) -> None:
        """Before the first chunk of a waiting sequence: take up prefix blocks that others have filled meanwhile."""
        known = seq.computed // self.block_size
        matched = self._match(seq)
        if len(matched) <= known:
            return
        self.pool.acquire(matched[known:])
        self.pool.release(seq.blocks[known : len(matched)])
        seq.blocks[known : len(matched)] = matched[known:]
        self._count_reuse(seq, len(matched))

    def grow(self, seq: Sequence) -> None:
        """Hold a block for the KV of the sequence's last token. Raises NoRoom."""
        needed = self.blocks_for(len(seq.tokens)) - len(seq.blocks)
        if needed > 0:
            seq.blocks.extend(self.pool.allocate(needed))

    def publish(self, seq: Sequence) -> None:
        """Make the sequence's full, computed blocks reusable."""
        full = seq.computed // self.block_size
        if full <= seq.published or not self.pool.caching:
            return
        extend_keys(seq.keys, seq.root, seq.tokens, self.block_size, upto=seq.computed)
        for i in range(seq.published, full):
            self.pool.publish(seq.blocks[i], seq.keys[i])
        seq.published = full

    def release(self, seq: Sequence) -> None:
        """Give all blocks back. Safe to call twice."""
        blocks, seq.blocks = seq.blocks, []
        seq.computed = seq.published = 0
        self.pool.release(blocks)

    def unaccounted(self, sequences: Iterable[Sequence]) -> int:
        """References that none of these sequences explains; 0 unless blocks leaked."""
        return self.pool.check(seq.blocks for seq in sequences)

    def _match(self, seq: Sequence) -> list[int]:
        if not self.pool.caching or seq.request.prompt_logprobs is not None:
            return []  # prompt log-probabilities need every prompt token computed
        reusable = len(seq.tokens) - 1
        extend_keys(seq.keys, seq.root, seq.tokens, self.block_size, upto=reusable)
        return self.pool.match(seq.keys[: reusable // self.block_size])

    def _count_reuse(self, seq: Sequence, blocks: int) -> None:
        self.hits += blocks * self.block_size - seq.computed
        seq.computed = seq.cached = blocks * self.block_size
        seq.published = blocks
