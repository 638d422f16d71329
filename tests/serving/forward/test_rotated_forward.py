"""A model whose inputs are transformed before INT8 products: what computes it as the modules do, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcache.memory.device import DeviceKV
from serving.forward.cpu_forward import supports
from serving.kernels import cpu
from serving.loader import quantize_at_load
from serving.loader.loading import LoadedModel, load
from serving.model.quantized_linear import QuantizedLinear, rotated_linear
from tests.serving.forward.test_sparse_forward import SEQUENCES, same_but_for_ties
from tests.serving.model.oracle import build, configs, save


@pytest.fixture
def rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(quantize_at_load, "calibration_tokens", lambda path, longest: [SEQUENCES[0]])
    loaded = load(save(build(configs()["llama3"]), tmp_path / "model"), "float32", quantization="int8")
    assert rotated_linear(loaded.model) == "layers.0.attention.qkv"
    return loaded


@pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here")
def test_the_compiled_step_computes_what_the_modules_do(rotated: LoadedModel) -> None:
    kernels = cpu.load(threads=2)
    assert kernels is not None
    assert supports(rotated.model, "float32") is None
    assert same_but_for_ties(rotated, kernels, 2e-3) > 0.9
    kernels.close()


def test_experts_of_transformed_inputs_are_left_to_the_modules(tmp_path: Path) -> None:
    loaded = load(save(build(configs()["mixtral"]), tmp_path), "float32")
    assert supports(loaded.model, "float32") is None
    down = loaded.model.get_submodule("layers.1.mlp.experts.2.down")
    weight = torch.zeros(down.weight.shape, dtype=torch.int8)
    loaded.model.set_submodule(
        "layers.1.mlp.experts.2.down", QuantizedLinear(weight, torch.ones(len(weight)), None, rotation=16)
    )
    said = supports(loaded.model, "float32")
    assert said == "the fused step does not transform the inputs of layers.1.mlp.experts.2.down"


def test_triton_leaves_it_to_the_modules(rotated: LoadedModel) -> None:
    pytest.importorskip("triton")
    from serving.forward import triton_forward

    planes = DeviceKV(rotated.spec.kv_layers("float32"), 1, 16).planes
    said = triton_forward.supports(rotated.model, "float32", planes[0])
    assert said == "the Triton kernels do not transform layers.0.attention.qkv's inputs before they are quantized"


def test_only_what_the_fused_step_computes_is_rotated(rotated: LoadedModel) -> None:
    spec = rotated.spec
    assert quantize_at_load.default_scheme(spec, "cpu").rotated
    assert not quantize_at_load.default_scheme(spec, "cuda").rotated
    assert not quantize_at_load.default_scheme(replace(spec, sinks=True), "cpu").rotated
