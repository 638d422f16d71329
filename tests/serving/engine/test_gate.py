"""The gate, and both ways of computing a model at it: what is told of the layers, and when a step waits or leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcache.device import DevicePool
from serving.engine.batch import RaggedBatch
from serving.engine.forward import EagerForward, Forward
from serving.engine.fused import FusedForward
from serving.engine.gate import Gate
from serving.kernels import cpu
from serving.model.loading import LoadedModel, load
from tests.tiny import tiny_llama

LAYERS = 4
PREFIX = 48
PROMPT = [3 + (7 * i) % 300 for i in range(PREFIX + 20)]
Make = Callable[[LoadedModel, DevicePool], Forward]


def fused(model: LoadedModel, pool: DevicePool) -> Forward:
    kernels = cpu.load(threads=2)
    if kernels is None:
        pytest.skip("no compiler")
    return FusedForward(model.model, pool.planes, kernels, 512)


def eager(model: LoadedModel, pool: DevicePool) -> Forward:
    return EagerForward(model.model, pool.planes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS), "float32")


class Case:
    """A prompt computed whole, and the KV of its prefix taken away."""

    def __init__(self, model: LoadedModel, make: Make):
        self.pool = DevicePool(model.spec.kv_layers("float32"), 8, 16)
        self.forward = make(model, self.pool)
        self.told: list[int] = []
        self.step(0, None)
        self.expected = self.step(PREFIX, None)
        self.kept = [[plane[: PREFIX // 16].clone() for plane in planes] for planes in self.pool.planes]
        for planes in self.pool.planes:
            for plane in planes:
                plane.fill_(7)
        self.told.clear()

    @torch.inference_mode()
    def step(self, start: int, gate: Gate | None) -> Tensor:
        batch = RaggedBatch.build(
            tokens=[PROMPT[start:]], starts=[start], block_tables=[list(range(8))], block_size=16, gate=gate
        )
        return self.forward.logits(batch, self.told.append)

    def bring(self, layer: int) -> None:
        for plane, kept in zip(self.pool.planes[layer], self.kept[layer], strict=True):
            plane[: len(kept)] = kept


@pytest.mark.parametrize("make", [eager, fused])
def test_a_layer_is_told_of_once_its_earlier_kv_is_there(model: LoadedModel, make: Make) -> None:
    case, gate, seen = Case(model, make), Gate(), []

    def bring() -> None:
        for layer in range(LAYERS):
            while len(case.told) < layer:
                pass
            seen.append(len(case.told))
            case.bring(layer)
            gate.open(layer + 1)

    bringing = threading.Thread(target=bring)
    bringing.start()
    found = case.step(PREFIX, gate)
    bringing.join()
    assert torch.equal(found, case.expected) and not gate.left
    assert seen == case.told == list(range(LAYERS))


@pytest.mark.parametrize("make", [eager, fused])
@pytest.mark.parametrize("there", range(LAYERS))
def test_a_step_that_leaves_tells_of_no_further_layer(model: LoadedModel, make: Make, there: int) -> None:
    case, gate = Case(model, make), Gate()
    for layer in range(there):
        case.bring(layer)
    gate.open(there)
    gate.hurry()
    case.step(PREFIX, gate)
    assert gate.left and case.told == list(range(there))[: len(case.told)]
    case.told.clear()
    for layer in range(LAYERS):
        case.bring(layer)
    assert torch.equal(case.step(PREFIX, None), case.expected), "the next step is as any other"
    assert case.told == list(range(LAYERS))


def test_a_gate_that_failed_stays_shut() -> None:
    gate = Gate()
    gate.open(1)
    assert gate.passes(0) and not gate.left
    gate.fail()
    gate.open(3)
    gate.begin()
    assert not gate.passes(0) and gate.left


def test_who_is_hurried_leaves_where_it_would_wait_and_only_in_that_step() -> None:
    gate = Gate()
    gate.hurry()
    gate.open(1)
    assert gate.passes(0) and not gate.passes(1) and gate.left
    gate.begin()
    assert not gate.left
    opening = threading.Thread(target=gate.open, args=(2,))
    opening.start()
    assert gate.passes(1)
    opening.join()
