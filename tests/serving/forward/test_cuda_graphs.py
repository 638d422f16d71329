"""Which graph a step goes to, and how it is padded: the part of CUDA graphs that needs no device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.ragged import RaggedBatch
from serving.forward.cuda_graphs import CudaGraphs, GraphSizes, StaticBatch, replayable
from serving.forward.padding import PADDING_SLOT
from serving.streams import IMMEDIATE, CudaCaptures

SIZES = GraphSizes(sequences=(1, 2, 4, 8), contexts=(64, 256))


def decode_step(contexts: list[int], spare_blocks: int = 0) -> RaggedBatch:
    """One new token a sequence; tables of distinct blocks, longer than needed by some blocks allocated ahead."""
    tables = [[100 * b + i for i in range(-(-n // 16) + spare_blocks)] for b, n in enumerate(contexts)]
    return RaggedBatch.build(
        tokens=[[7 + b] for b in range(len(contexts))],
        starts=[n - 1 for n in contexts],
        block_tables=tables,
        block_size=16,
    )


@given(
    sequences=st.sets(st.integers(1, 300), min_size=1),
    contexts=st.sets(st.integers(1, 5000), min_size=1),
    wanted=st.tuples(st.integers(1, 320), st.integers(0, 6000)),
)
def test_the_smallest_size_that_holds_a_step(sequences: set[int], contexts: set[int], wanted: tuple[int, int]) -> None:
    sizes = GraphSizes(sequences=tuple(sorted(sequences)), contexts=tuple(sorted(contexts)))
    holding = [(n, c) for n in sequences for c in contexts if n >= wanted[0] and c >= wanted[1]]
    assert sizes.fit(*wanted) == min(holding, default=None)
    assert sorted(sizes.all(), reverse=True) == sizes.all()


@given(st.integers(1, 2000), st.integers(1, 200_000))
def test_sizes_up_to_a_limit(sequences: int, context: int) -> None:
    sizes = GraphSizes.up_to(sequences, context)
    assert (sizes.sequences[-1], sizes.contexts[-1]) == (sequences, context)
    assert sizes.fit(1, 1) == (1, sizes.contexts[0])
    assert len(sizes.contexts) <= 3, "however long the longest is"
    for n in range(9, sequences, 7):  # padding never doubles a step of more than a few
        fit = sizes.fit(n, 1)
        assert fit is not None
        assert n <= fit[0] < 2 * n


@pytest.mark.parametrize("wrong", [(), (0, 1), (4, 2), (2, 2)])
def test_sizes_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending list"):
        GraphSizes(sequences=wrong, contexts=(64,))
    with pytest.raises(ValueError, match="ascending list"):
        GraphSizes(sequences=(1,), contexts=wrong)


def test_what_is_replayed() -> None:
    assert replayable(decode_step([5, 90]))
    two = RaggedBatch.build(tokens=[[1], [2, 3]], starts=[3, 0], block_tables=[[0], [1]], block_size=16)
    assert not replayable(two)
    silent = RaggedBatch.build(
        tokens=[[1], [2]], starts=[3, 0], block_tables=[[0], [1]], block_size=16, logits_rows=[0]
    )
    assert not replayable(silent)
    long = RaggedBatch.build(tokens=[[1]], starts=[3], block_tables=[[0]], block_size=16, long_rope=[True])
    assert not replayable(long)
    none = RaggedBatch.build(tokens=[], starts=[], block_tables=[], block_size=16)
    assert not replayable(none)


@given(
    st.lists(st.lists(st.integers(1, 256), min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_a_padded_step_begins_with_the_step(steps: list[list[int]], spare_blocks: int) -> None:
    """Whatever steps went before it through the same memory."""
    static = StaticBatch(SIZES, 16, "cpu")
    for contexts in steps:
        batch = decode_step(contexts, spare_blocks)
        size = SIZES.fit(len(contexts), max(contexts))
        assert size is not None
        static.fill(batch, size)
    padded, count = static.view(size), len(contexts)
    assert len(padded.tokens) == len(padded.query_lens) == size[0]
    for name in ("tokens", "positions", "slots", "context_lens", "logits_rows"):
        assert torch.equal(getattr(padded, name)[:count], getattr(batch, name)), name
    assert torch.equal(padded.query_start[: count + 1], batch.query_start)
    for row, context in enumerate(contexts):
        blocks = -(-context // 16)
        assert torch.equal(padded.block_tables[row, :blocks], batch.block_tables[row, :blocks])
    assert padded.slots[count:].tolist() == [PADDING_SLOT] * (size[0] - count)
    assert not padded.context_lens[count:].any()
    assert max(padded.context_lens_list) >= max(contexts)


def test_a_padded_step_stays_where_it_is() -> None:
    """Addresses are what a graph remembers."""
    static = StaticBatch(SIZES, 16, "cpu")
    before = static.view((4, 64))
    static.fill(decode_step([3, 60, 17]), (4, 64))
    after = static.view((4, 64))
    for name in ("tokens", "positions", "slots", "query_start", "context_lens", "block_tables", "logits_rows"):
        assert getattr(before, name).data_ptr() == getattr(after, name).data_ptr(), name
    assert before.tokens.tolist() == [7, 8, 9, 0]


class PlayedCuda:
    """As much of torch.cuda as capturing asks for, where there is no device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = 0
        self.captured_on: list[object] = []
        for name in ("Stream", "stream", "current_stream", "graph", "graph_pool_handle", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name, MagicMock()))
        monkeypatch.setattr(type(IMMEDIATE), "captures", lambda _: CudaCaptures(torch.device("cuda", 0)))

    def Stream(self, _device: torch.device) -> MagicMock:
        self.streams += 1
        return MagicMock()

    @contextmanager
    def graph(self, _graph: object, *, stream: object, **_rest: object) -> Iterator[None]:
        self.captured_on.append(stream)
        yield


def test_all_graphs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries keep memory for each stream. What a step needs is warmed up once for so many sequences."""
    cuda, steps = PlayedCuda(monkeypatch), list[int]()

    def step(batch: RaggedBatch) -> tuple[torch.Tensor]:
        steps.append(len(batch.tokens))
        return (batch.tokens,)

    CudaGraphs(step, SIZES, 16, torch.device("cpu")).warm_up()
    assert cuda.streams == 1 and len(cuda.captured_on) == 8 and len(set(map(id, cuda.captured_on))) == 1
    assert steps == [n for n in (8, 4, 2, 1) for _ in range(4)], "twice, then captured for each of two contexts"


def test_graphs_need_a_cuda_device() -> None:
    with pytest.raises(ValueError, match="CUDA device"):
        CudaGraphs(lambda batch: batch.tokens, SIZES, 16, torch.device("cpu"))
