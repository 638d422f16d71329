"""INT8 KV within blocks made for floats: the bits of INT8 in blocks of its own, whatever the blocks held before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.forward.forward import Forward
from serving.loader.loading import LoadedModel, load
from tests.serving.engine.test_layer_barrier import Make, eager, fused
from tests.serving.kernels.segments import CopiedSegments
from tests.tiny import tiny_llama

BLOCKS, SIZE = 24, 16
LONG, SHORT = list(range(1, 20)), [20, 0, 23]  # block tables of two sequences


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), request.param)


def poisoned(model: LoadedModel, kv_dtype: str) -> DeviceKV:
    """A pool of bytes that are NaN as any float."""
    device_kv = DeviceKV(model.spec.kv_layers(kv_dtype), BLOCKS, SIZE)
    for plane in (plane for planes in device_kv.planes for plane in planes):
        plane.view(-1).view(torch.uint8).fill_(0xFF)
    return device_kv


def steps(forward: Forward, device_kv: DeviceKV) -> list[Tensor]:
    """Scores of prompts in chunks, of both together, of decode steps, and of one whose first KV comes in segments."""
    prompt = [3 + (7 * i) % 300 for i in range(300)]
    found = []

    def step(tokens: list[list[int]], starts: list[int], tables: list[list[int]], offloaded: int = 0) -> None:
        segments = CopiedSegments(device_kv.planes, tables[0], offloaded, 128, start=starts[0]) if offloaded else None
        batch = RaggedBatch.build(
            tokens=tokens,
            starts=starts,
            block_tables=[table[offloaded // SIZE :] for table in tables],
            block_size=SIZE,
            offloaded=segments,
        )
        with torch.inference_mode():
            found.append(forward.logits(batch, None))

    step([prompt[:150]], [0], [LONG])
    step([prompt[150:261], prompt[5:25]], [150, 0], [LONG, SHORT])
    step([[9], [8]], [261, 20], [LONG, SHORT])
    step([prompt[262:300]], [262], [LONG], offloaded=256)
    return found


@pytest.mark.parametrize("make", [eager, fused])
def test_scores_and_kv_have_the_bits_of_int8_alone(model: LoadedModel, make: Make) -> None:
    own, wide = poisoned(model, "int8"), poisoned(model, model.dtype)
    expected = steps(make(model, own), own)
    kept = wide.kept_as("int8")
    found = steps(make(model, wide).over(kept.planes), kept)
    assert all(scores.isfinite().all() for scores in expected)
    assert all(map(torch.equal, found, expected))
    slots = own.slots(LONG, 0, 300)
    for layer in range(model.spec.layers):
        assert all(map(torch.equal, kept.read(layer, slots), own.read(layer, slots)))


@pytest.mark.parametrize("make", [eager, fused])
def test_blocks_that_held_int8_serve_floats_again(model: LoadedModel, make: Make) -> None:
    fresh, used = DeviceKV(model.spec.kv_layers(model.dtype), BLOCKS, SIZE), poisoned(model, model.dtype)
    forward = make(model, used)
    kept = used.kept_as("int8")
    steps(forward.over(kept.planes), kept)
    assert all(map(torch.equal, steps(forward, used), steps(make(model, fresh), fresh)))
