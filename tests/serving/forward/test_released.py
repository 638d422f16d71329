"""A worker on a CPU holds each weight once: what the kernels have packed is given up, and nobody computes by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deploy.worker.computing import KeptForward
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.forward.choose import make_forward
from serving.forward.forward import Forward
from serving.kernels import cpu
from serving.loader.loading import LoadedModel, load
from serving.model.quantized_linear import QuantizedLinear
from tests.tiny import tiny_llama

pytestmark = pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here")
CONFIG = EngineConfig(kernels="compiled", threads=1)
PROMPT = [3 + (7 * i) % 300 for i in range(40)]
BLOCK = 16


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=2)


def memory(model: LoadedModel, blocks: int = 4) -> DeviceKV:
    return DeviceKV(model.spec.kv_layers(model.dtype), blocks, BLOCK)


def logits(forward: Forward, tokens: list[int] = PROMPT) -> Tensor:
    blocks = -(-len(tokens) // BLOCK)
    batch = RaggedBatch.build(tokens=[tokens], starts=[0], block_tables=[range(blocks)], block_size=BLOCK)
    return forward.logits(batch, None)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | QuantizedLinear)}


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_packed_layers_hold_nothing_and_compute_the_same(path: Path, dtype: str, quantization: str | None) -> None:
    kept, model = load(path, dtype, quantization=quantization), load(path, dtype, quantization=quantization)
    expected = logits(make_forward(kept, memory(kept).planes, CONFIG, 64))
    size = sum(one.nbytes for one in model.model.parameters())
    forward = make_forward(model, memory(model).planes, CONFIG, 64, releases=True)
    assert torch.equal(logits(forward), expected)
    held = {
        f"{name}.{leaf}"
        for name, one in linears(model.model).items()
        for leaf, value in one.named_parameters()
        if not value.is_meta
    }
    assert held == set()
    assert not model.model.embed.weight.is_meta, "the kernels read it as it lies"
    assert sum(one.nbytes for one in model.model.parameters()) == size, "guesses of a step's cost go by it"
    assert not any(one.is_meta for one in kept.model.parameters()), "nobody has asked for that"


def test_who_computes_or_packs_by_them_is_refused(path: Path) -> None:
    model = load(path, "float32")
    make_forward(model, memory(model).planes, CONFIG, 64, releases=True)
    for module in linears(model.model).values():
        with pytest.raises(RuntimeError, match="given up when the kernels took them over: load the model again"):
            module(torch.zeros(1, module.in_features))
    for kernels in ("torch", "compiled"):
        with pytest.raises(RuntimeError, match="load the model again"):
            logits(make_forward(model, memory(model).planes, EngineConfig(kernels=kernels, threads=1), 64))


def test_the_next_worker_of_a_process_may_read_further(path: Path) -> None:
    """A decode worker whose sequences are longer than its process's first worker knew has no weights to pack again."""
    model, other, longer = load(path, "float32"), load(path, "float32"), [*PROMPT, *PROMPT]
    forward_of = KeptForward()
    first = forward_of(model, memory(model), CONFIG, 48)
    with pytest.raises(ValueError, match="rotary table of 48"):
        logits(forward_of(model, memory(model, 8), CONFIG, 48), longer)
    later = forward_of(model, memory(model, 8), CONFIG, 128)
    expected = make_forward(other, memory(other, 8).planes, CONFIG, 128)
    assert torch.equal(logits(later, longer), logits(expected, longer))
    assert torch.equal(logits(first), logits(expected))
