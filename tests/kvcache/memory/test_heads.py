"""Slice maps: between any two degrees of tensor parallelism every receiver gets its heads, each once, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.handoff.chunk import Chunk, check, encode, join, sealed, split, verify
from kvcache.memory.device import DeviceKV
from kvcache.memory.heads import HeadSlice, slice_map
from kvcache.memory.kv_dtype import choose_wire, converted
from serving.errors import CorruptChunk
from serving.kvspec import LayerKV, gqa, gqa_int8, heads_of, with_heads
from tests.fakes.kv_layouts import LATENT, all_bytes, random_pool, same_parts
from tests.fakes.sequences import lease_id

SIZES = [(2, 1), (1, 2), (4, 2), (2, 4), (3, 1), (1, 3), (3, 2), (4, 4), (1, 1)]
HEADS = range(1, 9)
TOKENS = 7
BLOCKS = [2, 0, 1]


@settings(max_examples=300)
@given(heads=st.integers(1, 40), sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_every_receiver_gets_its_heads_once_and_in_order(heads: int, sizes: tuple[int, int]) -> None:
    from_size, to_size = sizes
    receivers = slice_map(heads, from_size, to_size)
    assert len(receivers) == to_size
    for rank, head_slices in enumerate(receivers):
        got = [
            heads_of(heads, head_slice.rank, from_size)[local]
            for head_slice in head_slices
            for local in head_slice.heads
        ]
        assert got == list(heads_of(heads, rank, to_size))
        assert [place for head_slice in head_slices for place in head_slice.place] == list(range(len(got)))
        assert all(
            head_slice.of == len(got) and head_slice.whole == (len(head_slices) == 1) for head_slice in head_slices
        )
        senders = [head_slice.rank for head_slice in head_slices]
        assert len(senders) == len(set(senders)), "heads of one sender go in one piece"


@settings(max_examples=200)
@given(heads=st.integers(1, 40), size=st.integers(1, 12))
def test_a_degree_shares_the_heads_out_evenly(heads: int, size: int) -> None:
    shares = [heads_of(heads, rank, size) for rank in range(size)]
    held = [head for share in shares for head in share]
    assert sorted(set(held)) == list(range(heads)), "no head is lost"
    assert held == sorted(held)
    if heads >= size:
        assert len(held) == heads, "no head is held twice"
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {len(share) for share in shares} == {1}
        holders = [held.count(head) for head in range(heads)]
        assert max(holders) - min(holders) <= 1


def test_receivers_take_turns_at_senders_of_the_same_head() -> None:
    assert [head_slices[0].rank for head_slices in slice_map(1, 4, 4)] == [0, 1, 2, 3]
    assert [head_slices[0].rank for head_slices in slice_map(2, 4, 2)] == [0, 3]


def shard(device_kv: DeviceKV, heads: range) -> DeviceKV:
    """What one rank of the worker with this whole pool holds; layers without heads are everywhere."""
    specs = [spec if spec.heads is None else with_heads(spec, len(heads)) for spec in device_kv.specs]
    made = DeviceKV(specs, device_kv.num_blocks, device_kv.block_size)
    for spec, ours, theirs in zip(device_kv.specs, made.planes, device_kv.planes, strict=True):
        for mine, whole in zip(ours, theirs, strict=True):
            mine.copy_(whole if spec.heads is None else whole[:, :, heads.start : heads.stop])
    return made


def write(chunk: Chunk, device_kv: DeviceKV) -> None:
    """What a decode worker does with a whole chunk."""
    verify(chunk, device_kv)
    for layer, parts in enumerate(split(chunk, device_kv), chunk.first_layer):
        device_kv.write(layer, device_kv.slots(BLOCKS, chunk.start, chunk.end), parts)


def blank(device_kv: DeviceKV) -> DeviceKV:
    return DeviceKV(device_kv.specs, device_kv.num_blocks, device_kv.block_size)


def send(source: DeviceKV, head_slice: HeadSlice, layers: range) -> Chunk:
    return encode(source, lease_id(), "layout", layers, BLOCKS, 0, TOKENS, head_slice=head_slice)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]} to {sizes[1]}")
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_kv_cut_sent_and_joined_is_the_original(sizes: tuple[int, int], heads: int, kind: str) -> None:
    """Also with layers that no degree can cut, which come whole from one rank."""
    headed = gqa_int8(heads, 6) if kind == "int8" else gqa(heads, 6, "bfloat16")
    model = random_pool((headed, headed, LATENT), 3, 3, seed=heads)
    from_size, to_size = sizes
    ranks = [shard(model, heads_of(heads, rank, from_size)) for rank in range(from_size)]
    for rank, (head_slices, (latent,)) in enumerate(
        zip(slice_map(heads, from_size, to_size), slice_map(1, from_size, to_size), strict=True)
    ):
        wanted = shard(model, heads_of(heads, rank, to_size))
        chunks = [send(ranks[head_slice.rank], head_slice, range(2)) for head_slice in head_slices]
        for chunk in chunks:
            check(chunk, wanted.specs)
        got = blank(wanted)
        write(join(chunks[::-1], wanted.specs), got)
        write(send(ranks[latent.rank], latent, range(2, 3)), got)
        slots = got.slots(BLOCKS, 0, TOKENS)
        for layer in range(3):
            assert same_parts(got.read(layer, slots), wanted.read(layer, slots))


def test_slices_are_converted_on_their_way() -> None:
    """Two ranks with a float KV cache send to one that keeps INT8, and the other way round through the wire's INT8."""
    float_specs, int8_specs = (gqa(4, 6, "float32"),) * 2, (gqa_int8(4, 6),) * 2
    generator = torch.Generator().manual_seed(1)
    for own, theirs in ((float_specs, int8_specs), (int8_specs, float_specs)):
        model = DeviceKV(own, 3, 3)
        for plane in (plane for planes in model.planes for plane in planes):
            values = torch.randn(plane.shape, generator=generator)
            plane.copy_((values * 30).clamp(-127, 127) if plane.dtype == torch.int8 else values)
        wire = choose_wire(own, theirs, "auto")
        assert wire.layers == int8_specs
        chunks = [
            encode(
                shard(model, heads_of(4, head_slice.rank, 2)),
                lease_id(),
                "layout",
                range(2),
                BLOCKS,
                0,
                TOKENS,
                wire=wire,
                head_slice=head_slice,
            )
            for head_slice in slice_map(4, 2, 1)[0]
        ]
        got = DeviceKV(theirs, 3, 3)
        write(join(chunks, theirs), got)
        slots = got.slots(BLOCKS, 0, TOKENS)
        for layer in range(2):
            expected = converted(model.read(layer, slots), own[layer], theirs[layer])
            assert same_parts(got.read(layer, slots), expected)


def three_slices() -> tuple[list[Chunk], tuple[LayerKV, ...]]:
    specs = (gqa(3, 2, "float32"),)
    model = random_pool(specs, 3, 3, seed=5)
    return [send(shard(model, heads_of(3, p.rank, 3)), p, range(1)) for p in slice_map(3, 3, 1)[0]], specs


@pytest.mark.parametrize("which", [(0, 1), (1, 2), (0, 2), (0, 0, 1), (0, 1, 2, 2), (0,)], ids=str)
def test_missing_and_repeated_heads_are_refused(which: tuple[int, ...]) -> None:
    chunks, specs = three_slices()
    assert join(chunks, specs).whole
    with pytest.raises(CorruptChunk) as refused:
        join([chunks[index] for index in which], specs)
    assert refused.value.code == "heads"


@pytest.mark.parametrize(
    "change", [{"start": 1, "end": TOKENS + 1}, {"layout": "b"}, {"lease": lease_id(epoch=1)}], ids=str
)
def test_slices_of_different_places_are_not_joined(change: dict[str, object]) -> None:
    chunks, specs = three_slices()
    chunks[1] = sealed(replace(chunks[1], **change))  # type: ignore[arg-type]
    with pytest.raises(CorruptChunk) as refused:
        join(chunks, specs)
    assert refused.value.code == "heads"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"first_head": 0}, "digest"),
        ({"last_head": 3}, "digest"),
        ({"first_head": 2, "last_head": 1}, "heads"),
        ({"last_head": 4}, "heads"),
        ({"first_head": 2}, "heads"),
        ({"first_head": -1, "last_head": 0}, "heads"),
        ({"last_head": 3, "first_head": 1}, "length"),
        ({"first_head": 0, "last_head": 0}, "length"),
    ],
    ids=str,
)
def test_a_piece_with_wrong_heads_is_refused(change: dict[str, int], code: str) -> None:
    chunks, specs = three_slices()
    wrong = replace(chunks[1], **change)  # type: ignore[arg-type]
    with pytest.raises(CorruptChunk) as refused:
        check(wrong if code == "digest" else sealed(wrong), specs)
    assert refused.value.code == code


def test_a_worker_of_one_rank_takes_no_pieces() -> None:
    chunks, specs = three_slices()
    device_kv = DeviceKV(specs, 3, 3)
    before = all_bytes(device_kv)
    with pytest.raises(CorruptChunk) as refused:
        write(chunks[0], device_kv)
    assert refused.value.code == "heads" and all_bytes(device_kv) == before


def test_a_layer_without_heads_is_never_a_piece() -> None:
    device_kv = random_pool((LATENT,), 3, 3, seed=2)
    chunk = encode(device_kv, lease_id(), "layout", range(1), BLOCKS, 0, TOKENS)
    with pytest.raises(CorruptChunk) as refused:
        check(sealed(replace(chunk, first_head=0, last_head=1)), device_kv.specs)
    assert refused.value.code == "heads"
