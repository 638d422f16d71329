"""Which way a worker computes, and that its tokens are drawn the same way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deploy.forward import make_forward, make_sampler
from kvcache.device import DevicePool
from serving.config import EngineConfig
from serving.engine.compiled_selection import CompiledSelection
from serving.engine.forward import EagerForward
from serving.engine.fused import FusedForward
from serving.engine.selection import TorchSelection
from serving.kernels import cpu
from serving.model.loading import LoadedModel


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Compiled kernels leave torch one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not cpu.available(), reason="the kernels cannot be built here")
def test_the_kernels_that_score_draw_too(tiny_model: LoadedModel) -> None:
    pool = DevicePool(tiny_model.spec.kv_layers(tiny_model.dtype), 4, 16)
    forward = make_forward(tiny_model, pool, EngineConfig(kernels="compiled", threads=1), 64)
    selection = make_sampler(forward).selection
    assert isinstance(forward, FusedForward) and isinstance(selection, CompiledSelection)
    assert selection.kernels is forward.decoder.kernels


def test_torch_draws_what_torch_scores(tiny_model: LoadedModel) -> None:
    pool = DevicePool(tiny_model.spec.kv_layers(tiny_model.dtype), 4, 16)
    forward = make_forward(tiny_model, pool, EngineConfig(kernels="torch"), 64)
    assert isinstance(forward, EagerForward)
    assert isinstance(make_sampler(forward).selection, TorchSelection)
