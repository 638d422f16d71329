"""Quantizing whole decoders of every architecture: what is replaced, what the function stays, how close it comes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from serving.loader.loading import load
from serving.model import moe
from serving.model.decoder import Decoder
from serving.model.moe import route
from serving.model.quantized_linear import QuantizedLinear
from serving.quantization import apply, search
from serving.quantization.apply import apply_scales, find_scales
from serving.quantization.calibrate import activations
from serving.quantization.scheme import ROTATED, Int8Scheme
from serving.quantization.search import output_error
from tests.serving.model.oracle import VOCAB, build, configs, save
from tests.serving.model.paged import PagedRun, run_mixed, run_whole

EVERYTHING = Int8Scheme(high=())
TRANSFORMED = replace(ROTATED, high=())
CHANCE = random.Random(5)
CALIBRATION = [[CHANCE.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
PROMPTS = [[CHANCE.randrange(VOCAB) for _ in range(length)] for length in (41, 9)]


@pytest.fixture(scope="module", params=sorted(configs()))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()[request.param]), tmp_path_factory.mktemp(request.param))


def logits(model: Decoder) -> Tensor:
    run = PagedRun(model, PROMPTS, block_size=4)
    run_whole(run)
    return torch.cat([run.result(s) for s in range(len(PROMPTS))])


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def linears(model: Decoder) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | QuantizedLinear)}


def quantize_model(model: Decoder, scheme: Int8Scheme, calibration: list[list[int]] | None) -> Decoder:
    return apply_scales(model, scheme, find_scales(model, scheme, calibration))


@pytest.mark.parametrize("scheme", [EVERYTHING, TRANSFORMED], ids=["plain", "rotated"])
@pytest.mark.parametrize("calibration", [CALIBRATION, None], ids=["calibrated", "data-free"])
@pytest.mark.thorough
def test_every_architecture_stays_close(
    folder: Path, calibration: list[list[int]] | None, scheme: Int8Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mixture of experts, where a token takes the same ones: near a border between two, rounding takes another."""
    chosen: list[Tensor] = []
    monkeypatch.setattr(moe, "route", lambda *given: _noted(chosen, route(*given)))
    exact = logits(load(folder, "float32").model)
    monkeypatch.setattr(moe, "route", route)
    model = quantize_model(load(folder, "float32").model, scheme, calibration)
    wide = {name for name, module in linears(model).items() if not isinstance(module, QuantizedLinear)}
    assert all(name.endswith(".router") for name in wide)  # which experts a token takes is no matter of rounding
    found = logits(model)
    mixed = PagedRun(model, PROMPTS, block_size=4)
    run_mixed(mixed)
    # Sums in another order can move an activation over the border between two integers: close, not equal.
    rows = torch.cat([mixed.result(s) for s in range(2)])
    assert (apart(rows, found) if not chosen else _median_apart(rows, found)) < 0.03
    monkeypatch.setattr(moe, "route", lambda logits, spec, bias: _taking(chosen.pop(0), logits, spec))
    assert 0 < apart(logits(model), exact) < 0.06


def _noted(chosen: list[Tensor], routed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    chosen.append(routed[0])
    return routed


def _taking(experts_TK: Tensor, logits_TE: Tensor, spec: moe.MoeSpec) -> tuple[Tensor, Tensor]:
    """The weights of these experts, as `route` has them."""
    scores_TE = logits_TE.float().softmax(-1) if spec.scoring == "softmax" else logits_TE.float().sigmoid()
    shares = scores_TE.gather(1, experts_TK)
    return experts_TK, spec.scaling * (shares / shares.sum(-1, keepdim=True) if spec.normalized else shares)


def _median_apart(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize("scheme", [EVERYTHING, TRANSFORMED], ids=["plain", "rotated"])
@pytest.mark.thorough
def test_smoothing_leaves_the_function_as_it_was(
    folder: Path, scheme: Int8Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rounding, what is multiplied into the weights is just what was divided out before, and so is what is
    transformed."""

    class Unrounded(QuantizedLinear):
        def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, rotation: int = 0) -> None:
            super().__init__(torch.zeros(weight.shape, dtype=torch.int8), scale, bias, rotation)
            self.exact = weight

        def forward(self, x: Tensor) -> Tensor:
            x = search.rotated(x, self.rotation)
            return nn.functional.linear(x, self.exact * self.scale[:, None], self.bias)

    model = load(folder, "float32").model
    exact = logits(model)
    scales = find_scales(model, scheme, CALIBRATION)
    smoothed = [name for name, found in scales.items() if found.smoothing is not None]
    expected = {"attention.qkv", "attention.o"}
    if (latent := model.spec.mla) is not None:
        expected = {"attention.qkv_a"} if latent.q_rank is None else {"attention.qkv_a", "attention.q_b"}
    assert {name.split(".", 2)[-1] for name in smoothed} >= {*expected, "head"}
    monkeypatch.setattr(apply, "QuantizedLinear", Unrounded)
    monkeypatch.setattr(apply, "rounded", lambda weight, scale: weight / scale[:, None])
    torch.testing.assert_close(logits(apply_scales(model, scheme, scales)), exact, atol=2e-4, rtol=0)


@pytest.mark.thorough
def test_the_search_changes_nothing(folder: Path) -> None:
    model = load(folder, "float32").model
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    first, second = (find_scales(model, EVERYTHING, CALIBRATION) for _ in range(2))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    apply_scales(model, EVERYTHING, first)
    assert all(torch.equal(first[name].scale, second[name].scale) for name in first)


def with_outliers(model: Decoder) -> Decoder:
    """Some channels of the norms are 40 times as large, and the weights that read them as small: the same function."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name.endswith(("attention_norm.weight", "mlp_norm.weight")):
            reader = name.replace("attention_norm", "attention.qkv").replace("mlp_norm", "mlp.gate_up")
            parameter.data[:3] *= 40
            parameters[reader].data[:, :3] /= 40
    return model


@pytest.mark.thorough
def test_calibration_pays_where_channels_are_uneven(tmp_path: Path) -> None:
    path = save(build(configs()["llama3"]), tmp_path)
    exact = logits(load(path, "float32").model)
    errors = [
        apart(logits(quantize_model(with_outliers(load(path, "float32").model), EVERYTHING, given)), exact)
        for given in (CALIBRATION, None)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_values_are_smoothed_head_by_head(tmp_path: Path) -> None:
    """Uneven rows of v, two query heads to each: what o is given is evened out, and what is found helps just there."""
    model = load(save(build(configs()["llama3"]), tmp_path), "float32").model
    layer = model.get_submodule("layers.1.attention")
    v_rows = slice(-2 * 8, None)
    uneven = torch.logspace(-1.5, 1.5, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(1))]
    by_input = uneven.view(2, 1, 8).expand(2, 2, 8).flatten()
    parameters = dict(layer.named_parameters())
    parameters["qkv.weight"].data[v_rows] *= uneven[:, None]
    parameters["o.weight"].data /= by_input
    name = "layers.1.attention.o"
    seen = activations(model, CALIBRATION, [name], 1000)[name]
    found = find_scales(model, EVERYTHING, CALIBRATION)[name].smoothing
    assert found is not None
    weight = parameters["o.weight"].data
    before, after = (output_error(seen.rows, weight, s) for s in (torch.ones(32), found))
    assert after < 0.2 * before
    assert torch.equal(found.view(2, 2, 8)[:, 0], found.view(2, 2, 8)[:, 1])


def test_the_first_tokens_of_every_sequence_are_looked_at(tmp_path: Path) -> None:
    model = load(save(build(configs()["llama2"]), tmp_path), "float32").model
    name = "layers.0.attention.qkv"
    every, few = (activations(model, CALIBRATION, [name], rows)[name] for rows in (1000, 4))
    starts = [start + offset for start in (0, 40, 80, 120) for offset in (0, 1)]
    assert torch.equal(few.rows, every.rows[starts])
    assert torch.equal(few.sizes, every.sizes)


def test_sensitive_layers_stay_as_they_were(tmp_path: Path) -> None:
    path = save(build(configs()["llama2"]), tmp_path)
    scheme = replace(EVERYTHING, high=("head", r"layers\.(0|last)\.mlp\.down", r"layers\.1\.attention\.qkv"))
    kept = {"head", "layers.0.mlp.down", "layers.2.mlp.down", "layers.1.attention.qkv"}
    before = load(path, "float32").model
    model = quantize_model(load(path, "float32").model, scheme, CALIBRATION)
    assert {name for name, module in linears(model).items() if isinstance(module, nn.Linear)} == kept
    for name in kept:
        assert torch.equal(model.get_submodule(name).weight, before.get_submodule(name).weight)  # type: ignore[arg-type]
    assert apart(logits(model), logits(before)) < 0.06


def test_scales_of_another_scheme_are_refused(tmp_path: Path) -> None:
    model = load(save(build(configs()["llama2"]), tmp_path), "float32").model
    with pytest.raises(ValueError, match="other layers"):
        apply_scales(model, EVERYTHING, find_scales(model, Int8Scheme(high=("head",)), None))
