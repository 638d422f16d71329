"""A forward pass of a FakeCuda: it writes KV that tells token and position, and draws what follows from a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.forward.layer_events import LayerDone, layer_notifier
from serving.kvspec import LayerKV
from serving.model.spec import ModelSpec
from tests.gpu.fake_cuda import FakeCuda, poisoned

VOCAB = 997
SPEC = ModelSpec(
    architecture="llama",
    vocab_size=VOCAB,
    hidden=8,
    layers=3,
    heads=1,
    kv_heads=1,
    head_dim=2,
    intermediate=8,
    max_position=4096,
    norm_eps=1e-5,
)


def device_pool(cuda: FakeCuda, specs: Sequence[LayerKV], blocks: int, size: int) -> DeviceKV:
    """KV memory of the device; nothing has been written to it."""
    host = DeviceKV(specs, blocks, size)
    planes = [
        tuple(cuda.tensor(poisoned(one.shape, one.stride(), one.dtype)) for one in layer) for layer in host.planes
    ]
    return DeviceKV(specs, blocks, size, planes=planes)


def next_token(token: int) -> int:
    return (token * 31 + 7) % VOCAB


def kv_of(token: int, position: int, layer: int) -> list[float]:
    """What a token's KV is, in either plane of a layer."""
    return [float(token + 1000 * layer), float(position)]


class LateForward:
    """See the module (serving.forward.forward.Forward); planes are float32 of one head and two dimensions."""

    form = "late"

    def __init__(self, device_kv: DeviceKV) -> None:
        self.planes = device_kv.planes
        self.device = device_kv.planes[0][0].device
        self._notify = layer_notifier(len(self.planes), self.device)

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        if layer_done is None:
            return self._compute(batch, lambda layer: None)
        with self._notify(layer_done) as written:
            return self._compute(batch, written)

    def _compute(self, batch: RaggedBatch, written: LayerDone) -> Tensor:
        for layer, planes in enumerate(self.planes):
            rows = torch.stack([batch.tokens + 1000 * layer, batch.positions], dim=1).to(torch.float32)
            for plane in planes:
                plane.flatten(0, 1).index_copy_(0, batch.slots, rows.unsqueeze(1))
            written(layer)
        return (batch.tokens.index_select(0, batch.logits_rows) * 31 + 7) % VOCAB
