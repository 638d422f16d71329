"""Batches made over from those before them are those that are built anew, whatever sequences come, grow and go."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.decode_batch import DecodeBatches
from serving.batch.ragged import RaggedBatch

SIZE = 4
# Of each sequence: its number, which names its blocks, and how many tokens it has.
STEPS = st.lists(
    st.dictionaries(st.integers(0, 5), st.integers(1, 100), min_size=1, max_size=4).map(lambda step: [*step.items()]),
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
def test_each_batch_is_as_one_built_anew(steps: list[list[tuple[int, int]]], moved: bool) -> None:
    batches = DecodeBatches(SIZE)
    for number, step in enumerate(steps):
        base = 1000 * number if moved else 0  # blocks elsewhere than in the step before
        tables = [[base + 100 * seq + block for block in range(-(-length // SIZE))] for seq, length in step]
        starts, tokens = [length - 1 for _, length in step], [7 * seq + length for seq, length in step]
        found = batches.of(tokens, starts, tables)
        same(
            found,
            RaggedBatch.build(
                tokens=[[token] for token in tokens], starts=starts, block_tables=tables, block_size=SIZE
            ),
        )


def test_a_sequence_that_goes_on_stays_in_the_same_memory() -> None:
    batches, table = DecodeBatches(SIZE), [3]
    first = batches.of([5], [0], [table])
    table.append(9)
    second = batches.of([6], [4], [table])
    assert second is first and second.slots.tolist() == [9 * SIZE]
