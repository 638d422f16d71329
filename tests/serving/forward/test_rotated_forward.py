"""A model whose inputs are transformed before INT8 products: what computes it as the modules do, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.memory.device import DeviceKV
from serving.forward.cpu_forward import supports
from serving.kernels import cpu
from serving.loader import quantize_at_load
from serving.loader.loading import LoadedModel, load
from serving.model.quantized_linear import rotated_linear
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


def test_triton_leaves_it_to_the_modules(rotated: LoadedModel) -> None:
    pytest.importorskip("triton")
    from serving.forward import triton_forward

    planes = DeviceKV(rotated.spec.kv_layers("float32"), 1, 16).planes
    said = triton_forward.supports(rotated.model, "float32", planes[0])
    assert said == "the Triton kernels do not transform layers.0.attention.qkv's inputs before they are quantized"


def test_a_gpu_quantizes_what_its_kernels_multiply() -> None:
    assert not quantize_at_load.default_scheme("cuda").rotated
    assert quantize_at_load.default_scheme("cpu").rotated
