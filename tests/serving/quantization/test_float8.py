"""FP8 folders of the compressed-tensors convention: read as they are, and computed as what their numbers stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from serving.forward.cpu_forward import supports
from serving.kernels import float8
from serving.loader.loading import load
from serving.model.quantized_linear import QuantizedLinear
from tests.serving.model.oracle import build, configs, save
from tests.serving.quantization.test_apply import logits

LINEARS = ("_proj.weight",)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model with FP8 weights, and the same numbers as float32."""
    dense, stored = save(build(configs()["llama_biased"]), tmp_path / "dense"), tmp_path / "fp8"
    shutil.copytree(dense, stored)
    plain = load_file(dense / "model.safetensors")
    held: dict[str, torch.Tensor] = {}
    for name, value in plain.items():
        held[name] = value
        if name.endswith(LINEARS):
            held[name], scale = float8.quantize_rows(value)
            held[f"{name}_scale"] = scale[:, None]
            plain[name] = held[name].float() * scale[:, None]
    save_file(plain, dense / "model.safetensors")
    save_file(held, stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = described()
    (stored / "config.json").write_text(json.dumps(config))
    return stored, dense


def described(**weights: Any) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False} | weights,
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**method, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def test_a_folder_is_read_as_it_is(folders: tuple[Path, Path]) -> None:
    stored, dense = (load(folder, "float32").model for folder in folders)
    found = {name: module for name, module in stored.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(found) == 4 * stored.spec.layers and all(module.float8 for module in found.values())
    for name, module in found.items():
        meant = module.weight.float() * module.scale[:, None]
        assert torch.equal(meant, dense.get_submodule(name).weight), name
    exact, rounded = logits(dense), logits(stored)
    error = float((rounded - exact).norm() / exact.norm())
    assert 0 < error < 0.1, "activations have four bits of mantissa"
    assert "FP8" in (supports(stored, "float32") or "")


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**31))
def test_rows_are_as_near_as_eight_bits_allow(rows: int, inputs: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-6, 6, rows)[:, None]
    x[0] = 0
    values, scale = float8.quantize_rows(x)
    assert values.dtype is torch.float8_e4m3fn
    meant = values.float() * scale[:, None]
    # Half a step of three bits of mantissa, and of the least numbers a step of 2^-9.
    assert ((meant - x).abs() <= x.abs() / 16 + scale[:, None] * 2**-10).all()
    weight, weight_scale = float8.quantize_rows(torch.randn(outputs, inputs, generator=generator))
    found = float8.linear(x, weight, weight_scale, None)
    wide = (weight.float() * weight_scale[:, None]).t()
    assert ((found - meant @ wide).abs() <= 1e-5 * (meant.abs() @ wide.abs()) + 1e-12).all(), "terms may cancel out"


@pytest.mark.parametrize("wrong", [{"type": "int"}, {"strategy": "tensor"}, {"num_bits": 4}])
def test_other_kinds_are_refused_by_name(folders: tuple[Path, Path], wrong: dict[str, Any]) -> None:
    path = folders[0] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": described(**wrong)}))
    with pytest.raises(ValueError, match=f"weights with {next(iter(wrong))}"):
        load(folders[0])
