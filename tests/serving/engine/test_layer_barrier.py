"""The barrier, and both forward passes at it: what is told of the layers, and when a step waits or leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from serving.batch.layer_barrier import LayerBarrier
from serving.batch.ragged import RaggedBatch
from serving.forward.cpu_forward import CpuForward
from serving.forward.forward import EagerForward, Forward
from serving.kernels import cpu
from serving.loader.loading import LoadedModel, load
from tests.tiny import tiny_llama

LAYERS = 4
PREFIX = 48
PROMPT = [3 + (7 * i) % 300 for i in range(PREFIX + 20)]
Make = Callable[[LoadedModel, DeviceKV], Forward]


def fused(model: LoadedModel, device_kv: DeviceKV) -> Forward:
    kernels = cpu.load(threads=2)
    if kernels is None:
        pytest.skip("no compiler")
    return CpuForward(model.model, device_kv.planes, kernels, 512)


def eager(model: LoadedModel, device_kv: DeviceKV) -> Forward:
    return EagerForward(model.model, device_kv.planes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS), "float32")


class Case:
    """A prompt computed whole, and the KV of its prefix taken away."""

    def __init__(self, model: LoadedModel, make: Make):
        self.device_kv = DeviceKV(model.spec.kv_layers("float32"), 8, 16)
        self.forward = make(model, self.device_kv)
        self.told: list[int] = []
        self.step(0, None)
        self.expected = self.step(PREFIX, None)
        self.kept = [[plane[: PREFIX // 16].clone() for plane in planes] for planes in self.device_kv.planes]
        for planes in self.device_kv.planes:
            for plane in planes:
                plane.fill_(7)
        self.told.clear()

    @torch.inference_mode()
    def step(self, start: int, barrier: LayerBarrier | None) -> Tensor:
        batch = RaggedBatch.build(
            tokens=[PROMPT[start:]], starts=[start], block_tables=[list(range(8))], block_size=16, barrier=barrier
        )
        return self.forward.logits(batch, self.told.append)

    def bring(self, layer: int) -> None:
        for plane, kept in zip(self.device_kv.planes[layer], self.kept[layer], strict=True):
            plane[: len(kept)] = kept


@pytest.mark.parametrize("make", [eager, fused])
def test_a_layer_is_told_of_once_its_earlier_kv_is_there(model: LoadedModel, make: Make) -> None:
    case, barrier, seen = Case(model, make), LayerBarrier(), []

    def bring() -> None:
        for layer in range(LAYERS):
            while len(case.told) < layer:
                pass
            seen.append(len(case.told))
            case.bring(layer)
            barrier.open(layer + 1)

    bringing = threading.Thread(target=bring)
    bringing.start()
    found = case.step(PREFIX, barrier)
    bringing.join()
    assert torch.equal(found, case.expected) and not barrier.left
    assert seen == case.told == list(range(LAYERS))


@pytest.mark.parametrize("make", [eager, fused])
@pytest.mark.parametrize("there", range(LAYERS))
def test_a_step_that_leaves_tells_of_no_further_layer(model: LoadedModel, make: Make, there: int) -> None:
    case, barrier = Case(model, make), LayerBarrier()
    for layer in range(there):
        case.bring(layer)
    barrier.open(there)
    barrier.hurry()
    case.step(PREFIX, barrier)
    assert barrier.left and case.told == list(range(there))[: len(case.told)]
    case.told.clear()
    for layer in range(LAYERS):
        case.bring(layer)
    assert torch.equal(case.step(PREFIX, None), case.expected), "the next step is as any other"
    assert case.told == list(range(LAYERS))


def test_a_gate_that_failed_stays_shut() -> None:
    barrier = LayerBarrier()
    barrier.open(1)
    assert barrier.passes(0) and not barrier.left
    barrier.fail()
    barrier.open(3)
    barrier.begin()
    assert not barrier.passes(0) and barrier.left


def test_who_is_hurried_leaves_where_it_would_wait_and_only_in_that_step() -> None:
    barrier = LayerBarrier()
    barrier.hurry()
    barrier.open(1)
    assert barrier.passes(0) and not barrier.passes(1) and barrier.left
    barrier.begin()
    assert not barrier.left
    opening = threading.Thread(target=barrier.open, args=(2,))
    opening.start()
    assert barrier.passes(1)
    opening.join()
