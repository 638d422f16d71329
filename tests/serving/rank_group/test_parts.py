"""A part of a batch is the batch that its sequences would have been alone, here and in another process."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.ragged import RaggedBatch
from serving.rank_group.parts import TENSORS, pack, part_of_batch, unpack

BLOCK = 4


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[int]]:
    """Sequences, and some of them: ascending, at least one."""
    count = draw(st.integers(1, 6))
    sequences = [
        {
            "tokens": draw(st.lists(st.integers(0, 90), min_size=1, max_size=7)),
            "start": draw(st.integers(0, 9)),
            "table": list(range(8 * number, 8 * number + 8)),
            "wanted": draw(st.integers(0, 3)),
            "long": draw(st.booleans()),
        }
        for number in range(count)
    ]
    chosen = draw(st.sets(st.integers(0, count - 1), min_size=1))
    return sequences, sorted(chosen)


def batch_of(sequences: list[dict[str, Any]]) -> tuple[RaggedBatch, list[int]]:
    """The batch, and for each sequence how many of its last rows are wanted."""
    rows, first, counts = [], 0, []
    for one in sequences:
        end = first + len(one["tokens"])
        counts.append(min(one["wanted"], len(one["tokens"])))
        rows += range(end - counts[-1], end)
        first = end
    batch = RaggedBatch.build(
        tokens=[one["tokens"] for one in sequences],
        starts=[one["start"] for one in sequences],
        block_tables=[one["table"] for one in sequences],
        block_size=BLOCK,
        logits_rows=rows,
        long_rope=[one["long"] for one in sequences],
    )
    return batch, counts


@given(batches())
def test_a_part_is_the_batch_of_its_sequences(drawn: tuple[list[dict[str, Any]], list[int]]) -> None:
    sequences, chosen = drawn
    whole, counts = batch_of(sequences)
    part = part_of_batch(whole, chosen)
    wanted, _ = batch_of([sequences[one] for one in chosen])
    found = unpack(pickle.loads(pickle.dumps(pack(part.batch))))
    for name in TENSORS:
        ours, theirs = getattr(found, name), getattr(wanted, name)
        if name == "long_rope" and (ours is None or theirs is None):
            assert not any(bool(one.any()) for one in (ours, theirs) if one is not None)
        else:
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, name
    assert (found.query_lens, found.context_lens_list) == (wanted.query_lens, wanted.context_lens_list)
    owners = [one for one, count in enumerate(counts) for _ in range(count)]
    assert part.places.tolist() == [place for place, one in enumerate(owners) if one in chosen]
