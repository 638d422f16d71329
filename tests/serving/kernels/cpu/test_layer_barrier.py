"""A step that waits for earlier KV, layer by layer: it reads none before it is there, and its bits are the same."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from serving.batch.layer_barrier import LayerBarrier
from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from tests.serving.kernels.cpu.formulas import SmallDecoder

LAYERS = 4
PREFIX = 144  # tokens, nine blocks
PROMPT = [(13 * i + 5) % 100 for i in range(PREFIX + 150)]
BY_PANELS, BY_ROWS = 9, 150  # tokens of the step


class Case:
    """A prompt computed whole, and its KV taken away again but for what a test puts back."""

    def __init__(self, kernels: cpu.Kernels, count: int):
        self.small = SmallDecoder(kind=Kind.INT8, kv_kind=Kind.BF16, layers=LAYERS, windows=(0,) * LAYERS)
        self.decoder = self.small.build(kernels)
        self.progress = torch.zeros(1, dtype=torch.int32)
        self.prompt = PROMPT[: PREFIX + count]
        self.expected = self.step(0, None)
        self.kept = [(one.k.clone(), one.v.clone()) for one in self.small.planes]
        for one in self.small.planes:
            one.k.fill_(7)
            one.v.fill_(7)
        self.progress.zero_()

    def step(self, start: int, barrier: LayerBarrier | None) -> Tensor:
        batch = RaggedBatch.build(
            tokens=[self.prompt[start:]], starts=[start], block_tables=[list(range(20))], block_size=16, barrier=barrier
        )
        return self.decoder.step(batch, progress=self.progress)

    def bring(self, layer: int) -> None:
        """The layer's KV of the prefix."""
        blocks = slice(0, PREFIX // 16)
        for plane, kept in zip((self.small.planes[layer].k, self.small.planes[layer].v), self.kept[layer], strict=True):
            plane[blocks] = kept[blocks]


@pytest.mark.parametrize("count", [1, BY_PANELS, BY_ROWS])
def test_layers_that_come_while_the_step_waits(kernels: cpu.Kernels, count: int) -> None:
    case, barrier, seen = Case(kernels, count), LayerBarrier(), []

    def bring() -> None:
        for layer in range(LAYERS):
            while int(case.progress) < layer:  # the step has come to the barrier of this layer, or is about to
                pass
            seen.append(int(case.progress))
            case.bring(layer)
            barrier.open(layer + 1)

    bringing = threading.Thread(target=bring)
    bringing.start()
    found = case.step(PREFIX, barrier)
    bringing.join()
    assert torch.equal(found, case.expected) and not barrier.left
    assert seen == list(range(LAYERS)), "a layer was counted before its earlier KV was there"
    for one, kept in zip(case.small.planes, case.kept, strict=True):
        assert torch.equal(one.k[: len(case.prompt) // 16], kept[0][: len(case.prompt) // 16])


@pytest.mark.parametrize("count", [BY_PANELS, BY_ROWS])
@pytest.mark.parametrize("there", range(LAYERS))
def test_a_step_leaves_at_the_first_layer_that_is_not_there(kernels: cpu.Kernels, count: int, there: int) -> None:
    case, barrier = Case(kernels, count), LayerBarrier()
    barrier.open(there)
    barrier.hurry()
    case.step(PREFIX, barrier)
    assert barrier.left and int(case.progress) == there
    barrier.begin()
    barrier.fail()
    case.progress.zero_()
    case.step(PREFIX, barrier)
    assert barrier.left and int(case.progress) == 0
    for layer in range(LAYERS):
        case.bring(layer)
    assert torch.equal(case.step(PREFIX, None), case.expected)


@pytest.mark.parametrize("count", [BY_PANELS, BY_ROWS])
def test_what_is_all_there_is_not_waited_for(kernels: cpu.Kernels, count: int) -> None:
    case, barrier = Case(kernels, count), LayerBarrier()
    for layer in range(LAYERS):
        case.bring(layer)
    barrier.open(LAYERS)
    barrier.hurry()
    assert torch.equal(case.step(PREFIX, barrier), case.expected)
    assert not barrier.left and barrier.waited_seconds == 0
