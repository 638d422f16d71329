"""What the Triton kernels compute, in plain torch on the CPU, and paged KV to compute it over."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels import reference

# What rounding a result to its type may cost: ‖error‖ / ‖result‖. The interpreter truncates to bfloat16.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of each row [..., W]: values, and scales [...]."""
    top = x.float().abs().amax(dim=-1)
    inverse = torch.where(top > 0, 127 / top, 0.0)
    return (x.float() * inverse[..., None]).round().to(torch.int8), top / 127


def int8_linear(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """In float64."""
    out = (values.double() @ weight.double().T) * scales.double()[:, None] * weight_scales.double()
    return out if bias is None else out + bias.double()


def error(out: Tensor, expected: Tensor) -> float:
    """‖out - expected‖ / ‖expected‖; NaN is never small."""
    out, expected = out.double().cpu(), expected.double().cpu()
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def write_unrotated(k: Tensor, v: Tensor, slots: Tensor, *planes: Tensor) -> None:
    """Store k and v [T, Hkv, D] as they are: rotated by no angle, beside one query head."""
    from serving.kernels import gpu  # needs triton

    cos, sin = torch.ones(len(k), 1, device=k.device), torch.zeros(len(k), 1, device=k.device)
    gpu.rope_write_kv(torch.cat((k[:, :1], k, v), dim=1), cos, sin, slots, *planes)


class Pages:
    """Keys and values of some sequences in shuffled blocks; whatever holds no token is NaN, or int8 nonsense."""

    def __init__(
        self,
        contexts: Sequence[int],
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        int8: bool = False,
    ) -> None:
        self.block_size, self.contexts, self.device, self.dtype = block_size, list(contexts), device, dtype
        counts = [-(-n // block_size) for n in contexts]
        blocks = sum(counts) + 3
        ids = list(range(blocks))
        random.Random(7).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        shape = (blocks, 2, block_size, kv_heads, head_dim)  # keys and values side by side: planes are not contiguous
        pages = torch.full(shape, torch.nan, dtype=dtype)
        self.scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        slots = self.batch([0] * len(counts), self.contexts).slots.cpu()
        flat = torch.randn(2, len(slots), kv_heads, head_dim).to(dtype)
        if int8:
            values, scales = quantized(flat)
            flat = (values * scales[..., None]).to(torch.float32)
            raw = torch.randint(-127, 128, shape, dtype=torch.int8)
            scale_pages = torch.full((2, *shape[:1], *shape[2:4]), torch.nan)
            for which in (0, 1):
                raw[slots // block_size, which, slots % block_size] = values[which]
                scale_pages[which, slots // block_size, slots % block_size] = scales[which]
            self.scales = (scale_pages[0].to(device), scale_pages[1].to(device))
            pages = torch.full(shape, torch.nan)
        for which in (0, 1):
            pages[slots // block_size, which, slots % block_size] = flat[which].to(pages.dtype)
        self.plain = pages[:, 0], pages[:, 1]  # what the planes stand for, on the CPU
        stored = (raw if int8 else pages).to(device)
        self.planes = stored[:, 0], stored[:, 1]

    def batch(self, starts: Sequence[int], counts: Sequence[int], device: torch.device | None = None) -> RaggedBatch:
        return RaggedBatch.build(
            tokens=[[0] * count for count in counts],
            starts=starts,
            block_tables=self.tables,
            block_size=self.block_size,
            device=device or self.device,
        )

    def expected(self, q: Tensor, counts: Sequence[int], scale: float, window: int | None) -> Tensor:
        """The reference in float32 over what the planes stand for."""
        starts = [context - count for context, count in zip(self.contexts, counts, strict=True)]
        batch = self.batch(starts, counts, torch.device("cpu"))
        k, v = (plane.float() for plane in self.plain)
        return reference.paged_attention(q.float().cpu(), k, v, batch, scale, window)
