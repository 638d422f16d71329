"""Which graph a step with prompts goes to, and how it is padded: what needs no device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.layer_barrier import LayerBarrier
from serving.batch.ragged import KVSegment, OffloadedKV, RaggedBatch
from serving.forward.cuda_graphs import GraphSizes
from serving.forward.mixed_graphs import MixedSizes
from serving.forward.padding import PADDING_SLOT

SIZES = MixedSizes(sequences=(2, 6), contexts=(64, 256), tokens=(8, 40))
BLOCK = 16

# New tokens of some sequences, the tokens before them, and whether a token is drawn.
STEPS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 200), st.booleans()), min_size=1, max_size=6).filter(
    lambda step: sum(count for count, *_ in step) <= 38
)


def step_of(sequences: list[tuple[int, int, bool]], **rest: object) -> RaggedBatch:
    counts = [count for count, *_ in sequences]
    ends = [sum(counts[: b + 1]) - 1 for b in range(len(counts))]
    return RaggedBatch.build(
        tokens=[[7 + b] * count for b, count in enumerate(counts)],
        starts=[start for _, start, _ in sequences],
        block_tables=[
            [100 * b + i for i in range(-(-(start + n) // BLOCK))] for b, (n, start, _) in enumerate(sequences)
        ],
        block_size=BLOCK,
        logits_rows=[end for end, (*_, drawn) in zip(ends, sequences, strict=True) if drawn],
        **rest,  # type: ignore[arg-type]
    )


@given(
    sequences=st.sets(st.integers(1, 300), min_size=1),
    tokens=st.sets(st.integers(3, 600), min_size=1),
    wanted=st.tuples(st.integers(1, 320), st.integers(1, 90), st.integers(1, 700)),
)
def test_the_smallest_size_that_holds_a_step(
    sequences: set[int], tokens: set[int], wanted: tuple[int, int, int]
) -> None:
    sizes = MixedSizes(sequences=tuple(sorted(sequences)), contexts=(20, 80), tokens=tuple(sorted(tokens)))
    holding = [size for size in sizes.all() if all(has >= wants for has, wants in zip(size, wanted, strict=True))]
    assert sizes.fit(*wanted) == min(holding, key=lambda size: (size[2], size[0], size[1]), default=None)
    assert all(most - n >= 2 for n, _, most in sizes.all()), "a graph has one prompt at least, of two tokens"


@given(st.integers(1, 2000), st.integers(1, 9000))
def test_sizes_up_to_a_limit(sequences: int, tokens: int) -> None:
    mixed = GraphSizes.up_to(sequences, 10_000, tokens).mixed
    assert mixed is not None
    assert (mixed.sequences[-1], mixed.tokens[-1]) == (sequences, min(tokens, 512))
    assert all(later - one <= 128 for one, later in zip((0, *mixed.tokens), mixed.tokens, strict=False))
    assert len(mixed.all()) <= 4 * len(mixed.sequences) * 3
    assert GraphSizes.up_to(sequences, 10_000).mixed is None


def test_what_is_replayed() -> None:
    assert SIZES.size_of(step_of([(1, 9, True), (5, 0, True)])) == (2, 64, 8)
    assert SIZES.size_of(step_of([(5, 0, False)])) == (2, 64, 8), "a chunk that draws nothing"
    assert SIZES.size_of(step_of([(1, 9, True), (5, 0, True), (1, 70, True)])) == (6, 256, 8)
    assert SIZES.size_of(step_of([(7, 0, True)] * 6)) is None
    assert SIZES.size_of(step_of([(5, 0, True)], long_rope=[True])) is None
    assert SIZES.size_of(step_of([(5, 0, True)], barrier=LayerBarrier())) is None
    scored = RaggedBatch.build(
        tokens=[[1] * 8], starts=[0], block_tables=[[0]], block_size=BLOCK, logits_rows=list(range(7))
    )
    assert SIZES.size_of(scored) is None, "more logits than a step of this size draws from"


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("sizes", [SIZES, GraphSizes(sequences=(1, 2), contexts=(64, 256))], ids=["mixed", "decode"])
def test_kv_in_host_memory_is_in_no_graph(sizes: MixedSizes | GraphSizes, count: int) -> None:
    """A graph would take the rest of the sequence for its beginning."""
    step = {"tokens": [[1] * count], "starts": [130], "block_size": BLOCK}
    kept = Kept(128)
    assert sizes.size_of(RaggedBatch.build(**step, block_tables=[[3]], offloaded=kept)) is None  # type: ignore[arg-type]


class Kept(OffloadedKV):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def segments(self) -> Iterator[KVSegment]:
        return iter(())


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_a_padded_step_is_the_step_and_one_sequence_without_context(steps: list[list[tuple[int, int, bool]]]) -> None:
    """Whatever steps went before it through the same memory."""
    memory = SIZES.static(BLOCK, "cpu")
    for sequences in steps:
        batch = step_of(sequences)
        size = SIZES.size_of(batch)
        assert size is not None
        memory.fill(batch, size)
    padded, (n, context, most) = memory.view(size), size
    tokens, count, wanted = len(batch.tokens), len(batch.query_lens), len(batch.logits_rows)
    for name in ("tokens", "positions", "slots"):
        assert torch.equal(getattr(padded, name)[:tokens], getattr(batch, name)), name
    assert torch.equal(padded.logits_rows[:wanted], batch.logits_rows)
    assert torch.equal(padded.query_start[: count + 1], batch.query_start)
    assert torch.equal(padded.context_lens[:count], batch.context_lens)
    for row, end in enumerate(batch.context_lens_list):
        assert torch.equal(padded.block_tables[row, : -(-end // BLOCK)], batch.block_tables[row, : -(-end // BLOCK)])
    assert padded.query_start[count : n + 1].unique().tolist() == [tokens], "these have no query"
    assert padded.query_start[n + 1] == most == len(padded.tokens)
    assert padded.slots[tokens:].tolist() == [PADDING_SLOT] * (most - tokens)
    assert not padded.context_lens[count:].any() and not padded.logits_rows[wanted:].any()
    assert not padded.tokens[tokens:].any() and not padded.positions[tokens:].any(), "there is such a token, and angle"
    assert len(padded.query_lens) == len(padded.context_lens) == n + 1 and sum(padded.query_lens) == most
    assert max(padded.context_lens_list) == context and {1} < set(padded.query_lens), "both kinds of attention"


@pytest.mark.parametrize("size", SIZES.all())
def test_a_size_is_captured_over_padding(size: tuple[int, int, int]) -> None:
    memory = SIZES.static(BLOCK, "cpu")
    for before in ([(38, 3, True)], [(1, 5, True)] * 6, [(2, 5, True)] * 4):
        batch = step_of(before)
        fit = SIZES.size_of(batch)
        assert fit is not None
        memory.fill(batch, fit)
    memory.clear(size)
    view = memory.view(size)
    assert not view.context_lens.any() and set(view.slots.tolist()) == {PADDING_SLOT}
    assert view.query_start.diff().tolist() == [0] * size[0] + [size[2]] and not view.logits_rows.any()


def test_a_padded_step_stays_where_it_is() -> None:
    """Addresses are what a graph remembers."""
    memory = SIZES.static(BLOCK, "cpu")
    before = memory.view((6, 64, 40))
    memory.fill(step_of([(9, 3, True), (1, 60, True)]), (6, 64, 40))
    after = memory.view((6, 64, 40))
    for name in ("tokens", "positions", "slots", "query_start", "context_lens", "block_tables", "logits_rows"):
        assert getattr(before, name).data_ptr() == getattr(after, name).data_ptr(), name
    assert before.tokens.tolist() == [7] * 9 + [8] + [0] * 30
