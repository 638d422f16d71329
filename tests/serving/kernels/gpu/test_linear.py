"""INT8 products against float64, and that neither the number of rows nor the split of the inputs changes a bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serving.kernels import gpu
from serving.kernels.gpu import decoder
from serving.kernels.gpu.linear import input_splits
from serving.kernels.layer_weights import LinearWeights
from tests.serving.kernels.gpu.formulas import CLOSE, error, int8_linear


def layer(rows: int, inputs: int, outputs: int, device: torch.device) -> tuple[Tensor, ...]:
    values = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales, weight_scales = 0.01 * torch.rand(rows) + 0.001, 0.01 * torch.rand(outputs) + 0.001
    bias = 5 * torch.randn(outputs)
    return tuple(tensor.to(device) for tensor in (values, scales, weight, weight_scales, bias))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 64, 32),
        (3, 1552, 40),
        (16, 96, 33),
        (40, 2048, 24),
        (64, 80, 50),
        (65, 80, 50),
        (130, 208, 72),
        (300, 64, 72),
    ],
)
def test_int8_linear(rows: int, inputs: int, outputs: int, biased: bool, device: torch.device) -> None:
    *arguments, bias = layer(rows, inputs, outputs, device)
    added = bias if biased else None
    expected = int8_linear(*(tensor.cpu() for tensor in arguments), bias.cpu() if biased else None)
    for dtype, close in CLOSE.items():
        found = gpu.int8_linear(*arguments, added, dtype)
        assert found.dtype is dtype
        assert error(found, expected) < close


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inputs", [208, 1552])
def test_a_row_does_not_depend_on_the_others(inputs: int, biased: bool, device: torch.device) -> None:
    values, scales, weight, weight_scales, bias = layer(70, inputs, 40, device)
    added = bias if biased else None
    together = gpu.int8_linear(values, scales, weight, weight_scales, added, torch.float32)
    for rows in (slice(0, 1), slice(5, 30), slice(0, 64)):
        alone = gpu.int8_linear(values[rows], scales[rows], weight, weight_scales, added, torch.float32)
        assert torch.equal(alone, together[rows])


def test_how_inputs_are_split() -> None:
    assert input_splits(4096, 4096, 132) == 1
    assert input_splits(14336, 1024, 132) == 9
    assert input_splits(576, 576, 132) == 1  # too few inputs
    assert all(1 <= input_splits(k, n, 132) <= max(1, k // 512) for k in (16, 4096, 28672) for n in (1, 500, 2000))


def test_no_rows(device: torch.device) -> None:
    values, scales, weight, weight_scales, _ = layer(1, 64, 8, device)
    assert gpu.int8_linear(values[:0], scales[:0], weight, weight_scales).shape == (0, 8)


def test_tuning_covers_every_kind_of_batch(device: torch.device) -> None:
    _, _, weight, weight_scales, bias = layer(1, 64, 8, device)
    gpu.tune(weight, weight_scales, bias, 70, torch.float32)


class OnCuda:
    """As much of an embedding on a GPU as tuning asks for."""

    is_cuda, device, dtype = True, torch.device("cuda"), torch.bfloat16


class KeptTiles:
    """What a process before this one has chosen, and how often this one writes it down."""

    def __init__(self, before: int) -> None:
        self.before, self.chosen, self.kept = before, 0, 0

    def restore(self) -> int:
        self.chosen = self.before
        return self.before

    def keep(self) -> None:
        self.kept += 1


@pytest.mark.parametrize("before", [0, 1])
def test_a_second_start_times_nothing(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is there before anything is tuned, and is written again only if there is more of it."""
    kept = KeptTiles(before)
    monkeypatch.setattr(decoder, "tuned_tiles", lambda _: kept)
    monkeypatch.setattr(decoder, "tune", lambda *_: setattr(kept, "chosen", max(kept.chosen, 1)))
    _, _, weight, scale, _ = layer(1, 64, 8, torch.device("cpu"))
    norm = torch.ones(64)
    made = decoder.TritonDecoder(
        embedding=OnCuda(),  # type: ignore[arg-type]
        layers=[],
        final_norm=norm,
        head=LinearWeights(weight=weight, scale=scale),
        eps=1e-5,
        head_dim=16,
        rotation=norm,
        planes=[],
    )
    made.tune(70)
    assert (kept.chosen, kept.kept) == (1, 1 - before)


def test_what_is_refused(device: torch.device) -> None:
    values, scales, weight, weight_scales, bias = layer(4, 64, 8, device)
    with pytest.raises(ValueError, match="int8"):
        gpu.int8_linear(values.float(), scales, weight, weight_scales)
    with pytest.raises(ValueError, match="multiple of 16"):
        gpu.int8_linear(values[:, :40].contiguous(), scales, weight[:, :40].contiguous(), weight_scales)
    with pytest.raises(ValueError, match=r"scales must be \[4\]"):
        gpu.int8_linear(values, scales[:3], weight, weight_scales)
    with pytest.raises(ValueError, match=r"bias must be \[8\]"):
        gpu.int8_linear(values, scales, weight, weight_scales, bias[:4])
    with pytest.raises(ValueError, match="contiguous"):
        gpu.int8_linear(values[:, ::2], scales, weight[:, ::2], weight_scales)
