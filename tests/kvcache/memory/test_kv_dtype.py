"""Re-laying KV between dtypes: the bits the receiver's own kernels would have written, on the wire as off it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache.handoff.chunk import encode, split, verify
from kvcache.memory.device import DeviceKV
from kvcache.memory.kv_dtype import AS_STORED, choose_wire, converted, convertible, stored_as
from serving import kernels
from serving.errors import StaleLease
from serving.kernels import cpu
from serving.kvspec import LayerKV, Plane, gqa, gqa_int8
from tests.fakes.kv_layouts import INT8, LATENT, LAYOUTS, SCALE_LAST, same_parts
from tests.fakes.sequences import lease_id
from tests.serving.kernels.cpu.formulas import SmallDecoder, ragged

FLOATS = ("float32", "bfloat16", "float16")
HEADS, DIM, TOKENS, BLOCK = 3, 24, 40, 4


def layer_of(dtype: str) -> LayerKV:
    return gqa_int8(HEADS, DIM) if dtype == "int8" else gqa(HEADS, DIM, dtype)


def numbers(seed: int, tokens: int = TOKENS) -> Tensor:
    """[tokens, HEADS, DIM] of very unequal rows, some of them all zeros, and rows of ties between two integers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, HEADS, DIM, generator=generator)
    values *= 10.0 ** torch.randint(-6, 4, (tokens, HEADS, 1), generator=generator)
    values[::7, 0] = 0.0
    values[::5, 1] = torch.randint(-254, 255, (DIM,), generator=generator) / 2
    values[::5, 1, 0] = 127.0
    return values


def filled(dtype: str, seed: int) -> DeviceKV:
    """A pool of a few layers, into which the reference kernels have written the same keys and values."""
    specs = (layer_of(dtype),) * 2
    device_kv = DeviceKV(specs, TOKENS // BLOCK, BLOCK)
    for layer, planes in enumerate(device_kv.planes):
        k, v = numbers(seed + layer), numbers(seed + layer + 100)
        kernels.write_kv(k, v, planes, torch.arange(TOKENS))
    return device_kv


def read(device_kv: DeviceKV, layer: int = 0) -> list[Tensor]:
    return device_kv.read(layer, device_kv.slots(range(device_kv.num_blocks), 0, TOKENS))


# ---- the same bits as the kernels' ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", ["int8", *FLOATS])
def test_float32_becomes_what_the_reference_kernels_store(dtype: str, seed: int) -> None:
    found = converted(read(filled("float32", seed)), layer_of("float32"), layer_of(dtype))
    assert same_parts(found, read(filled(dtype, seed)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_become_what_the_reference_kernels_store_of_them(dtype: str) -> None:
    """A model of that type hands its keys and values to the kernels in it."""
    kind: torch.dtype = getattr(torch, dtype)
    k, v = (numbers(seed).clamp(-3e4, 3e4).to(kind) for seed in (1, 2))
    narrow, int8 = (DeviceKV((layer_of(name),), TOKENS // BLOCK, BLOCK) for name in (dtype, "int8"))
    for device_kv in (narrow, int8):
        kernels.write_kv(k, v, device_kv.planes[0], torch.arange(TOKENS))
    assert same_parts(converted(read(narrow), layer_of(dtype), layer_of("int8")), read(int8))


@pytest.mark.skipif(cpu.shared_library() is None, reason="the compiled kernels cannot be built here")
@pytest.mark.parametrize("to", [cpu.Kind.INT8, cpu.Kind.BF16])
def test_float32_becomes_what_the_compiled_kernels_store(to: cpu.Kind) -> None:
    """In every form this CPU runs, with heads that fill its vectors and heads that do not."""
    library = cpu.shared_library()
    assert library is not None
    batch = ragged([(3, 40), (200, 1), (0, 300)])
    for form in cpu.forms(library):
        loaded = cpu.load(threads=1, form=form)
        assert loaded is not None
        for dim in (32, 24, 80):
            stored = {}
            qkv = torch.randn(341, 10 * dim, generator=torch.Generator().manual_seed(dim)) * 3
            for kind in (cpu.Kind.F32, to):
                size = {"head_dim": dim, "rotary_dim": dim, "hidden": 16, "intermediate": 16, "vocab": 16, "layers": 1}
                small = SmallDecoder(kind=cpu.Kind.F32, kv_kind=kind, windows=(0,), **size)  # type: ignore[arg-type]
                small.build(loaded).rotate_and_write(0, batch, qkv.clone())
                planes = (small.planes[0].k, small.planes[0].v, small.planes[0].k_scale, small.planes[0].v_scale)
                rows = [plane.flatten(0, 1)[batch.slots].contiguous() for plane in planes if plane is not None]
                stored[kind] = [row.view(len(row), -1).view(torch.uint8) for row in rows]
            target = gqa_int8(2, dim) if to is cpu.Kind.INT8 else gqa(2, dim, "bfloat16")
            assert same_parts(converted(stored[cpu.Kind.F32], gqa(2, dim, "float32"), target), stored[to]), (form, dim)
        loaded.close()


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_becomes_what_its_readers_take_it_for(dtype: str) -> None:
    device_kv = filled("int8", 3)
    k, v, k_scale, v_scale = device_kv.planes[0]
    found = converted(read(device_kv), layer_of("int8"), layer_of(dtype))
    for part, plane, scale in zip(found, (k, v), (k_scale, v_scale), strict=True):
        taken = (plane.float() * scale[..., None]).to(getattr(torch, dtype))
        assert torch.equal(part.view(taken.dtype).view(TOKENS, HEADS, DIM), taken.flatten(0, 1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_there_and_back_changes_nothing_that_is_stored_wider(dtype: str) -> None:
    parts = read(filled(dtype, 4))
    assert same_parts(
        converted(converted(parts, layer_of(dtype), layer_of("float32")), layer_of("float32"), layer_of(dtype)), parts
    )


@pytest.mark.parametrize("dtype", ["int8", *FLOATS])
def test_equal_layouts_are_passed_through_untouched(dtype: str) -> None:
    parts = read(filled(dtype, 4))
    assert [part.data_ptr() for part in converted(parts, layer_of(dtype), layer_of(dtype))] == [
        part.data_ptr() for part in parts
    ]


def test_values_that_are_no_numbers_stay_so() -> None:
    values = numbers(1)
    values[3, 1, 2] = torch.nan
    part = values.view(TOKENS, -1).view(torch.uint8)
    int8 = converted([part, part], layer_of("float32"), layer_of("int8"))
    back = converted(int8, layer_of("int8"), layer_of("float32"))[0].view(torch.float32).view(TOKENS, HEADS, DIM)
    wrong = back.isnan().any(-1)
    assert wrong[3, 1] and int(wrong.sum()) == 1, "one head of one token, and no other"


# ---- which layouts can become which --------------------------------------------------------------------------------


def test_layers_in_another_dtype_are_those_a_worker_of_it_has() -> None:
    for dtype in ("int8", *FLOATS):
        for other in ("int8", *FLOATS):
            assert stored_as(layer_of(dtype), other) == layer_of(other)
        assert stored_as(layer_of(dtype), AS_STORED) == layer_of(dtype)
    latent = stored_as(LATENT, "int8")
    assert latent.planes == (
        Plane("latent", (7,), "int8"),
        Plane("rope", (3,), "int8"),
        Plane("latent_scale", (), "float32"),
        Plane("rope_scale", (), "float32"),
    )
    assert stored_as(latent, "bfloat16") == LATENT
    opaque = LayerKV("opaque", (Plane("bits", (4,), "uint8"), Plane("raw", (4,), "int8")))
    assert stored_as(opaque, "int8") == stored_as(opaque, "bfloat16") == opaque


@settings(max_examples=100)
@given(
    layer=st.sampled_from([spec for specs in LAYOUTS.values() for spec in specs]),
    dtypes=st.tuples(*[st.sampled_from(("int8", *FLOATS))] * 2),
    seed=st.integers(0, 99),
)
def test_whatever_is_convertible_is_converted_in_full(layer: LayerKV, dtypes: tuple[str, str], seed: int) -> None:
    source, target = (stored_as(layer, dtype) for dtype in dtypes)
    assert convertible(source, target) and convertible(layer, target)
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(0, 60, (5, p.token_bytes), dtype=torch.uint8, generator=generator) for p in source.planes]
    found = converted(parts, source, target)
    assert [part.shape for part in found] == [(5, plane.token_bytes) for plane in target.planes]
    assert {part.dtype for part in found} == {torch.uint8}


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (gqa(2, 8, "float32"), gqa(4, 8, "float32")),
        (gqa(2, 8, "float32"), gqa(2, 16, "bfloat16")),
        (gqa(2, 8, "float32"), LATENT),
        (gqa(2, 8, "float32"), gqa(2, 8, "float8_e4m3")),
        (gqa(2, 8, "int8"), gqa_int8(2, 8)),
        (gqa(2, 8, "int8"), gqa(2, 8, "float32")),
        (gqa(2, 8, "uint8"), gqa(2, 8, "int8")),
        (INT8, SCALE_LAST),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_wire", ["auto", "int8"])
def test_what_cannot_be_laid_out_is_refused_before_anything_is_sent(
    own: LayerKV, theirs: LayerKV, kv_wire: str
) -> None:
    with pytest.raises(StaleLease) as refused:
        choose_wire((own, own), (own, theirs), kv_wire)
    assert refused.value.code == "layout"
    with pytest.raises(StaleLease):
        choose_wire((own,), (own, own), kv_wire)


# ---- on the wire ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["int8", *FLOATS])
@pytest.mark.parametrize("theirs", ["int8", *FLOATS])
def test_kv_arrives_as_if_it_had_been_converted_at_once(own: str, theirs: str) -> None:
    """`auto` sends whatever is smaller, and the receiver ends up with the same bits."""
    source, target = filled(own, 9), DeviceKV((layer_of(theirs),) * 2, TOKENS, 1)
    wire = choose_wire(source.specs, target.specs, "auto")
    assert wire.token_bytes == min(sum(s.token_bytes for s in device_kv.specs) for device_kv in (source, target))
    assert (wire.encoding == AS_STORED) == (wire.layers == target.specs)
    blocks = list(range(source.num_blocks))
    chunk = encode(source, lease_id(), "layout", range(2), blocks, 0, TOKENS, wire=wire)
    assert len(chunk.payload) == TOKENS * wire.token_bytes
    verify(chunk, target)
    for layer, parts in enumerate(split(chunk, target)):
        assert same_parts(parts, converted(read(source, layer), source.specs[layer], target.specs[layer]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_on_the_wire_is_small_and_off_by_half_a_step_at_most(dtype: str) -> None:
    """Per head of a token: one byte a value and four for the scale; the error is within max|x| / 254."""
    kind: torch.dtype = getattr(torch, dtype)
    specs = (gqa(HEADS, 64, dtype),)
    device_kv, target = (DeviceKV(specs, 25, BLOCK) for _ in range(2))
    generator = torch.Generator().manual_seed(7)
    for plane in device_kv.planes[0]:
        plane.copy_(torch.randn(plane.shape, generator=generator) * 5)
    wire = choose_wire(specs, specs, "int8")
    chunk = encode(device_kv, lease_id(), "layout", range(1), list(range(25)), 0, 100, wire=wire)
    assert chunk.encoding == "int8"
    assert len(chunk.payload) == 100 * 2 * HEADS * (64 + 4)
    verify(chunk, target)
    (parts,) = split(chunk, target)
    for part, plane in zip(parts, device_kv.planes[0], strict=True):
        true = plane.float().flatten(0, 1)
        found = torch.from_numpy(part).view(kind).view(100, HEADS, 64).float()
        step = true.abs().amax(-1, keepdim=True) / 127
        rounding = torch.finfo(kind).eps / 2 * found.abs()  # of the result to the receiver's dtype
        assert bool(((found - true).abs() <= step * 0.50001 + rounding).all())
        assert float((found - true).norm() / true.norm()) < 0.01


def test_int8_kv_is_not_encoded_once_more() -> None:
    specs = (layer_of("int8"),)
    assert choose_wire(specs, specs, "int8") == choose_wire(specs, specs, "auto")
    assert choose_wire((layer_of("float32"),), specs, "int8").encoding == AS_STORED
