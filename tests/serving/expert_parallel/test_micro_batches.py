"""Steps in two halves have the bits of whole ones, over every exchange, and halves lose no row."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import Store

from serving.batch.ragged import RaggedBatch
from serving.expert_parallel.layer import apply_expert_parallel, exchange_shape, hold_experts
from serving.expert_parallel.micro_batches import halves, overlap_pays, overlapped_step
from serving.model.expert_balance import Layout, placed
from serving.model.moe import FEWEST
from tests.serving.expert_parallel.groups import join
from tests.serving.expert_parallel.ranks import Ranks
from tests.serving.expert_parallel.rebalanced import EXPERTS, LAYERS, model_of

BLOCK = 8
LENGTHS = ((5, 3, 4, 1, 6), (2,), (1,) * 9, ())  # of each rank's sequences: the second's cannot be halved


def batch_of(lengths: tuple[int, ...], step: int) -> RaggedBatch:
    """Each sequence has a block of its own; with every step other tokens."""
    draw = random.Random(step)
    return RaggedBatch.build(
        tokens=[[draw.randrange(100) for _ in range(length)] for length in lengths],
        starts=[0] * len(lengths),
        block_tables=[[number] for number in range(len(lengths))],
        block_size=BLOCK,
    )


def compute_in_halves(
    rank: int, store: Store, _: Connection, kind: str, weights: str, ranks: int
) -> tuple[list[int], list[tuple[str, int]]]:
    """The steps whose bits are not those of one process, and what the last one did in turn."""
    alone, model, wrong, notes = model_of(weights), model_of(weights), [], list[tuple[str, int]]()
    spread = [placed([1.0] * EXPERTS, Layout(ranks=ranks, slots=-(-EXPERTS // ranks)))] * LAYERS
    hold_experts(model, spread, rank)
    exchange = join(kind, exchange_shape(model, spread[0], 24), rank, store)
    apply_expert_parallel(model, spread, exchange)
    kv, other = (
        [tuple(torch.zeros(9, BLOCK, *one.shape) for one in layer.planes) for layer in model.spec.kv_layers("float32")]
        for _ in range(2)
    )
    with torch.inference_mode():
        for step in range(6):
            notes.clear()
            batch = batch_of(LENGTHS[rank], step) if LENGTHS[rank] and rank < ranks - 1 else None
            found = overlapped_step(model, batch, kv, lambda what, half, *_: notes.append((what, half)))
            if batch is not None and not torch.equal(found, alone(batch, other)):
                wrong.append(step)
    exchange.close()
    return wrong, notes


@pytest.mark.parametrize(
    ("kind", "weights", "ranks"),
    [("shared_memory", "float32", 4), ("all_to_all", "int8", 3), ("hierarchical", "float32", 4)],
)
def test_halves_have_the_bits_of_one_process(kind: str, weights: str, ranks: int) -> None:
    with Ranks() as group:
        answers = [one.answer() for one in group.start_all(ranks, compute_in_halves, kind, weights, ranks)]
    assert [wrong for wrong, _ in answers] == [[]] * ranks
    layer = [("attention", 0), ("attention", 1), ("experts", 0), ("experts", 1)]
    assert answers[0][1] == layer * LAYERS + [("norm", 0), ("norm", 1)]


@given(st.lists(st.integers(1, BLOCK), min_size=1, max_size=12))
def test_halves_share_the_rows(lengths: list[int]) -> None:
    batch = batch_of(tuple(lengths), 0)
    first, second = halves(batch)
    parts = [first] if second is None else [first, second]
    assert torch.cat([part.rows for part in parts]).tolist() == list(range(sum(lengths)))
    for part in parts:
        assert len(part.batch.query_lens) == len(part.batch.block_tables)
        assert torch.equal(part.batch.tokens, batch.tokens[part.rows])
        assert torch.equal(part.batch.slots, batch.slots[part.rows])
    if second is not None:
        assert min(len(part.rows) for part in parts) >= FEWEST
        assert abs(len(first.rows) - len(second.rows)) <= max(lengths)


def test_halves_are_made_where_they_can_be() -> None:
    assert halves(batch_of((1,) * 8, 0))[1] is not None
    assert halves(batch_of((1,) * 7, 0))[1] is None
    assert halves(batch_of((8,), 0))[1] is None


def test_overlap_pays_where_every_run_gains() -> None:
    whole = [[1.0, 1.0, 9.0]] * 3
    assert overlap_pays(whole, [[0.95, 0.95, 20.0]] * 3)
    assert not overlap_pays(whole, [[0.9, 0.9, 0.9], [0.96, 0.96, 0.96], [0.9, 0.9, 0.9]])
