"""A step padded as for a graph, through the Triton kernels: the same rows as without, and nothing else written."""

from __future__ import annotations

import pytest
import torch

from serving.batch.ragged import RaggedBatch
from serving.forward.cuda_graphs import GraphSizes, StaticBatch
from serving.forward.mixed_graphs import MixedSizes
from serving.kernels import gpu
from tests.serving.kernels.gpu.formulas import Pages, write_unrotated


def test_padding_changes_no_decode_step(device: torch.device) -> None:
    contexts = [40, 300, 7]
    pages = Pages(contexts, 16, 2, 64, torch.float32, device)
    batch = pages.batch([n - 1 for n in contexts], [1, 1, 1])
    sizes = GraphSizes(sequences=(2, 4), contexts=(64, 1024))
    static = StaticBatch(sizes, 16, device)
    static.block_tables.fill_(10**6)  # left by another step; reading a block of this number would show
    size = sizes.fit(3, 300)
    assert size == (4, 1024)
    static.fill(batch, size)
    q, k, v = torch.randn(4, 4, 64), torch.randn(4, 2, 64), torch.randn(4, 2, 64)

    def step(of: RaggedBatch) -> tuple[torch.Tensor, ...]:
        rows = len(of.tokens)
        planes = [plane.clone() for plane in pages.planes]
        write_unrotated(k[:rows].to(device), v[:rows].to(device), of.slots, *planes)
        return gpu.paged_attention(q[:rows].to(device), *planes, of, 0.1, None), *planes

    plain, padded = step(batch), step(static.view(size))
    assert torch.equal(padded[0][:3], plain[0])
    assert not padded[0][3].any()
    for one, other in zip(plain[1:], padded[1:], strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


# Contexts and how many of their last tokens are the step's: a chunk of a prompt among decodes, a whole prompt of odd
# length beside the first token of another, and as many tokens and sequences as the graph has.
MIXED = [([40, 300, 70], [1, 1, 33]), ([9, 1], [9, 1]), ([20, 30, 7, 260], [1, 36, 2, 1])]


@pytest.mark.parametrize(("contexts", "counts"), MIXED)
@pytest.mark.parametrize("window", [None, 50])
def test_padding_changes_no_step_with_a_prompt(
    contexts: list[int], counts: list[int], window: int | None, device: torch.device
) -> None:
    pages = Pages(contexts, 16, 2, 64, torch.float32, device)
    batch = pages.batch([n - count for n, count in zip(contexts, counts, strict=True)], counts)
    sizes = MixedSizes(sequences=(4,), contexts=(1024,), tokens=(40,))
    memory = sizes.static(16, device)
    memory.block_tables.fill_(10**6)
    size = sizes.size_of(batch)
    assert size == (4, 1024, 40)
    memory.fill(batch, size)
    q = torch.randn(40, 4, 64, device=device)
    plain = gpu.paged_attention(q[: sum(counts)], *pages.planes, batch, 0.1, window)
    padded = gpu.paged_attention(q, *pages.planes, memory.view(size), 0.1, window)
    assert torch.equal(padded[: sum(counts)], plain)
    assert not padded[sum(counts) :].any()
