"""CUDA graphs over a small real decoder step: replays give what the step itself gives, and write the same KV."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.cuda_graphs import CudaGraphs, GraphSizes
from serving.forward.mixed_graphs import MixedSizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")


class TinyLayer:
    """Embedding, one attention layer over paged KV, a head: launches of every kind a decode step has."""

    def __init__(self) -> None:
        pytest.importorskip("triton")
        from serving.kernels import gpu

        self.gpu = gpu
        torch.manual_seed(0)
        self.embed = torch.randn(100, 256, device=CUDA).bfloat16()
        self.qkv = torch.randint(-127, 128, (512, 256), dtype=torch.int8, device=CUDA)
        self.scales = torch.full((512,), 1e-3, device=CUDA)
        self.norm = torch.ones(256, device=CUDA).bfloat16()
        self.planes = [torch.zeros(64, 16, 2, 64, device=CUDA).bfloat16() for _ in range(2)]
        self.calls = 0

    def __call__(self, batch: RaggedBatch) -> tuple[Tensor]:
        self.calls += 1
        x, _ = self.gpu.add_rms_norm(self.embed[batch.tokens], None, self.norm, 1e-5, quantized=True)
        qkv = self.gpu.int8_linear(*x, self.qkv, self.scales).view(len(batch.tokens), 8, 64)
        angle = batch.positions[:, None] / torch.arange(1, 33, device=CUDA)
        q = self.gpu.rope_write_kv(qkv, angle.cos(), angle.sin(), batch.slots, *self.planes)
        out = self.gpu.paged_attention(q, *self.planes, batch, 0.1, None)
        return ((out.flatten(1).float() @ self.embed.float().T)[batch.logits_rows],)


def decode_step(contexts: list[int]) -> RaggedBatch:
    tables = [list(range(20 * b, 20 * b + 20)) for b in range(len(contexts))]
    return RaggedBatch.build(
        tokens=[[5 * b + n % 7] for b, n in enumerate(contexts)],
        starts=[n - 1 for n in contexts],
        block_tables=tables,
        block_size=16,
        device=CUDA,
    )


def test_replays_are_the_step() -> None:
    step, plain = TinyLayer(), TinyLayer()
    graphs = CudaGraphs(step, GraphSizes(sequences=(1, 2, 4), contexts=(64, 320)), 16, CUDA)
    graphs.warm_up()
    captured = step.calls
    for contexts in ([1], [2, 30], [3, 31, 300], [4], [5, 32, 301]):
        batch = decode_step(contexts)
        with torch.inference_mode():
            expected = plain(batch)
        # The head is a library's product, which may sum in another order for another number of rows: three are padded.
        close = {"rtol": 0, "atol": 0} if len(contexts) in (1, 2, 4) else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(graphs(batch), expected, **close)
    assert step.calls == captured
    for mine, other in zip(step.planes, plain.planes, strict=True):
        assert torch.equal(mine, other)


def test_replays_of_steps_with_prompts_are_the_step() -> None:
    step, plain = TinyLayer(), TinyLayer()
    sizes = MixedSizes(sequences=(2, 4), contexts=(320,), tokens=(16, 48))
    graphs = CudaGraphs(step, sizes, 16, CUDA)
    graphs.warm_up()
    captured = step.calls
    for starts, counts in (([0], [9]), ([9, 0], [1, 30]), ([10, 30, 0], [1, 3, 7]), ([11, 33, 7, 0], [1, 1, 40, 6])):
        batch = RaggedBatch.build(
            tokens=[[(5 * b + i) % 100 for i in range(count)] for b, count in enumerate(counts)],
            starts=starts,
            block_tables=[list(range(10 * b, 10 * b + 10)) for b in range(len(counts))],
            block_size=16,
            device=CUDA,
        )
        with torch.inference_mode():
            expected = plain(batch)
        torch.testing.assert_close(graphs(batch), expected, rtol=1e-4, atol=1e-4)
    assert step.calls == captured
    for mine, other in zip(step.planes, plain.planes, strict=True):
        torch.testing.assert_close(mine, other)


def test_what_fits_no_graph_is_left_to_others() -> None:
    step = TinyLayer()
    graphs = CudaGraphs(step, GraphSizes(sequences=(1,), contexts=(64,)), 16, CUDA)
    graphs.warm_up()
    captured = step.calls
    assert graphs(decode_step([3, 4])) is None
    assert graphs(decode_step([65])) is None
    prompt = RaggedBatch.build(tokens=[[1, 2, 3]], starts=[0], block_tables=[[0]], block_size=16, device=CUDA)
    assert graphs(prompt) is None
    assert step.calls == captured
