"""The device pool: tokens come out of and go into their blocks as bytes, wherever the block table puts them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.connector.block_io import part_bytes, read_blocks, write_part
from kvcache.memory.device import DeviceKV, blocks_in, token_bytes
from kvcache.memory.kv_dtype import stored_as
from serving.host_memory import PAGE
from serving.kvspec import gqa
from tests.fakes.kv_layouts import INT8, LAYOUTS, WITH_ROOM, WITHOUT_ROOM, all_bytes, random_pool, same_parts, token_at


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_tokens_are_read_from_where_the_table_says(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    device_kv = random_pool(LAYOUTS[name], 6, size, data.draw(st.integers(0, 99)))
    blocks = data.draw(st.permutations(range(6)))
    start = data.draw(st.integers(0, 6 * size - 1))
    end = data.draw(st.integers(start + 1, 6 * size))
    slots = device_kv.slots(blocks, start, end)
    for layer in range(len(device_kv.specs)):
        parts = device_kv.read(layer, slots)
        assert all(part.dtype == torch.uint8 and part.shape[0] == end - start for part in parts)
        for i, position in enumerate(range(start, end)):
            got = b"".join(part[i].numpy().tobytes() for part in parts)
            assert got == token_at(device_kv, layer, blocks, position)


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
    device_kv = random_pool((gqa(1, 2, "float32"),), 2, 2, 3)
    part = device_kv.read(0, device_kv.slots([1, 0], 0, 4))[0].clone()
    kept = device_kv.read(0, device_kv.slots([1, 0], 0, 4))[0]
    for plane in device_kv.planes[0]:
        plane.zero_()
    assert torch.equal(kept, part)


def test_a_new_pool_is_zero_and_shaped_by_its_specs() -> None:
    device_kv = DeviceKV((INT8, gqa(2, 4, "bfloat16")), 3, 2)
    shapes = [tuple(plane.shape) for planes in device_kv.planes for plane in planes]
    assert shapes == [(3, 2, 3), (3, 2), (3, 2, 2, 5), (3, 2, 2, 4), (3, 2, 2, 4)]
    assert set(all_bytes(device_kv)) == {0}


def test_planes_lie_one_after_another_on_pages_of_their_own() -> None:
    """So that large pages hold them all, and each can be pinned."""
    device_kv = DeviceKV((INT8, gqa(2, 4, "bfloat16")), 700, 3)
    planes = [plane for layer in device_kv.planes for plane in layer]
    assert [plane.data_ptr() - planes[0].data_ptr() for plane in planes] == [
        sum(-(-before.nbytes // PAGE) * PAGE for before in planes[:number]) for number in range(len(planes))
    ]
    assert planes[0].data_ptr() % PAGE == 0


def test_memory_is_counted_over_all_planes_of_all_layers() -> None:
    specs = (INT8, gqa(2, 4, "bfloat16"))
    assert token_bytes(specs) == (3 + 4 + 10) + 2 * 2 * 4 * 2
    assert blocks_in(1000, specs, 4) == 1000 // (49 * 4)


@pytest.mark.parametrize("name", WITH_ROOM)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_int8_within_float_blocks_keeps_its_bytes_and_no_others(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    device_kv = random_pool(WITH_ROOM[name], 6, size, data.draw(st.integers(0, 99)))
    assert device_kv.can_keep("int8") and device_kv.kept_as("auto") is device_kv
    kept = device_kv.kept_as("int8")
    assert kept.specs == tuple(stored_as(spec, "int8") for spec in device_kv.specs) and kept is device_kv.kept_as(
        "int8"
    )
    source = random_pool(kept.specs, 6, size, 7)
    start = data.draw(st.integers(0, 6 * size - 1))
    end = data.draw(st.integers(start + 1, 6 * size))
    there, here = data.draw(st.permutations(range(6))), data.draw(st.permutations(range(6)))
    layer = data.draw(st.integers(0, len(device_kv.specs) - 1))
    before = [[token_at(device_kv, i, here, p) for p in range(6 * size)] for i in range(len(device_kv.specs))]
    kept.write(layer, kept.slots(here, start, end), source.read(layer, source.slots(there, start, end)))
    for position in range(start, end):
        assert token_at(kept, layer, here, position) == token_at(source, layer, there, position)
    read = kept.read(layer, kept.slots(here, start, end))
    assert same_parts(read, source.read(layer, source.slots(there, start, end)))
    for i, tokens in enumerate(before):
        for position, old in enumerate(tokens):
            if i != layer or not start <= position < end:
                assert token_at(device_kv, i, here, position) == old


@pytest.mark.parametrize("name", WITH_ROOM)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_whole_blocks_of_int8_within_float_blocks(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    kept = random_pool(WITH_ROOM[name], 6, size, 1).kept_as("int8")
    source = random_pool(kept.specs, 9, size, 2)
    there = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=6, unique=True))
    here = data.draw(st.permutations(range(6)))[: len(there)]
    keys = [bytes([i]) * 32 for i in range(len(there))]
    blocks = read_blocks(source, there, keys, "n")
    begin = 0
    for layer, width in enumerate(part_bytes(kept)):
        part = b"".join(bytes(block.payload[begin : begin + width]) for block in blocks)
        write_part(kept, layer, here, part)
        begin += width
    assert read_blocks(kept, here, keys, "n") == blocks


@pytest.mark.parametrize("name", WITHOUT_ROOM)
def test_what_has_no_room_for_int8_says_so(name: str) -> None:
    device_kv = DeviceKV(WITHOUT_ROOM[name], 2, 2)
    assert not device_kv.can_keep("int8")
    assert not any(device_kv.can_keep(dtype) for dtype in ("auto", "bfloat16", "float32", "fp8"))


@pytest.mark.skipif(not Path("/proc/sys/vm/overcommit_memory").exists(), reason="what Linux promises")
def test_more_kv_than_there_is_memory_can_be_made() -> None:
    """It is taken as it is written."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this kernel promises no more memory than there is")
    specs = [gqa(8, 128, "bfloat16")] * 32
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    blocks = memory * 3 // 2 // (token_bytes(specs) * 16)
    planes = [plane for layer in DeviceKV(specs, blocks, 16).planes for plane in layer]
    assert sum(plane.numel() * plane.element_size() for plane in planes) > memory * 1.4
    planes[-1][-1] = 1
