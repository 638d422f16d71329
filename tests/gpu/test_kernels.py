"""The Triton kernels on a GPU, at the sizes and types they are for: tuned tiles, long contexts, shuffled blocks.

The small shapes of `tests/serving/kernels/gpu` run there too, compiled, wherever this does.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from tests.serving.kernels.gpu.formulas import write_unrotated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture
def gpu() -> ModuleType:
    pytest.importorskip("triton")
    from serving.kernels import gpu

    return gpu


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64, 65, 500, 4096])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (576, 960), (4096, 1000)])
def test_int8_linear(gpu: ModuleType, rows: int, inputs: int, outputs: int) -> None:
    values = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8, device=CUDA)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=CUDA)
    scales, weight_scales = torch.rand(rows, device=CUDA), torch.rand(outputs, device=CUDA)
    bias = torch.randn(outputs, device=CUDA)
    expected = (values.double() @ weight.double().T) * scales[:, None] * weight_scales + bias
    found = gpu.int8_linear(values, scales, weight, weight_scales, bias, torch.float32)
    assert error(found, expected) < 1e-6
    alone = gpu.int8_linear(values[-1:].contiguous(), scales[-1:], weight, weight_scales, bias, torch.float32)
    assert torch.equal(alone, found[-1:])
    assert error(gpu.int8_linear(values, scales, weight, weight_scales, bias), expected) < 3e-3


def paged(
    contexts: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Keys and values in shuffled blocks of 16 tokens."""
    counts = [-(-n // 16) for n in contexts]
    ids = torch.randperm(sum(counts)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    k, v = torch.randn(2, sum(counts), 16, kv_heads, head_dim, device=CUDA).to(dtype)
    return k, v, tables


def step(contexts: list[int], counts: list[int], tables: list[list[int]]) -> RaggedBatch:
    starts = [n - count for n, count in zip(contexts, counts, strict=True)]
    tokens = [[0] * count for count in counts]
    return RaggedBatch.build(tokens=tokens, starts=starts, block_tables=tables, block_size=16, device=CUDA)


STEPS = [
    ([4096, 1, 777, 8000], [1, 1, 1, 1]),
    ([2048, 300], [2048, 300]),
    ([4096, 5000, 60, 1024], [1, 1000, 60, 1]),
]


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize(("contexts", "counts"), STEPS, ids=["decode", "prompts", "mixed"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (28, 4, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(
    gpu: ModuleType,
    contexts: list[int],
    counts: list[int],
    window: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    from serving.kernels import reference

    k, v, tables = paged(contexts, kv_heads, head_dim, dtype)
    batch = step(contexts, counts, tables)
    q = torch.randn(sum(counts), heads, head_dim, device=CUDA).to(dtype)
    expected = reference.paged_attention(q.float(), k.float(), v.float(), batch, head_dim**-0.5, window)
    found = gpu.paged_attention(q, k, v, batch, head_dim**-0.5, window)
    assert error(found, expected) < (1e-2 if dtype is torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_kv_written_and_read(gpu: ModuleType, dtype: torch.dtype) -> None:
    from serving.kernels import reference

    contexts, counts = [4096, 900], [1, 300]
    k, v, tables = paged(contexts, 8, 128, dtype)
    whole = step(contexts, contexts, tables)
    planes = [torch.zeros(k.shape, dtype=torch.int8, device=CUDA) for _ in range(2)]
    scales = [torch.full(k.shape[:3], torch.nan, device=CUDA) for _ in range(2)]
    flat = [plane.flatten(0, 1)[whole.slots] for plane in (k, v)]
    write_unrotated(flat[0], flat[1], whole.slots, *planes, *scales)
    batch = step(contexts, counts, tables)
    q = torch.randn(sum(counts), 32, 128, device=CUDA).to(dtype)
    meant = [plane * scale.nan_to_num()[..., None] for plane, scale in zip(planes, scales, strict=True)]
    expected = reference.paged_attention(q.float(), *meant, batch, 128**-0.5, None)
    found = gpu.paged_attention(q, *planes, batch, 128**-0.5, None, *scales)
    assert error(found, expected) < (1e-2 if dtype is torch.bfloat16 else 1e-4)
    assert error(meant[0].flatten(0, 1)[whole.slots], flat[0]) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_is_the_same_to_the_bit_alone_and_in_any_chunk(gpu: ModuleType, dtype: torch.dtype) -> None:
    contexts = [3000, 4096, 17]
    k, v, tables = paged(contexts, 8, 128, dtype)
    q = torch.randn(3, 32, 128, device=CUDA).to(dtype)
    together = gpu.paged_attention(q, k, v, step(contexts, [1, 1, 1], tables), 0.1, None)
    for i in range(3):
        alone = gpu.paged_attention(q[i : i + 1], k, v, step(contexts[i : i + 1], [1], [tables[i]]), 0.1, None)
        assert torch.equal(alone, together[i : i + 1])
    q = torch.randn(3000, 32, 128, device=CUDA).to(dtype)
    whole = gpu.paged_attention(q, k, v, step([3000], [3000], [tables[0]]), 0.1, None)
    for first, end in ((0, 2), (1, 1000), (1000, 1037), (2998, 3000)):
        part = gpu.paged_attention(q[first:end], k, v, step([end], [end - first], [tables[0]]), 0.1, None)
        assert torch.equal(part, whole[first:end])


def test_rows_at_full_width(gpu: ModuleType) -> None:
    from serving.kernels import reference

    x, residual = torch.randn(2, 300, 8192, device=CUDA).bfloat16()
    weight = torch.randn(8192, device=CUDA).bfloat16()
    quantized, summed = gpu.add_rms_norm(x, residual, weight, 1e-5, quantized=True)
    assert torch.equal(summed, x + residual)
    found = quantized.values * quantized.scales[:, None]
    assert error(found, reference.rms_norm(x + residual, weight, 1e-5)) < 1e-2
    gate_up = torch.randn(300, 2 * 28672, device=CUDA).bfloat16()
    quantized = gpu.silu_mul(gate_up, quantized=True)
    assert error(quantized.values * quantized.scales[:, None], reference.silu_mul(gate_up)) < 2e-2
