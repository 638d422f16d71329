"""Batches made over from those before them are those that are built anew, whatever sequences come, grow and go."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.decode_batch import DecodeBatches
from serving.batch.ragged import RaggedBatch

SIZE = 4
# Of each sequence: its number, which names its blocks, how many tokens it has, and how many more it drafts.
LENGTHS = st.tuples(st.integers(1, 100), st.integers(0, 3))
STEPS = st.lists(
    st.dictionaries(st.integers(0, 5), LENGTHS, min_size=1, max_size=4).map(lambda step: [*step.items()]),
    min_size=1,
    max_size=8,
)


def same(found: RaggedBatch, built: RaggedBatch) -> None:
    for name in ("tokens", "positions", "slots", "query_start", "context_lens", "logits_rows"):
        one, other = getattr(found, name), getattr(built, name)
        assert torch.equal(one, other) and one.dtype is other.dtype, name
    width = built.block_tables.shape[1]
    assert torch.equal(found.block_tables[:, :width], built.block_tables) and not found.block_tables[:, width:].any()
    assert found.block_tables.dtype is built.block_tables.dtype and found.block_tables.is_contiguous()
    assert (found.query_lens, tuple(found.context_lens_list)) == (built.query_lens, built.context_lens_list)
    assert found.block_size == built.block_size


@given(STEPS, st.booleans())
def test_each_batch_is_as_one_built_anew(steps: list[list[tuple[int, tuple[int, int]]]], moved: bool) -> None:
    batches = DecodeBatches(SIZE)
    for number, step in enumerate(steps):
        base = 1000 * number if moved else 0  # blocks elsewhere than in the step before
        lengths = [length for _, (length, _) in step]
        tokens = [[7 * seq + length + place for place in range(1 + more)] for seq, (length, more) in step]
        tables = [
            [base + 100 * seq + block for block in range(-(-(length + more) // SIZE))] for seq, (length, more) in step
        ]
        starts = [length - 1 for length in lengths]
        if all(len(new) == 1 for new in tokens):
            found = batches.of([token for [token] in tokens], starts, tables)
        else:
            found = batches.of_several(tokens, starts, tables)
        rows = range(sum(map(len, tokens)))
        built = RaggedBatch.build(tokens=tokens, starts=starts, block_tables=tables, block_size=SIZE, logits_rows=rows)
        same(found, built)


def test_a_sequence_that_goes_on_stays_in_the_same_memory() -> None:
    batches, table = DecodeBatches(SIZE), [3]
    first = batches.of([5], [0], [table])
    table.append(9)
    second = batches.of([6], [4], [table])
    assert second is first and second.slots.tolist() == [9 * SIZE]
