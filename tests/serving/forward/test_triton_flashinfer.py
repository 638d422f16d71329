"""A decoder whose prompts are attended by a stand-in for FlashInfer, against its own modules."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kvcache.memory.device import DeviceKV
from tests.fakes.paged_prefill import BatchPrefillWithPagedKVCacheWrapper, flashinfer_installed
from tests.serving.forward.test_triton_forward import (
    BLOCK_SIZE,
    BLOCKS,
    CASES,
    DEVICE,
    Pair,
    error,
    runs_here,
    step_of,
    triton_forward,
)

__all__ = ["triton_forward"]  # the fixture


@runs_here
@pytest.mark.parametrize("windows", [(), (5, None)])
def test_a_library_attends_prompts_of_launched_steps_alone(
    triton_forward: ModuleType, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []  # rows of each layer's attention
    run = BatchPrefillWithPagedKVCacheWrapper.run
    monkeypatch.setattr(
        BatchPrefillWithPagedKVCacheWrapper, "run", lambda self, q, *a, **k: ran.append(len(q)) or run(self, q, *a, **k)
    )
    pair = Pair(triton_forward, replace(CASES["bfloat16"], changes=(("windows", windows),) if windows else ()))
    first, second = [[(7 * i + 3 * s) % pair.vocab for i in range(40)] for s in range(2)]
    with flashinfer_installed(), torch.inference_mode():
        pair.kernels.choose_prompts("flashinfer", 20)
        ran.clear()
        pair.step(step_of([first[:13], second[:6]], [0, 0]))
        pair.step(step_of([[first[13]], second[6:15]], [13, 6]))
        assert ran == [19, 19, 9, 9]
        pair.step(step_of([[1], [2]], [14, 15]))
        prompt = step_of([first[14:20], second[16:18]], [14, 16])
        pair.kernels._logits = torch.zeros(2, pair.vocab, device=DEVICE)
        captured, _ = pair.kernels._captured(prompt)
        assert len(ran) == 4, "neither decoding nor what a graph is captured of is its"
        assert error(captured, pair.step(prompt)) < pair.case.close and len(ran) == 6
        pair.same_kv()
        pair.kernels.over(pair.pools[1].planes).logits(prompt, None)
        assert len(ran) == 8
        whole = DeviceKV(pair.model.spec.kv_layers("int8"), BLOCKS, BLOCK_SIZE, DEVICE)
        pair.kernels.over(whole.planes).logits(prompt, None)
        assert len(ran) == 8, "nor is INT8 KV"


@runs_here
def test_int8_kv_and_a_library_are_not_had_together(triton_forward: ModuleType) -> None:
    pair = Pair(triton_forward, CASES["int8 in bfloat16 with int8 KV"])
    pair.kernels.choose_prompts("auto", 20)
    with pytest.raises(ValueError, match="--attention-backend flashinfer: it takes no int8 KV"):
        pair.kernels.choose_prompts("flashinfer", 20)
