"""The chunk codec: what arrives is what was sent, where it was meant to go, or CorruptChunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.handoff.chunk import Chunk, digest, encode, sealed, split, verify
from kvcache.handoff.tree_digest import LEAF
from kvcache.memory.device import DeviceKV
from serving.errors import CorruptChunk
from serving.kvspec import gqa
from serving.messages import LeaseId
from tests.fakes.kv_layouts import LAYOUTS, random_pool, token_at
from tests.fakes.sequences import lease_id

FENCE = lease_id("request/7", 3, "abc")


def write(chunk: Chunk, device_kv: DeviceKV, blocks: list[int]) -> None:
    """What a decode worker does with a chunk."""
    verify(chunk, device_kv)
    slots = device_kv.slots(blocks, chunk.start, chunk.end)
    for layer, parts in enumerate(split(chunk, device_kv), chunk.first_layer):
        device_kv.write(layer, slots, parts)


@pytest.mark.parametrize("name", list(LAYOUTS))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_kv_arrives_as_it_was_sent(name: str, data: st.DataObject) -> None:
    """Between pools of unequal block sizes and tables, in chunks cut anywhere; a plane may begin at any byte of one."""
    specs = LAYOUTS[name]
    sizes = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    tokens = data.draw(st.integers(1, 17))
    source, target = (random_pool(specs, -(-tokens // size) + 1, size, size) for size in sizes)
    there, here = (data.draw(st.permutations(range(device_kv.num_blocks))) for device_kv in (source, target))
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=3))})
    borders = sorted({0, len(specs), *data.draw(st.lists(st.integers(0, len(specs)), max_size=2))})
    for first, last in pairwise(borders):
        for start, end in pairwise(cuts):
            write(encode(source, FENCE, "layout", range(first, last), there, start, end), target, here)
    for layer in range(len(specs)):
        for position in range(tokens):
            assert token_at(target, layer, here, position) == token_at(source, layer, there, position)


def small_chunk() -> tuple[Chunk, DeviceKV]:
    device_kv = random_pool(LAYOUTS["one byte, then a scale"], 2, 2, 5)
    return encode(device_kv, FENCE, "layout", range(2), [1, 0], 1, 4), device_kv


def test_every_flipped_bit_is_found() -> None:
    chunk, device_kv = small_chunk()
    verify(chunk, device_kv)
    payload = bytes(chunk.payload)
    for bit in range(8 * len(payload)):
        harmed = bytearray(payload)
        harmed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptChunk) as refused:
            verify(replace(chunk, payload=bytes(harmed)), device_kv)
        assert refused.value.code == "digest"
    for bit in range(8 * len(chunk.digest)):
        wrong = bytearray(chunk.digest)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptChunk):
            verify(replace(chunk, digest=bytes(wrong)), device_kv)


def test_every_truncation_and_addition_is_found() -> None:
    chunk, device_kv = small_chunk()
    payload = bytes(chunk.payload)
    for changed in [*(payload[:n] for n in range(len(payload))), payload[1:], payload + b"\0", b"\0" + payload]:
        with pytest.raises(CorruptChunk):
            verify(replace(chunk, payload=changed), device_kv)
    for n in range(len(chunk.digest)):
        with pytest.raises(CorruptChunk):
            verify(replace(chunk, digest=chunk.digest[:n]), device_kv)


def leafy_chunk() -> tuple[Chunk, DeviceKV]:
    """Of three leaves and a part of a fourth; the first two are zeros, and so is the end of the last."""
    specs = (gqa(4, 64, "float32"),)
    device_kv = random_pool(specs, 104, 1, 5)
    slots = device_kv.slots(list(range(104)), 0, 104)
    values = [part.clone() for part in device_kv.read(0, slots)]
    flat = torch.cat([part.flatten() for part in values])
    flat[: 2 * LEAF], flat[-100:] = 0, 0
    device_kv.write(0, slots, [one.view(part.shape) for one, part in zip(flat.chunk(2), values, strict=True)])
    return encode(device_kv, FENCE, "layout", range(1), list(range(104)), 0, 104), device_kv


def test_what_is_harmed_across_leaves_is_found() -> None:
    chunk, device_kv = leafy_chunk()
    payload = bytes(chunk.payload)
    assert 3 * LEAF < len(payload) < 4 * LEAF and payload[:LEAF] == payload[LEAF : 2 * LEAF] == bytes(LEAF)
    verify(replace(chunk, payload=payload), device_kv)
    leaves = [payload[start : start + LEAF] for start in range(0, len(payload), LEAF)]
    whole = [*leaves[:3], leaves[3].ljust(LEAF, b"\0")]
    harmed = {
        "swapped leaves": b"".join((leaves[0], leaves[2], leaves[1], leaves[3])),
        "a leaf twice": b"".join((leaves[0], leaves[2], leaves[2], leaves[3])),
        "a leaf of zeros": b"".join((leaves[0], leaves[1], bytes(LEAF), leaves[3])),
        "a leaf less": b"".join(leaves[1:]),
        "a leaf more": bytes(LEAF) + payload,
        "zeros cut off": payload[:-8],
        "zeros of its own": payload + bytes(8),
        "filled up": b"".join(whole),
        "moved by a byte": payload[-1:] + payload[:-1],
    }
    for bit in (0, 8 * LEAF - 1, 8 * LEAF, 8 * 3 * LEAF - 1, 8 * 3 * LEAF, 8 * len(payload) - 1):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        harmed[f"bit {bit}"] = bytes(flipped)
    for what, changed in harmed.items():
        with pytest.raises(CorruptChunk):
            verify(replace(chunk, payload=changed), device_kv)
            pytest.fail(what)


def test_the_digest_is_what_the_protocol_says() -> None:
    """Of bytes wherever they lie. Where these change, KV_PROTOCOL has to."""
    payload = bytes(range(256)) * 600
    kinds = (payload, memoryview(payload), np.frombuffer(payload, np.uint8).data)
    assert {digest(b"header", kind).hex() for kind in kinds} == {"2414b92b7c14b6735c540a787c0d9645"}
    assert digest(b"header", b"").hex() == "4cde52cc89d88ed2cc653b5213442044"
    assert digest(b"header", b"a").hex() == "62e920987fcc93da8ae2c5816fb7b9b9"


@pytest.mark.parametrize(
    "change",
    [
        {"lease": replace(FENCE, lease="request/8")},
        {"lease": replace(FENCE, epoch=4)},
        {"lease": replace(FENCE, instance="abd")},
        {"layout": "other"},
        {"first_layer": 1},
        {"last_layer": 1},
        {"start": 0},
        {"end": 3},
        {"start": 2, "end": 5},
        {"encoding": "int8"},
        {"last_head": 1},
        {"first_head": 1, "last_head": 2},
    ],
    ids=str,
)
def test_the_digest_binds_the_payload_to_its_place(change: dict[str, object]) -> None:
    chunk, device_kv = small_chunk()
    with pytest.raises(CorruptChunk) as refused:
        verify(replace(chunk, **change), device_kv)  # type: ignore[arg-type]
    assert refused.value.code == "digest"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"first_layer": 2, "last_layer": 3}, "range"),
        ({"first_layer": 1, "last_layer": 1}, "range"),
        ({"first_layer": -1}, "range"),
        ({"start": 4}, "range"),
        ({"start": -1}, "range"),
        ({"first_layer": 1}, "length"),
        ({"end": 5}, "length"),
        ({"payload": b""}, "length"),
        ({"encoding": "int3"}, "encoding"),
        ({"encoding": "int8"}, "length"),
        ({"last_head": 1}, "heads"),
    ],
    ids=str,
)
def test_a_chunk_sealed_over_nonsense_is_refused_all_the_same(change: dict[str, object], code: str) -> None:
    chunk, device_kv = small_chunk()
    with pytest.raises(CorruptChunk) as refused:
        verify(sealed(replace(chunk, **change)), device_kv)  # type: ignore[arg-type]
    assert refused.value.code == code


WORD = st.text("ab/0123456789\0", max_size=4)
SMALL = st.integers(0, 12)
FIELDS = st.tuples(WORD, st.integers(0, 120), WORD, WORD, WORD, SMALL, SMALL, SMALL, SMALL, st.integers(0, 120))


@settings(max_examples=300, deadline=None)
@given(FIELDS, FIELDS)
def test_headers_are_equal_only_if_every_field_is(one: tuple[object, ...], other: tuple[object, ...]) -> None:
    def header(fields: tuple[object, ...]) -> bytes:
        lease, epoch, instance, *place = fields
        names = ("layout", "encoding", "first_layer", "last_layer", "first_head", "last_head", "start")
        fence = LeaseId(lease=lease, epoch=epoch, instance=instance)  # type: ignore[arg-type]
        chunk = Chunk(lease=fence, **dict(zip(names, place, strict=True)), end=130, payload=b"", digest=b"")  # type: ignore[arg-type]
        return chunk.header()

    assert (header(one) == header(other)) == (one == other)
