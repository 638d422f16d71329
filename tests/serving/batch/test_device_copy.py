"""Arrays packed for one copy come out of it as they went in, each where kernels like it to begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.device_copy import ALIGNMENT, all_on_device, on_device, pack, unpacked
from serving.batch.ragged import RaggedBatch
from serving.streams import IMMEDIATE

SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=2)
KINDS = st.sampled_from([np.int64, np.int32, np.float64, np.bool_])


@given(st.lists(st.tuples(SHAPES, KINDS), max_size=6), st.integers(0, 2**32 - 1))
def test_packed_arrays_come_out_as_they_were(kinds: list[tuple[list[int], type]], seed: int) -> None:
    numbers = np.random.default_rng(seed)
    arrays = [numbers.integers(0, 2, shape).astype(kind) for shape, kind in kinds]
    room = pack(arrays, IMMEDIATE)
    views = unpacked(room.clone(), arrays)
    for array, view in zip(arrays, views, strict=True):
        assert torch.equal(view, torch.from_numpy(array)) and view.dtype is torch.from_numpy(array).dtype
        assert view.storage_offset() * view.element_size() % ALIGNMENT == 0


def test_on_the_cpu_they_stay_where_they_are() -> None:
    array = np.arange(5)
    (found,) = all_on_device([array], "cpu")
    array[0] = 7
    assert found.tolist() == [7, 1, 2, 3, 4]
    assert on_device([1, 2], torch.float32, "cpu").tolist() == [1.0, 2.0]


def test_a_batch_refuses_a_table_that_ends_too_soon() -> None:
    with pytest.raises(AssertionError, match="ends too soon"):
        RaggedBatch.build(tokens=[[1], [2]], starts=[16, 3], block_tables=[[0], [1, 2]], block_size=16)
