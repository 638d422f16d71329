"""Models with experts and the Triton kernels, which have none: the model's modules compute them."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from kvcache.memory.device import DeviceKV
from serving.model.decoder import Decoder
from serving.model.moe_spec import MoeSpec
from tests.serving.forward.test_triton_forward import BLOCK_SIZE, SPEC, runs_here, triton_forward

__all__ = ["triton_forward"]  # the fixture


@runs_here
def test_experts_are_not_supported(triton_forward: ModuleType) -> None:
    moe = MoeSpec(experts=3, top_k=2, intermediate=16, sparse=(True,) * SPEC.layers)
    with torch.device("meta"):
        model = Decoder(replace(SPEC, moe=moe))
    planes = DeviceKV(SPEC.kv_layers("float32"), 1, BLOCK_SIZE).planes
    assert "no experts" in (triton_forward.supports(model, "float32", planes[0]) or "")
