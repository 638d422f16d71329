"""Models with experts through the compiled CPU step: against `transformers`, and against the model's own modules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from deploy.model_folder import read_config
from serving.forward.cpu_forward import supports
from serving.kernels import cpu
from serving.loader import quantize_at_load
from serving.loader.loading import LoadedModel, load
from serving.loader.upcycle import Upcycling, upcycle
from serving.model.fused_shape import unlike_llama
from serving.model.moe_spec import MoeSpec
from serving.model.quantized_linear import QuantizedLinear
from tests.serving.forward.compiled import CompiledRun
from tests.serving.model.oracle import VOCAB, build, configs, expected_logits, save
from tests.serving.model.paged import SCHEDULES, PagedRun, run_mixed, run_whole

pytestmark = pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here")
ARCHITECTURES = ("mixtral", "mixtral_windows", "qwen3_moe", "qwen3_moe_dense")
CHANCE = random.Random(1)
SEQUENCES = [[CHANCE.randrange(VOCAB) for _ in range(length)] for length in (41, 30, 9)]


@pytest.fixture(scope="module")
def kernels() -> Iterator[cpu.Kernels]:
    loaded = cpu.load(threads=2)
    assert loaded is not None
    yield loaded
    loaded.close()


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_logits_equal_transformers(
    architecture: str, schedule: str, kernels: cpu.Kernels, tmp_path: Path
) -> None:
    oracle = build(configs()[architecture])
    ours = load(save(oracle, tmp_path), "float32")
    assert supports(ours.model, ours.dtype) is None
    run = CompiledRun(ours.model, SEQUENCES, kernels, block_size=4)
    SCHEDULES[schedule](run)
    for s, tokens in enumerate(SEQUENCES):
        torch.testing.assert_close(run.result(s), expected_logits(oracle, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_int8_logits_are_those_of_the_modules(
    architecture: str, kernels: cpu.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(quantize_at_load, "calibration_tokens", lambda path, longest: [SEQUENCES[0]])
    ours = load(save(build(configs()[architecture]), tmp_path / "model"), "float32", quantization="int8")
    assert any(isinstance(module, QuantizedLinear) for module in ours.model.layers[0].mlp.modules())
    assert same_but_for_ties(ours, kernels, 2e-3) > 0.9


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_logits_are_near_those_of_the_modules(architecture: str, kernels: cpu.Kernels, tmp_path: Path) -> None:
    """The modules round every result to bfloat16, scores of the router too, and so choose otherwise now and then."""
    ours = load(save(build(configs()[architecture]), tmp_path), "bfloat16")
    assert same_but_for_ties(ours, kernels, 0.1) > 0.7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dense_model_and_its_upcycled_self_have_the_same_bits(
    dtype: str, kernels: cpu.Kernels, tmp_path: Path
) -> None:
    """With one expert a token: its weight is 1, and a row's products are the same whatever rows are beside it."""
    source, out = save(build(configs()["smollm2"]), tmp_path / "source"), tmp_path / "out"
    upcycle(source, read_config(source), out, Upcycling(experts=7, top_k=1), dtype)
    runs = [CompiledRun(load(path, dtype).model, SEQUENCES, kernels, block_size=4) for path in (source, out)]
    for run in runs:
        run_mixed(run)
    for s in range(len(SEQUENCES)):
        assert torch.equal(runs[0].result(s), runs[1].result(s))


def test_experts_routed_in_another_way_are_left_to_the_modules(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Grouped(MoeSpec):
        groups: int = 2

    spec = load(save(build(configs()["mixtral"]), tmp_path)).spec
    assert spec.moe is not None and unlike_llama(spec) is None
    other = Grouped(experts=4, top_k=2, intermediate=8, sparse=spec.moe.sparse)
    assert "does not route experts" in (unlike_llama(replace(spec, moe=other)) or "")


def same_but_for_ties(ours: LoadedModel, kernels: cpu.Kernels, tolerance: float) -> float:
    """The share of positions whose logits are within `tolerance` standard deviations of those of the modules."""
    compiled = CompiledRun(ours.model, SEQUENCES, kernels, block_size=16)
    modules = PagedRun(ours.model, SEQUENCES, block_size=16)
    for run in (compiled, modules):
        run_whole(run)
    near = []
    for s in range(len(SEQUENCES)):
        expected = modules.result(s)
        near.append((compiled.result(s) - expected).abs().amax(dim=1) < tolerance * expected.std())
    return float(torch.cat(near).float().mean())
