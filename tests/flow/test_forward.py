"""Which way a worker computes, and that its tokens are drawn the same way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcache.memory.device import DeviceKV
from serving.config import EngineConfig
from serving.forward.choose import make_forward, make_sampler
from serving.forward.cpu_forward import CpuForward
from serving.forward.forward import EagerForward
from serving.kernels import cpu
from serving.loader.loading import LoadedModel
from serving.sampling.cpu_sampling import CpuSampling
from serving.sampling.torch_sampling import TorchSampling

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Compiled kernels leave torch one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here")
def test_the_kernels_that_score_draw_too(tiny_model: LoadedModel) -> None:
    device_kv = DeviceKV(tiny_model.spec.kv_layers(tiny_model.dtype), 4, 16)
    forward = make_forward(tiny_model, device_kv.planes, EngineConfig(kernels="compiled", threads=1), 64)
    selection = make_sampler(forward).backend
    assert isinstance(forward, CpuForward) and isinstance(selection, CpuSampling)
    assert selection.kernels is forward.decoder.kernels


def test_torch_draws_what_torch_scores(tiny_model: LoadedModel) -> None:
    device_kv = DeviceKV(tiny_model.spec.kv_layers(tiny_model.dtype), 4, 16)
    forward = make_forward(tiny_model, device_kv.planes, EngineConfig(kernels="torch"), 64)
    assert isinstance(forward, EagerForward)
    assert isinstance(make_sampler(forward).backend, TorchSampling)
