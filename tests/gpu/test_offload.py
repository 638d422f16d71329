"""KV in host memory, on a device that does its work as late as it may: attention finds each segment as it reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache.blocks.offload import OffloadPlan
from kvcache.memory.device import DeviceKV
from kvcache.memory.host import HostKV
from serving.engine.offload import OffloadMove, OffloadState
from serving.kvspec import gqa
from serving.streams import DEFAULT
from tests.gpu.fake_cuda import FakeCuda, installed
from tests.gpu.fake_graphs import MadeOnDevice

LAYERS, EXTENTS, QUERIES = 3, 5, 2
PLAN = OffloadPlan(block_size=4, device_blocks=40, extent_blocks=2, extents=9, segment_extents=2)
TOKENS = EXTENTS * PLAN.extent_tokens


class Reading:
    """Stands for the kernels of attention: each launch notes the keys it would read, when the device does it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.read: list[Tensor] = []

    def attend_range(self, _q: Tensor, paged: Any, table: Tensor, tokens: int, *_rest: object) -> None:
        def read(keys: Tensor, blocks: Tensor) -> None:
            self.read.append(keys[blocks.long()].flatten(0, 1)[:tokens].clone())

        self.cuda.launch(read, paged.k, table)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), eager=st.sampled_from([0.0, 0.3, 0.8]))
def test_each_launch_reads_its_segment_of_its_layer(seed: int, eager: float) -> None:
    """Twice: the second step's copies go into buffers that the first one's last launches have still to read."""
    pytest.importorskip("triton")
    from serving.kernels.gpu import offloaded_attention
    from serving.kernels.gpu.planes import Paged

    cuda = FakeCuda(seed, eager)
    with installed(cuda), MadeOnDevice(cuda), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        reading = Reading(cuda)
        patch.setattr(offloaded_attention, "_attend_range", reading.attend_range)
        patch.setattr(Paged, "check", lambda self: None)
        specs = (gqa(1, 2, "float32"),) * LAYERS
        numbers = [torch.randn(PLAN.device_blocks, PLAN.block_size, 1, 2) for _ in range(LAYERS)]
        device_kv = DeviceKV(specs, PLAN.device_blocks, PLAN.block_size)
        planes = [
            tuple(cuda.tensor(plane) for _ in layer) for layer, plane in zip(device_kv.planes, numbers, strict=True)
        ]
        device_kv = DeviceKV(specs, PLAN.device_blocks, PLAN.block_size, planes=planes)
        host = HostKV(PLAN, device_kv, (None,) * LAYERS)
        moved = [(2 * extent, 2 * extent + 1) for extent in range(EXTENTS)]
        host.move([OffloadMove(blocks, extent) for extent, blocks in enumerate(moved)])
        for k, v in planes:
            k[: 2 * EXTENTS].fill_(torch.nan), v[: 2 * EXTENTS].fill_(torch.nan)  # others write there
        offload = OffloadState(PLAN.extent_blocks, list(range(EXTENTS)), moved=EXTENTS)
        q = cuda.tensor(torch.zeros(QUERIES, 1, 2))
        before = cuda.counts.copy()
        for _ in range(2):
            with host.stream(offload, TOKENS) as offloaded:
                batch: Any = SimpleNamespace(
                    offloaded=offloaded,
                    context_lens_list=(TOKENS + QUERIES,),
                    query_lens=(QUERIES,),
                    block_tables=cuda.tensor(torch.tensor([[30]], dtype=torch.int32)),
                )
                for k, v in planes:
                    offloaded_attention.offloaded_attention(q, Paged(k, v, None, None), batch, 1.0, None)
        used = cuda.counts - before
        cuda.finish()
    wanted = []
    for plane in numbers:
        whole = plane[: 2 * EXTENTS].flatten(0, 1)
        wanted += [whole[first : first + 16] for first in range(0, TOKENS, 16)] + [plane[30, :QUERIES]]
    assert len(reading.read) == 2 * len(wanted)
    assert all(map(torch.equal, reading.read, 2 * wanted))
    assert not any(counted.what.startswith("wait") for counted in used), "the host waits for nothing"
    copies = {counted.stream for counted in used if counted.what == "copy"}
    assert copies == {"kv-staging"} and DEFAULT not in copies
