"""The ragged batches of planned work. On a CPU those of decode steps lie in memory that is used again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serving.batch.decode_batch import DecodeBatches
from serving.batch.ragged import OffloadedKV, RaggedBatch
from serving.engine.plan import Work


class WorkBatches:
    """Makes batches for one device, whose block tables are in blocks of `block_size` tokens."""

    def __init__(self, block_size: int, device: torch.device | str):
        self.block_size = block_size
        self.device = device
        on_cpu = torch.device(device).type == "cpu"
        self._decoding = DecodeBatches(block_size) if on_cpu else None  # elsewhere batches are copied in any case

    def of(self, work: Sequence[Work], rows: Sequence[range], offloaded: OffloadedKV | None) -> RaggedBatch:
        """The work's new tokens; of these rows something is returned. Valid until the next batch is made."""
        if self._decoding is not None and offloaded is None and all(map(_decodes, work, rows)):
            sequences = [item.seq for item in work]
            starts = [seq.computed for seq in sequences]
            tables = [seq.blocks for seq in sequences]
            if any(item.count > 1 for item in work):
                return self._decoding.of_several([item.tokens for item in work], starts, tables)
            tokens = [seq.tokens[start] for seq, start in zip(sequences, starts, strict=True)]
            return self._decoding.of(tokens, starts, tables)
        return RaggedBatch.build(
            tokens=[item.tokens for item in work],
            starts=[item.seq.computed for item in work],
            block_tables=[item.seq.blocks for item in work],
            block_size=self.block_size,
            logits_rows=[row for span in rows for row in span],
            long_rope=[item.seq.long_rope for item in work],
            offloaded=offloaded,
            barrier=work[0].barrier,
            device=self.device,
        )


def _decodes(item: Work, rows: range) -> bool:
    """True if the item is a token and its drafts, all of which return something, and nothing else is special."""
    count = item.count
    return count == len(rows) == 1 + len(item.draft) and item.barrier is None and not item.seq.long_rope
