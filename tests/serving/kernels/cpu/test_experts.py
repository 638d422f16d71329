"""Layers with experts: the fused step and its operations against plain formulas, and bits that nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serving.kernels import cpu
from serving.kernels.cpu import Kind
from serving.kernels.cpu.offloaded_step import offloaded_step
from serving.kernels.layer_weights import MlpWeights, MoeWeights
from serving.model.gated_mlp import GatedMlp
from serving.model.moe import MoeMlp
from serving.model.moe_spec import MoeSpec
from tests.serving.kernels.cpu.formulas import PlainExperts, SmallDecoder
from tests.serving.kernels.cpu.test_decoder import KINDS, PROMPT, TOLERANCE, batch_of
from tests.serving.kernels.cpu.test_offloaded_step import batch_of as offloaded_batch
from tests.serving.kernels.cpu.test_offloaded_step import layers_of
from tests.serving.kernels.segments import CopiedSegments

FORMS: list[dict[str, object]] = [
    {"experts": 5, "top_k": 2},
    {"experts": 40, "top_k": 6, "normalized": False, "dense": (1,), "head_norms": True},
]


@pytest.fixture(scope="module")
def two_threads() -> Iterator[cpu.Kernels]:
    loaded = cpu.load(threads=2)
    assert loaded is not None
    yield loaded
    loaded.close()


def one_layer(kind: Kind, experts: int = 7, top_k: int = 3, **options: bool) -> PlainExperts:
    return PlainExperts.random(kind, 96, 71, experts, top_k, **options)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("rows", [0, 1, 5, 90, 700])
def test_a_layer_equals_the_formula(kernels: cpu.Kernels, kind: Kind, rows: int) -> None:
    plain, x, out = one_layer(kind), torch.randn(rows, 96), torch.randn(rows, 96)
    expected = out + plain(x)
    kernels.experts(x, cpu.PackedExperts(plain.packed(kernels)), out)
    if kind is Kind.F32:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    else:  # what is between the two products may round either way
        assert rows == 0 or ((out - expected).abs().amax(dim=1) < 0.02 * expected.std()).float().mean() > 0.97


@pytest.mark.parametrize("normalized", [True, False])
def test_the_weights_are_those_of_the_family(kernels: cpu.Kernels, normalized: bool) -> None:
    plain, x = one_layer(Kind.F32, normalized=normalized), torch.randn(9, 96)
    out = torch.zeros(9, 96)
    kernels.experts(x, cpu.PackedExperts(plain.packed(kernels)), out)
    torch.testing.assert_close(out, plain(x), rtol=1e-5, atol=1e-5)


def test_equal_scores_choose_the_first_experts(kernels: cpu.Kernels) -> None:
    plain, x = one_layer(Kind.F32, experts=6, top_k=2), torch.randn(4, 96)
    plain.router.weight.zero_()
    out = torch.zeros(4, 96)
    kernels.experts(x, cpu.PackedExperts(plain.packed(kernels)), out)
    torch.testing.assert_close(out, plain.experts[0](x) / 2 + plain.experts[1](x) / 2, rtol=1e-5, atol=1e-5)


def test_a_tokens_parts_are_added_in_the_order_of_its_choices(kernels: cpu.Kernels) -> None:
    """Of four equal weights, so that they are exact; the parts then add up bit for bit, one after the other."""
    plain, x, out = one_layer(Kind.BF16, experts=6, top_k=4), torch.randn(60, 96), torch.zeros(60, 96)
    plain.router.weight.zero_()
    packed = cpu.PackedExperts(plain.packed(kernels))
    kernels.experts(x, packed, out)
    parts = [torch.zeros(60, 96) for _ in range(4)]
    for expert, part in enumerate(parts):
        kernels.expert_rows(x, torch.full((60,), expert), packed, part)
    quarters = [part / 4 for part in parts]
    assert torch.equal(out, ((quarters[0] + quarters[1]) + quarters[2]) + quarters[3])
    assert not torch.equal(out, ((quarters[3] + quarters[2]) + quarters[1]) + quarters[0])


@given(data=st.data())
def test_any_layer_equals_the_model_s_module(two_threads: cpu.Kernels, data: st.DataObject) -> None:
    experts, hidden, width = (data.draw(st.integers(1, most)) for most in (70, 70, 50))
    top_k, rows = data.draw(st.integers(1, experts)), data.draw(st.integers(0, 40))
    spec = MoeSpec(
        experts=experts, top_k=top_k, intermediate=width, sparse=(True,), normalized=data.draw(st.booleans())
    )
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    module, x = MoeMlp(hidden, spec).eval(), torch.randn(rows, hidden)
    pack = two_threads.pack
    mlps = [
        MlpWeights(gate_up=pack(cpu.interleave(*one.gate_up.weight.chunk(2))), down=pack(one.down.weight))
        for one in module.experts
        if isinstance(one, GatedMlp)
    ]
    packed = MoeWeights(router=pack(module.router.weight), experts=tuple(mlps), top_k=top_k, normalized=spec.normalized)
    out = torch.zeros(rows, hidden)
    with torch.inference_mode():
        two_threads.experts(x, cpu.PackedExperts(packed), out)
        torch.testing.assert_close(out, module(x), rtol=1e-4, atol=1e-5)


def test_rows_routed_elsewhere(kernels: cpu.Kernels) -> None:
    plain, x, out = one_layer(Kind.INT8), torch.randn(50, 96), torch.zeros(50, 96)
    packed, chosen = cpu.PackedExperts(plain.packed(kernels)), torch.randint(0, 7, (50,))
    kernels.expert_rows(x, chosen, packed, out)
    for row in range(50):
        alone = torch.zeros(1, 96)
        kernels.expert_rows(x[row : row + 1], chosen[row : row + 1], packed, alone)
        assert torch.equal(alone[0], out[row])
        mlp = packed.weights.experts[int(chosen[row])]
        h = kernels.linear(x[row : row + 1], mlp.gate_up, finish=cpu.Finish.SWIGLU)
        assert torch.equal(kernels.linear(h[:, : mlp.down.inputs], mlp.down)[0], out[row])
    for wrong in (torch.full((50,), 7), torch.full((50,), -1), torch.zeros(49)):
        with pytest.raises(ValueError, match="each of 50 rows needs"):
            kernels.expert_rows(x, wrong, packed, out)


def test_scores_that_are_not_numbers_stay_in_their_row(kernels: cpu.Kernels) -> None:
    plain, x = one_layer(Kind.F32), torch.randn(6, 96)
    packed, clean, out = cpu.PackedExperts(plain.packed(kernels)), torch.zeros(6, 96), torch.zeros(6, 96)
    kernels.experts(x, packed, clean)
    x[2], x[4] = torch.nan, torch.inf
    kernels.experts(x, packed, out)
    assert out[2].isnan().all() and not out[4].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
@pytest.mark.parametrize("form", FORMS, ids=["all", "some"])
def test_logits_equal_the_formulas(kernels: cpu.Kernels, kinds: tuple[Kind, Kind], form: dict[str, object]) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], **form)  # type: ignore[arg-type]
    got = small.build(kernels).step(batch_of([(0, PROMPT)], all_rows=True))
    expected = small.logits(PROMPT)
    # A token whose last expert and the next are as good as equal may take either: the rest has to fit.
    error = (got - expected).abs().amax(dim=1)
    assert error.median() < TOLERANCE[kinds[0]] * expected.std()
    assert (error < TOLERANCE[kinds[0]] * expected.std()).float().mean() > (1 if kinds[0] is Kind.F32 else 0.75) - 1e-6


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
def test_bits_do_not_depend_on_how_a_prompt_is_cut(kernels: cpu.Kernels, kinds: tuple[Kind, Kind]) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], experts=9, top_k=2)
    decoder = small.build(kernels)
    whole = decoder.step(batch_of([(0, PROMPT)], all_rows=True))
    for cut in ([1] * 5 + [60, 64, 71], [3, 197]):
        small_ends = list(itertools.accumulate(cut))
        parts = [
            decoder.step(batch_of([(end - count, PROMPT[end - count : end])], all_rows=True))
            for end, count in zip(small_ends, cut, strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
@pytest.mark.parametrize("company", [1, 7, 400])
def test_bits_do_not_depend_on_the_batch(kernels: cpu.Kernels, kinds: tuple[Kind, Kind], company: int) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], blocks=4 * 410, experts=9, top_k=3)
    decoder = small.build(kernels)
    decoder.step(batch_of([(0, PROMPT[:50])], width=4))
    alone = decoder.step(batch_of([(50, [7])], width=4))
    others = [(i % 40, [3 + i % 50] * (1 + 2 * (i % 3))) for i in range(company)]
    beside = decoder.step(batch_of([(50, [7]), *others], width=4))
    assert torch.equal(beside[0], alone[0])
    behind = decoder.step(batch_of([(50, [7])], width=4))
    assert torch.equal(behind, alone)


def test_threads_do_not_change_bits() -> None:
    library = cpu.shared_library()
    assert library is not None
    for form, kind in itertools.product(cpu.forms(library), Kind):
        results: list[Tensor] = []
        for threads in (1, 2, 3):
            torch.manual_seed(1)
            kernels = cpu.Kernels(library, threads=threads, form=form)
            small = SmallDecoder(kind=kind, kv_kind=Kind.BF16, experts=9, top_k=2)
            decoder = small.build(kernels)
            steps = [batch_of([(0, PROMPT)]), batch_of([(200, [9])]), batch_of([(201, [1, 2]), (0, [5] * 40)])]
            results.append(torch.cat([decoder.step(batch) for batch in steps]))
            kernels.close()
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
def test_offloaded_kv_changes_no_bits(kernels: cpu.Kernels, kinds: tuple[Kind, Kind]) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], experts=9, top_k=3, dense=(0,))
    decoder = small.build(kernels)
    decoder.step(offloaded_batch(0, 520))
    expected = decoder.step(offloaded_batch(520, 30))
    segments = CopiedSegments(layers_of(small), [(7 * i) % 50 for i in range(44)], 384, 256, start=520)
    assert torch.equal(offloaded_step(decoder, offloaded_batch(520, 30, segments)), expected)


def test_mistakes_are_named(kernels: cpu.Kernels) -> None:
    packed = one_layer(Kind.F32).packed(kernels)
    other, narrow = one_layer(Kind.BF16).packed(kernels), PlainExperts.random(Kind.F32, 96, 40, 7, 3).packed(kernels)
    for experts, message in (
        ((*packed.experts[:6], other.experts[6]), "one shape"),
        ((*packed.experts[:6], narrow.experts[6]), "one shape"),
        (packed.experts[:6], "do not fit their router"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.PackedExperts(MoeWeights(router=packed.router, experts=experts, top_k=2, normalized=True))
    with pytest.raises(ValueError, match="cannot take 8 of 7"):
        cpu.PackedExperts(MoeWeights(router=packed.router, experts=packed.experts, top_k=8, normalized=True))
    with pytest.raises(ValueError, match="float32"):
        kernels.experts(torch.zeros(2, 95), cpu.PackedExperts(packed), torch.zeros(2, 95))
    small = SmallDecoder(kind=Kind.F32, kv_kind=Kind.F32, experts=5)
    small.mlps[1] = PlainExperts.random(Kind.F32, small.hidden, 40, 5, 2)
    with pytest.raises(ValueError, match="same number and widths"):
        small.build(kernels)
