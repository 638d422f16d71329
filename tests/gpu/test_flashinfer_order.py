"""Prompts attended by a stand-in for FlashInfer on a device that does its work late: nothing waits, no plan is lost."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels import reference
from tests.fakes.paged_prefill import flashinfer_installed
from tests.gpu.fake_cuda import DEVICE, FakeCuda, installed

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")

SIZE, HEADS, KV_HEADS, HEAD_DIM, SCALE = 16, 4, 2, 16, 0.25
STEPS = ([(0, 20), (3, 30)], [(33, 5), (20, 1), (0, 9)], [(9, 40)])  # of each sequence: tokens before, and new ones
LAYERS = 2


@pytest.fixture(autouse=True)
def flashinfer() -> Iterator[None]:
    with flashinfer_installed():
        yield


class Attending:
    """Layers of attention over KV that is on the device from the beginning."""

    def __init__(self, cuda: FakeCuda) -> None:
        from serving.kernels.gpu.flashinfer_prompts import FlashInferPrompts
        from serving.kernels.gpu.planes import Paged
        from serving.kernels.gpu.prompts import PromptShape

        self.cuda = cuda
        torch.manual_seed(0)
        self.host = [torch.randn(20, SIZE, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2)]
        self.paged = Paged(*(cuda.tensor(one) for one in self.host), None, None)
        shape = PromptShape(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=SIZE, dtype=torch.bfloat16)
        self.prompts = FlashInferPrompts(shape, DEVICE)

    def launch(self, step: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """What attention gives [T, Hq, D] once it is computed, and what it is to give."""
        tables = [[(7 * b + n) % 20 for n in range(4)] for b in range(len(step))]
        named: dict[str, Any] = {
            "tokens": [[0] * count for _, count in step],
            "starts": [start for start, _ in step],
            "block_tables": tables,
            "block_size": SIZE,
        }
        q = torch.randn(sum(count for _, count in step), HEADS, HEAD_DIM).bfloat16()
        expected = reference.paged_attention(q, *self.host, RaggedBatch.build(**named), SCALE, None)
        out = self.cuda.room(q.nbytes).view(torch.bfloat16).view(q.shape)
        there, prompts = self.cuda.tensor(q), self.prompts.step(RaggedBatch.build(**named, device=DEVICE))
        for _ in range(LAYERS):
            prompts.attend(there, self.paged, SCALE, None, out)
        return out, expected


@pytest.mark.parametrize("eager", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_follow_each_other_without_a_wait_are_attended_by_plans_of_their_own(
    seed: int, eager: float
) -> None:
    cuda = FakeCuda(seed, eager)
    with installed(cuda), torch.inference_mode():
        attending = Attending(cuda)
        launched = [attending.launch(step) for step in STEPS]
        cuda.finish()
    for out, expected in launched:
        torch.testing.assert_close(cuda.peek(out), expected, rtol=2e-2, atol=2e-2)


def test_a_step_whose_predecessor_is_computed_waits_for_nothing() -> None:
    """One launch a layer, and one that gathers pages; copies of the batch, their places, lengths and the plan."""
    cuda = FakeCuda()
    with installed(cuda), torch.inference_mode():
        attending = Attending(cuda)
        attending.launch(STEPS[0])
        cuda.finish()
        before = cuda.counts.copy()
        attending.launch(STEPS[1])
        counts = cuda.counts - before
    found = {counted.what: count for counted, count in counts.items()}
    lengths = 4
    assert found == {"launch": LAYERS + 1, "copy": 3 + lengths}
