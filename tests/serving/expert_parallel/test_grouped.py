"""INT8 experts behind a rank's slots have, computed together, the bits that their modules have one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from serving.expert_parallel.exchange import ExchangeShape
from serving.expert_parallel.grouped import grouped
from serving.expert_parallel.layer import ExpertParallelMlp
from serving.expert_parallel.local import LocalExchange
from serving.expert_parallel.physical import PhysicalExperts
from serving.kernels.int8 import quantize_rows
from serving.model.expert_balance import ExpertPlacement
from serving.model.gated_mlp import GatedMlp
from serving.model.moe import MoeMlp
from serving.model.moe_spec import ClampedSwiglu, MoeSpec
from serving.model.quantized_linear import QuantizedLinear

HIDDEN, WIDTH, EXPERTS, TOP_K = 96, 48, 5, 2
DTYPES = (torch.float32, torch.bfloat16)


def int8_of(linear: nn.Linear, dtype: torch.dtype, rotation: int = 0) -> QuantizedLinear:
    weight, scale = quantize_rows(linear.weight)
    bias = None if linear.bias is None else linear.bias.detach().to(dtype)
    return QuantizedLinear(weight, scale, bias, rotation)


def int8_layer(dtype: torch.dtype, *, bias: bool = False, rotation: int = 0) -> MoeMlp:
    product = ClampedSwiglu(limit=7.0, alpha=1.702) if bias else None
    spec = MoeSpec(experts=EXPERTS, top_k=TOP_K, intermediate=WIDTH, sparse=(True,), bias=bias, product=product)
    mlp = MoeMlp(HIDDEN, spec)
    for expert in mlp.experts:
        assert isinstance(expert, GatedMlp)
        expert.gate_up = int8_of(expert.gate_up, dtype)  # type: ignore[assignment]
        expert.down = int8_of(expert.down, dtype, rotation)  # type: ignore[assignment]
    mlp.router.to(dtype)
    return mlp


def spread(mlp: MoeMlp, dtype: torch.dtype) -> ExpertParallelMlp:
    shape = ExchangeShape(
        ranks=1, slots=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=64, wire=torch.int8, back=dtype
    )  # fmt: skip
    order = tuple(reversed(range(EXPERTS)))
    return ExpertParallelMlp(mlp, ExpertPlacement((order,), EXPERTS), LocalExchange(shape))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 64])
@torch.inference_mode()
def test_the_bits_are_those_of_the_modules(dtype: torch.dtype, bias: bool, tokens: int) -> None:
    mlp, x = int8_layer(dtype, bias=bias), torch.randn(tokens, HIDDEN).to(dtype)
    layer = spread(mlp, dtype)
    assert layer.together is not None
    assert torch.equal(layer(x), mlp(x))


@torch.inference_mode()
def test_weights_that_change_in_place_are_computed_with() -> None:
    """As those of a spare buffer do before it becomes a slot's."""
    mlp = int8_layer(torch.float32)
    layer, x = spread(mlp, torch.float32), torch.randn(7, HIDDEN)
    before = layer(x).clone()
    for expert in mlp.experts:
        weight = expert.get_parameter("gate_up.weight")
        weight.copy_(-weight)
    assert torch.equal(layer(x), mlp(x)) and not torch.equal(layer(x), before)


@torch.inference_mode()
def test_other_experts_behind_the_slots_are_computed_with() -> None:
    mlp = int8_layer(torch.float32)
    layer, x = spread(mlp, torch.float32), torch.randn(7, HIDDEN)
    wanted = mlp(x)
    moved = ExpertPlacement((tuple(range(EXPERTS)),), EXPERTS)
    layer.hold(list(mlp.experts), PhysicalExperts(moved, 0), moved)
    assert layer.together is not None and torch.equal(layer(x), wanted)


def float_down(expert: GatedMlp) -> None:
    expert.down = nn.Linear(WIDTH, HIDDEN, bias=False)


def rotated_down(expert: GatedMlp) -> None:
    expert.down = int8_of(nn.Linear(WIDTH, HIDDEN, bias=False), torch.float32, 16)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [float_down, rotated_down])
@torch.inference_mode()
def test_experts_of_another_kind_compute_for_themselves(change: Callable[[GatedMlp], None]) -> None:
    mlp, x = int8_layer(torch.float32), torch.randn(9, HIDDEN)
    for expert in mlp.experts:
        assert isinstance(expert, GatedMlp)
        change(expert)
    layer = spread(mlp, torch.float32)
    assert layer.together is None
    assert torch.equal(layer(x), mlp(x))


def test_without_compiled_kernels_modules_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.expert_parallel.grouped._kernels", lambda threads: None)
    assert grouped(list(int8_layer(torch.float32).experts)) is None


def test_float_experts_are_not_grouped() -> None:
    spec = MoeSpec(experts=EXPERTS, top_k=TOP_K, intermediate=WIDTH, sparse=(True,))
    assert grouped(list(MoeMlp(HIDDEN, spec).experts)) is None
