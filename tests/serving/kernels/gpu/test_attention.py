"""Paged attention, decode and prompt, against the reference over shuffled pages full of NaN where no token is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from serving.batch.ragged import RaggedBatch
from serving.kernels import gpu
from serving.kernels.gpu import decode_attention
from serving.kernels.gpu.decode_attention import splits_of
from tests.serving.kernels.gpu.formulas import CLOSE, Pages, error

SCALE = 0.11

# (contexts, how many of their last tokens are this step's)
DECODE = ([1, 16, 17, 300], [1, 1, 1, 1])
PROMPTS = ([5, 70, 33], [5, 70, 33])
CHUNKS = ([90, 64, 150], [20, 2, 70])
MIXED = ([40, 1, 100, 280, 3], [1, 1, 37, 1, 3])


def attend(
    contexts: list[int],
    counts: list[int],
    *,
    device: torch.device,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    int8: bool = False,
) -> float:
    """The error against the reference."""
    pages = Pages(contexts, block_size, heads[1], head_dim, dtype, device, int8=int8)
    batch = pages.batch([n - count for n, count in zip(contexts, counts, strict=True)], counts)
    q = torch.randn(sum(counts), heads[0], head_dim).to(dtype)
    out = gpu.paged_attention(q.to(device), *pages.planes, batch, SCALE, window, *pages.scales)
    assert out.dtype is dtype
    return error(out, pages.expected(q, counts, SCALE, window))


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("step", [DECODE, PROMPTS, CHUNKS, MIXED], ids=["decode", "prompts", "chunks", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_step(
    step: tuple[list[int], list[int]], window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    assert attend(*step, window=window, dtype=dtype, device=device) < CLOSE[dtype]


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (7, 1), (16, 2)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_groups_and_head_sizes(heads: tuple[int, int], head_dim: int, device: torch.device) -> None:
    assert attend([20, 45], [1, 9], heads=heads, head_dim=head_dim, device=device) < CLOSE[torch.float32]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_kv(block_size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
    assert attend(*MIXED, int8=True, block_size=block_size, window=window, dtype=dtype, device=device) < CLOSE[dtype]


@pytest.mark.parametrize("window", [1, 255, 256, 257, 700])
def test_windows_over_the_borders_of_splits(window: int, device: torch.device) -> None:
    assert attend([512, 513, 800], [1, 1, 1], window=window, block_size=32, device=device) < CLOSE[torch.float32]


@pytest.mark.parametrize("window", [None, 1, 130, 700])
def test_splits_grow_where_there_would_be_too_many(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four splits at most, of 64 tokens at least."""
    monkeypatch.setattr(decode_attention, "SPLITS", 4)
    monkeypatch.setattr(decode_attention, "SHORTEST", 64)
    contexts = [1, 64, 256, 257, 513, 900]
    assert attend(contexts, [1] * 6, window=window, device=device) < CLOSE[torch.float32]


def test_float16(device: torch.device) -> None:
    assert attend(*MIXED, dtype=torch.float16, device=device) < CLOSE[torch.float16]


def test_many_short_sequences_find_their_tiles(device: torch.device) -> None:
    lengths = [1, 2, 3, 1, 9, 4, 2, 2, 1, 30, 2]
    assert attend(lengths, lengths, heads=(2, 1), device=device) < CLOSE[torch.float32]


def test_rows_do_not_depend_on_the_batch(device: torch.device) -> None:
    """Alone, among longer ones, and padded: a sequence's rows are the same to the bit."""
    contexts, counts = [260, 700, 40], [1, 1, 6]
    pages = Pages(contexts, 16, 2, 64, torch.float32, device)
    q = torch.randn(8, 4, 64).to(device)
    starts = [n - count for n, count in zip(contexts, counts, strict=True)]
    together = gpu.paged_attention(q, *pages.planes, pages.batch(starts, counts), SCALE, None)
    rows = 0
    for i, count in enumerate(counts):
        mine = pages.batch(starts, counts)
        alone = type(mine).build(
            tokens=[[0] * count], starts=[starts[i]], block_tables=[pages.tables[i]], block_size=16, device=device
        )
        out = gpu.paged_attention(q[rows : rows + count], *pages.planes, alone, SCALE, None)
        assert torch.equal(out, together[rows : rows + count])
        rows += count


def test_rows_do_not_depend_on_the_chunk(device: torch.device) -> None:
    """A token gets the same numbers, to the bit, wherever its prompt is cut, down to two tokens.

    Chunks begin where tiles of 32 queries do: the interpreter multiplies with the CPU's library, where a row's place in
    the tile matters.
    """
    pages = Pages([150], 16, 2, 64, torch.float32, device)
    q = torch.randn(150, 4, 64).to(device)
    whole = gpu.paged_attention(q, *pages.planes, pages.batch([0], [150]), SCALE, None)
    for first, end in ((0, 64), (64, 101), (32, 34), (96, 110), (128, 150)):
        batch = pages.batch([first], [end - first])
        out = gpu.paged_attention(q[first:end], *pages.planes, batch, SCALE, None)
        assert torch.equal(out, whole[first:end])


def test_how_many_splits() -> None:
    """No more than 32, however long the context is that a graph is captured for."""
    assert [splits_of(n, None) for n in (0, 1, 256, 257, 4096, 8192, 131_072)] == [1, 1, 1, 2, 16, 32, 32]
    assert [splits_of(4096, window) for window in (1, 193, 194, 450, 9000)] == [1, 1, 2, 3, 16]


class Launches:
    """Stands for a kernel: notes how it is launched, and launches nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.forms: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_arguments: Any, **form: Any) -> None:
            self.grids.append(grid)
            self.forms.append(form)

        return launch


@pytest.mark.parametrize("window", [None, 4096])
def test_a_launch_does_not_grow_with_the_longest_context(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What warming up compiles for a short context is what a long one takes, and its programs are few."""
    decoding, combining = Launches(), Launches()
    monkeypatch.setattr(decode_attention, "_decode_kernel", decoding)
    monkeypatch.setattr(decode_attention, "_combine_kernel", combining)
    plane, q = torch.zeros(2, 16, 2, 64, device=device), torch.zeros(128, 4, 64, device=device)
    for context in (1, 1000, 131_072):
        batch = RaggedBatch.build(
            tokens=[[0]] * 128, starts=[0] * 128, block_tables=[[0]] * 128, block_size=16, device=device
        )
        gpu.paged_attention(q, plane, plane, replace(batch, context_lens_list=(context,) * 128), SCALE, window)
    assert [grid[2] for grid in decoding.grids] == [1, 4, 32 if window is None else 17]
    for launches in (decoding, combining):
        assert all(form == launches.forms[0] for form in launches.forms)


def test_what_is_refused(device: torch.device) -> None:
    pages = Pages([20], 16, 2, 64, torch.float32, device)
    batch = pages.batch([19], [1])
    q = torch.randn(1, 4, 64, device=device)
    with pytest.raises(ValueError, match="not supported"):
        gpu.paged_attention(q.bfloat16(), *pages.planes, batch, SCALE, None)
    with pytest.raises(ValueError, match="not supported"):
        gpu.paged_attention(q[:, :3], *pages.planes, batch, SCALE, None)
    with pytest.raises(ValueError, match="dimensions"):
        gpu.paged_attention(q[..., :32], *pages.planes, batch, SCALE, None)
    with pytest.raises(ValueError, match="window"):
        gpu.paged_attention(q, *pages.planes, batch, SCALE, 0)
    int8 = Pages([20], 16, 2, 64, torch.float32, device, int8=True)
    with pytest.raises(ValueError, match="scales"):
        gpu.paged_attention(q, *int8.planes, batch, SCALE, None)
