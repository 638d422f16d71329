"""The device pool: tokens come out of and go into their blocks as bytes, wherever the block table puts them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.device import DevicePool, blocks_in, token_bytes
from serving.kvspec import gqa
from tests.kvcache.layers import INT8, LAYOUTS, all_bytes, random_pool, token_at


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_tokens_are_read_from_where_the_table_says(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    pool = random_pool(LAYOUTS[name], 6, size, data.draw(st.integers(0, 99)))
    blocks = data.draw(st.permutations(range(6)))
    start = data.draw(st.integers(0, 6 * size - 1))
    end = data.draw(st.integers(start + 1, 6 * size))
    slots = pool.slots(blocks, start, end)
    for layer in range(len(pool.specs)):
        parts = pool.read(layer, slots)
        assert all(part.dtype == torch.uint8 and part.shape[0] == end - start for part in parts)
        for i, position in enumerate(range(start, end)):
            got = b"".join(part[i].numpy().tobytes() for part in parts)
            assert got == token_at(pool, layer, blocks, position)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_writing_changes_those_tokens_and_no_others(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    source = random_pool(LAYOUTS[name], 5, size, 1)
    target = random_pool(LAYOUTS[name], 7, size, 2)
    start = data.draw(st.integers(0, 5 * size - 1))
    end = data.draw(st.integers(start + 1, 5 * size))
    there, here = data.draw(st.permutations(range(5))), data.draw(st.permutations(range(7)))
    layer = data.draw(st.integers(0, len(source.specs) - 1))
    expected = [
        token_at(source, layer, there, p) if start <= p < end else token_at(target, layer, here, p)
        for p in range(7 * size)
    ]
    target.write(layer, target.slots(here, start, end), source.read(layer, source.slots(there, start, end)))
    assert [token_at(target, layer, here, p) for p in range(7 * size)] == expected


def test_what_was_read_does_not_change_with_the_pool() -> None:
    pool = random_pool((gqa(1, 2, "float32"),), 2, 2, 3)
    part = pool.read(0, pool.slots([1, 0], 0, 4))[0].clone()
    kept = pool.read(0, pool.slots([1, 0], 0, 4))[0]
    for plane in pool.planes[0]:
        plane.zero_()
    assert torch.equal(kept, part)


def test_a_new_pool_is_zero_and_shaped_by_its_specs() -> None:
    pool = DevicePool((INT8, gqa(2, 4, "bfloat16")), 3, 2)
    shapes = [tuple(plane.shape) for planes in pool.planes for plane in planes]
    assert shapes == [(3, 2, 3), (3, 2), (3, 2, 2, 5), (3, 2, 2, 4), (3, 2, 2, 4)]
    assert set(all_bytes(pool)) == {0}


def test_memory_is_counted_over_all_planes_of_all_layers() -> None:
    specs = (INT8, gqa(2, 4, "bfloat16"))
    assert token_bytes(specs) == (3 + 4 + 10) + 2 * 2 * 4 * 2
    assert blocks_in(1000, specs, 4) == 1000 // (49 * 4)
