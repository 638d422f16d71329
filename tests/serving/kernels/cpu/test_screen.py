"""The best tokens that a screened head gives are those of the head read whole, to the bit, whatever the numbers."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.cpu_floor import screened_rows
from serving.kernels import cpu
from serving.kernels.cpu import Kind, StepOutput
from serving.kernels.cpu.build import SOURCES, X86_FORMS
from tests.serving.kernels.cpu.formulas import SmallDecoder
from tests.serving.kernels.cpu.test_decoder import PROMPT, batch_of

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 49, 64, 65]  # of a tile, of several, and more than are screened
NEAR = 2.0**-7


def near_ties(weight: Tensor) -> None:
    """Every panel is the first but for last bits, which tell scores apart as int8 does not."""
    first = weight[:32].clone()
    for panel in weight.split(32):
        panel.copy_(first[: len(panel)] * (1 + NEAR * torch.randint(-1, 2, panel.shape)))


def all_below_zero(weight: Tensor) -> None:
    weight.copy_(-weight.abs())


def wide(weight: Tensor) -> None:
    """One weight of each channel leaves int8 nothing for the others; one channel is nothing at all."""
    weight[:, 3] = 500.0
    weight[7] = 0.0


def assert_same_tokens(kernels: cpu.Kernels, small: SmallDecoder, rows: int) -> None:
    """With a screen and without, for all of a prompt, so many rows at a time."""
    plain = small.build(kernels)
    screened = replace(plain, screen=kernels.screen(small.head.weight))
    for first in range(0, len(PROMPT) - rows + 1, rows):
        batch = batch_of([(0, PROMPT[first : first + rows])], all_rows=True)
        assert torch.equal(screened.step(batch, StepOutput.GREEDY), plain.step(batch, StepOutput.GREEDY))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("change", [near_ties, all_below_zero, wide, lambda _: None])
def test_the_best_token_is_the_heads_own(kernels: cpu.Kernels, change: object, rows: int) -> None:
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16, vocab=300)
    assert callable(change)
    change(small.head.weight)
    plain = small.build(kernels)
    screened = replace(plain, screen=kernels.screen(small.head.weight))
    for first in range(0, len(PROMPT) - rows + 1, 40):
        batch = batch_of([(0, PROMPT[first : first + rows])], all_rows=True)
        expected = plain.step(batch, StepOutput.GREEDY)
        logits = plain.step(batch)
        assert expected.tolist() == logits.argmax(dim=1).tolist() and len(expected) == rows
        assert torch.equal(screened.step(batch, StepOutput.GREEDY), expected)
        assert torch.equal(screened.step(batch), logits)


def test_the_bench_knows_how_many_rows_are_screened() -> None:
    """A screen of more rows would give the same tokens, and a floor that is none."""
    text = (SOURCES / "screen.h").read_text()
    with_amx, with_vnni, others = map(int, re.findall(r"SCREENED_ROWS = (\d+);", text))
    for form in {**X86_FORMS, "plain": ()}:
        expected = with_amx if "amx" in form else with_vnni if "avx512" in form else others
        assert screened_rows(form) == expected, form


def test_without_its_bounds_a_screen_is_wrong(kernels: cpu.Kernels) -> None:
    """Else the numbers above would hold nothing against it."""
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16, vocab=300)
    near_ties(small.head.weight)
    plain, screen = small.build(kernels), kernels.screen(small.head.weight)
    none = replace(screen, missed=screen.missed.where(screen.missed.isinf(), 0.0), kept=torch.zeros_like(screen.kept))
    batches = [batch_of([(0, [token])], all_rows=True) for token in range(100)]  # else others' panels are looked at too
    guessing = replace(plain, screen=none)
    pairs = [(guessing.step(batch, StepOutput.GREEDY), plain.step(batch, StepOutput.GREEDY)) for batch in batches]
    assert not all(torch.equal(guess, best) for guess, best in pairs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_is_no_number_has_no_token(kernels: cpu.Kernels, value: float) -> None:
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16, vocab=300)
    small.final_norm[5] = value
    plain = small.build(kernels)
    screened = replace(plain, screen=kernels.screen(small.head.weight))
    batch = batch_of([(0, PROMPT[:3])], all_rows=True)
    assert torch.equal(screened.step(batch, StepOutput.GREEDY), plain.step(batch, StepOutput.GREEDY))


def test_scores_that_no_sum_of_products_holds_have_no_bounds(kernels: cpu.Kernels) -> None:
    """Two huge products are infinite or no number in the head, and large or small as int8."""
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16, vocab=300)
    small.final_norm.zero_()
    small.final_norm[0], small.final_norm[40] = 8.0, 4.0
    small.head.weight[70] = 0.0
    small.head.weight[70, 0], small.head.weight[70, 40] = 1e38, -1e38
    assert_same_tokens(kernels, small, screened_rows(kernels.form))


@pytest.mark.parametrize("exponent", [-9, -14, -20, -23, -25, -28, -36])
def test_inputs_whose_squares_are_nothing_have_no_bounds(kernels: cpu.Kernels, exponent: int) -> None:
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16, vocab=300)
    near_ties(small.head.weight)
    small.final_norm.mul_(10.0**exponent)
    assert_same_tokens(kernels, small, 1)


@pytest.mark.parametrize("channel", [32, 40, 55])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_no_number_counts_as_it_does_in_the_head(
    kernels: cpu.Kernels, value: float, channel: int
) -> None:
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16, vocab=300)
    small.head.weight[channel ^ 16] *= 50  # the best of many rows, in the same lane
    small.head.weight[channel, 3] = value
    plain = small.build(kernels)
    screened = replace(plain, screen=kernels.screen(small.head.weight))
    batch = batch_of([(0, PROMPT[: screened_rows(kernels.form)])], all_rows=True)
    expected = plain.step(batch, StepOutput.GREEDY)
    assert (-1 in expected.tolist()) == (abs(value) == torch.inf)
    if math.isnan(value):  # it hides none beside it
        assert expected.tolist() == plain.step(batch).nan_to_num(nan=-math.inf).argmax(dim=1).tolist()
    assert torch.equal(screened.step(batch, StepOutput.GREEDY), expected)


def test_weights_that_a_product_takes_for_nothing_are_told_apart_as_it_does(kernels: cpu.Kernels) -> None:
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16, vocab=300)
    small.head.weight.mul_(1e-38)
    small.final_norm.mul_(1e15)
    assert_same_tokens(kernels, small, screened_rows(kernels.form))


def test_bounds_hold_every_score_and_leave_most_out(kernels: cpu.Kernels) -> None:
    """What a screen holds of a head: within its bounds of each channel, and not far."""
    weight = torch.randn(1000, 256).to(torch.bfloat16)
    screen = kernels.screen(weight)
    scale = screen.coarse.scale
    assert scale is not None
    held = torch.clamp((weight.float() / scale[:1000, None]).round(), -127, 127).double() * scale[:1000, None].double()
    missed = (weight.double() - held).norm(dim=1)
    assert (missed <= screen.missed[:1000]).all() and (missed * 1.01 > screen.missed[:1000]).all()
    assert (held.norm(dim=1) <= screen.kept[:1000]).all()
    assert screen.missed[1000:].isinf().all() and len(screen.missed) % 32 == 0


def test_only_a_bfloat16_head_is_screened(kernels: cpu.Kernels) -> None:
    small = SmallDecoder(kind=Kind.F32, kv_kind=Kind.F32)
    with pytest.raises(ValueError, match="bfloat16 head"):
        replace(small.build(kernels), screen=kernels.screen(small.head.weight.to(torch.bfloat16)))
