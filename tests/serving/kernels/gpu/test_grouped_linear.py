"""Products of rows by their experts against one product for each pair, and mixtures against the model's own module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from serving.kernels import gpu
from serving.kernels.gpu.grouped_linear import (
    TILES,
    ExpertWeights,
    fitting,
    grouped_linear,
    pairs_silu_mul,
    weighted_sum,
)
from serving.kernels.gpu.mixture import ExpertMixture, rows_of_every_height
from serving.kernels.gpu.routing import block_height, by_expert
from serving.kernels.gpu.tiles import tuned_tiles
from serving.kernels.int8 import quantize_rows
from serving.kernels.layer_weights import LinearWeights, MlpWeights, MoeWeights
from serving.model.moe import MoeMlp
from serving.model.moe_spec import MoeSpec
from serving.model.quantized_linear import QuantizedLinear
from tests.serving.kernels.gpu.formulas import CLOSE, error, int8_linear

EXPERTS = 5
HELD = range(EXPERTS)


def float_weights(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> list[LinearWeights]:
    return [
        LinearWeights(weight=(torch.randn(outputs, inputs) / inputs**0.5).to(dtype).to(device)) for _ in range(EXPERTS)
    ]


def int8_weights(outputs: int, inputs: int, device: torch.device) -> list[LinearWeights]:
    return [
        LinearWeights(
            weight=torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device),
            scale=(0.01 * torch.rand(outputs) + 0.001).to(device),
        )
        for _ in range(EXPERTS)
    ]


def some_rows(rows: int, top_k: int, device: torch.device) -> Tensor:
    return torch.rand(rows, EXPERTS).argsort(dim=1)[:, :top_k].int().contiguous().to(device)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("rows", "top_k", "inputs", "outputs"), [(1, 2, 40, 33), (50, 1, 36, 20)])
def test_float_products(
    dtype: torch.dtype, rows: int, top_k: int, inputs: int, outputs: int, device: torch.device
) -> None:
    linears, chosen = float_weights(outputs, inputs, dtype, device), some_rows(rows, top_k, device)
    x = torch.randn(rows, inputs).to(dtype).to(device)
    found = grouped_linear(x, None, by_expert(chosen, HELD, EXPERTS), ExpertWeights.of(linears), dtype)
    expected = [
        x[pair // top_k].double() @ linears[expert].weight.double().T
        for pair, expert in enumerate(chosen.flatten().tolist())
    ]
    assert found.dtype is dtype and found.shape == (rows * top_k, outputs)
    assert error(found, torch.stack(expected)) < CLOSE[dtype]


@pytest.mark.parametrize("each", [False, True])
def test_int8_products_have_the_bits_of_the_plain_kernel(each: bool, device: torch.device) -> None:
    """`each`: every pair has a row of its own."""
    rows, top_k, inputs, outputs = 45, 3, 80, 40
    linears, chosen = int8_weights(outputs, inputs, device), some_rows(rows, top_k, device)
    x = gpu.quantize(torch.randn(rows * top_k if each else rows, inputs).to(device))
    found = grouped_linear(*x, by_expert(chosen, HELD, EXPERTS), ExpertWeights.of(linears), torch.float32)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        row = slice(pair, pair + 1) if each else slice(pair // top_k, pair // top_k + 1)
        weight, scale = linears[expert].weight, linears[expert].scale
        assert scale is not None
        alone = int8_linear(*(one.cpu() for one in (x.values[row], x.scales[row], weight, scale)), None)
        assert error(found[pair : pair + 1], alone) < 1e-6
        if pair < 4:
            plain = gpu.int8_linear(x.values[row], x.scales[row], weight, scale, None, torch.float32)
            assert torch.equal(found[pair : pair + 1], plain)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """All rows to one expert, more than a block of them, and one row alone; experts without a row are never read."""
    linears = float_weights(24, 48, torch.float32, device)
    nothing = torch.full_like(linears[0].weight, float("nan"))
    weights = ExpertWeights.of([linears[0] if at == 3 else LinearWeights(weight=nothing) for at in range(EXPERTS)])
    x = torch.randn(70, 48).to(device)
    chosen = torch.full((70, 1), 3, dtype=torch.int32, device=device)
    together = grouped_linear(x, None, by_expert(chosen, HELD, EXPERTS), weights, torch.float32)
    assert error(together, x.double() @ linears[0].weight.double().T) < 1e-6
    alone = grouped_linear(x[9:10], None, by_expert(chosen[:1], HELD, EXPERTS), weights, torch.float32)
    assert error(alone, together[9:10]) < 1e-6


def test_parts_are_added_one_after_the_other(device: torch.device) -> None:
    parts, weights = torch.randn(12, 40), torch.rand(4, 3)
    chosen = torch.tensor([[5, 6, 7], [7, 8, 5], [-1, 4, 0], [6, 5, -1]], dtype=torch.int32)
    parts[(chosen.flatten() < 5) | (chosen.flatten() > 7)] = torch.nan
    found = weighted_sum(parts.to(device), chosen.to(device), weights.to(device), range(5, 8), torch.float32)
    expected = (parts.view(4, 3, 40) * weights[..., None]).nan_to_num(0.0).sum(dim=1)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_of_the_pairs_that_are_held(dtype: torch.dtype, quantized: bool, device: torch.device) -> None:
    """The bits of the same operation on all rows; of other pairs nothing is read."""
    gate_up = torch.randn(6, 96).to(dtype).to(device)
    chosen = torch.tensor([[3, 5], [4, -1], [9, 4]], dtype=torch.int32, device=device)
    held = (chosen.flatten() >= 3) & (chosen.flatten() < 5)
    expected = gpu.silu_mul(gate_up[held], quantized=quantized)
    found = pairs_silu_mul(gate_up.masked_fill(~held[:, None], torch.nan), chosen, range(3, 5), quantized=quantized)
    for one, other in zip(found, expected, strict=True) if quantized else [(found, expected)]:
        assert isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one[held], other)


def module_of(spec: MoeSpec, hidden: int, *int8: str) -> MoeMlp:
    """`int8` names layers of its experts."""
    module = MoeMlp(hidden, spec)
    for parameter in module.parameters():
        parameter.data = 1.5 * torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
    for expert in module.experts:
        for name in int8:
            linear = expert.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            setattr(expert, name, QuantizedLinear(*quantize_rows(linear.weight.detach())))
    return module


def weights_of(module: MoeMlp, device: torch.device) -> MoeWeights[LinearWeights]:
    def linear(layer: nn.Module) -> LinearWeights:
        assert isinstance(layer, nn.Linear | QuantizedLinear)
        scale = layer.scale.detach().to(device) if isinstance(layer, QuantizedLinear) else None
        return LinearWeights(weight=layer.weight.detach().to(device), scale=scale)

    experts = [MlpWeights(gate_up=linear(one.gate_up), down=linear(one.down)) for one in module.experts]
    return MoeWeights(
        router=linear(module.router),
        experts=tuple(experts),
        top_k=module.spec.top_k,
        normalized=module.spec.normalized,
    )


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "normalized", "int8"),
    [
        (1, 3, 1, True, ()),
        (21, 9, 8, False, ()),
        (1, 9, 8, True, ("gate_up", "down")),
        (33, 3, 2, True, ("gate_up", "down")),
        (4, 3, 2, True, ("gate_up",)),
    ],
)
def test_a_mixture_is_the_models_own(
    rows: int, experts: int, top_k: int, normalized: bool, int8: tuple[str, ...], device: torch.device
) -> None:
    """An int8 may round to either side of a tie."""
    spec = MoeSpec(experts=experts, top_k=top_k, intermediate=16, sparse=(True,), normalized=normalized)
    module, x = module_of(spec, 32, *int8), torch.randn(rows, 32)
    weights = weights_of(module, device)
    with torch.inference_mode():
        logits = module.router(x)
        expected = module(x)
    found = ExpertMixture(weights)(x.to(device), logits.to(device))
    assert found.shape == expected.shape and error(found, expected) < (1e-2 if int8 else 1e-6)
    assert ExpertMixture(weights)(x[:0].to(device), logits[:0].to(device)).shape == (0, 32)


@pytest.mark.parametrize(("most", "top_k", "experts"), [(1, 2, 8), (70, 2, 8), (2048, 8, 128), (300, 1, 3), (64, 8, 8)])
def test_tuning_covers_every_height_of_blocks(most: int, top_k: int, experts: int) -> None:
    tuned = {block_height(rows * top_k, experts) for rows in rows_of_every_height(most, top_k, experts)}
    assert max(rows_of_every_height(most, top_k, experts)) <= most
    assert tuned == {block_height(rows * top_k, experts) for rows in range(1, most + 1)}


def test_tiles_of_all_products_are_kept(device: torch.device) -> None:
    kept = tuned_tiles(device)
    assert set(kept.tuners) == {"many rows", "few rows", "grouped"}
    assert all(tuner.configs for tuner in kept.tuners.values())


def test_tuning_computes(device: torch.device) -> None:
    spec = MoeSpec(experts=3, top_k=2, intermediate=16, sparse=(True,))
    ExpertMixture(weights_of(module_of(spec, 32, "gate_up", "down"), device)).tune(9, torch.float32)


@pytest.mark.parametrize("height", [16, 128])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_tiles_that_find_no_room_are_not_tried(dtype: torch.dtype, height: int) -> None:
    found = fitting(TILES, {"x_ptr": torch.empty(0, dtype=dtype)}, BLOCK_M=height)
    assert found and (dtype is not torch.int8 or len(found) == len(TILES))
    for tiles in found:
        shape = tiles.kwargs
        taken = tiles.num_stages * (height + shape["BLOCK_N"]) * shape["BLOCK_K"] * dtype.itemsize
        assert taken <= 200 * 1024


def test_what_is_refused(device: torch.device) -> None:
    floats, integers = float_weights(8, 32, torch.float32, device), int8_weights(8, 32, device)
    with pytest.raises(ValueError, match="alike"):
        ExpertWeights.of([floats[0], integers[0]])
    with pytest.raises(ValueError, match="biases"):
        ExpertWeights.of([LinearWeights(weight=floats[0].weight, bias=floats[0].weight[:, 0])])
    with pytest.raises(ValueError, match="have scales"):
        ExpertWeights.of([LinearWeights(weight=integers[0].weight)])
    rows, weights = by_expert(some_rows(4, 2, device), HELD, EXPERTS), ExpertWeights.of(floats)
    with pytest.raises(ValueError, match="x must be"):
        grouped_linear(torch.zeros(4, 16, device=device), None, rows, weights, torch.float32)
    with pytest.raises(ValueError, match="8 pairs of 3 rows"):
        grouped_linear(torch.zeros(3, 32, device=device), None, rows, weights, torch.float32)
    with pytest.raises(ValueError, match="do not go to weights"):
        grouped_linear(torch.zeros(4, 32, dtype=torch.bfloat16, device=device), None, rows, weights, torch.float32)
    with pytest.raises(ValueError, match="parts must be"):
        weighted_sum(torch.zeros(7, 8, device=device), some_rows(4, 2, device), torch.ones(4, 2), HELD, torch.float32)
    with pytest.raises(ValueError, match="gate_up must be"):
        pairs_silu_mul(torch.zeros(7, 8, device=device), some_rows(4, 2, device), HELD, quantized=False)
