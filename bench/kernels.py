"""Times each Triton kernel on a GPU and says what share of the device's own ceiling it reaches.

Run `python -m bench.kernels`; without a CUDA device it says so and exits with 2. Both ceilings are measured in the
same run: bytes read and written by a large copy, and operations of torch's own int8 product of two 8,192² matrices.
Each call is timed in a CUDA graph, over inputs that together do not fit into the L2 cache; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch

if find_spec("triton") is not None:
    from serving.kernels import gpu

COLD_BYTES = 512 << 20  # inputs are rotated until they take this much: several times any L2 cache
BLOCK = 16  # tokens a KV block
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128  # Llama 3 8B's
LAYERS = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (HIDDEN, 2 * INTERMEDIATE),
    "down": (INTERMEDIATE, HIDDEN),
}

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device was seen to do: bytes, int8 operations and bfloat16 operations a second."""

    bandwidth: float
    int8: float
    bf16: float


def seconds_of(*calls: Call, repeats: int) -> float:
    """Median seconds of one call; `calls` do the same work on inputs of their own, and are captured in turn."""
    for call in calls[:2]:
        call()
    count = max(len(calls), 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in islice(cycle(calls), count):
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / count)
    return statistics.median(times)


def copies_of(bytes_each: int) -> int:
    return max(1, min(64, -(-COLD_BYTES // bytes_each)))


def int8(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def measure_ceilings(repeats: int) -> Ceilings:
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda").random_(-127, 128)
    target = torch.empty_like(source)
    a, b = int8(8192, 8192), int8(8192, 8192)
    x, y = bf16(8192, 8192), bf16(8192, 8192)
    operations = 2 * 8192**3
    return Ceilings(
        bandwidth=2 * source.numel() / seconds_of(partial(target.copy_, source), repeats=repeats),
        int8=operations / seconds_of(partial(torch._int_mm, a, b.T), repeats=repeats),
        bf16=operations / seconds_of(partial(torch.mm, x, y.T), repeats=repeats),
    )


def line(name: str, seconds: float, *, rate: float, ceiling: float, unit: str, note: str = "") -> None:
    print(f"{name:44} {seconds * 1e6:10.1f} µs {rate:9.1f} {unit:6} {rate / ceiling:5.0%}  {note}")


def bytes_line(name: str, seconds: float, moved: float, ceilings: Ceilings, note: str = "") -> None:
    line(name, seconds, rate=moved / seconds / 1e9, ceiling=ceilings.bandwidth / 1e9, unit="GB/s", note=note)


def bench_linear(ceilings: Ceilings, repeats: int) -> None:
    shapes = {f"{name}, 4096 rows": (4096, *sizes) for name, sizes in LAYERS.items()}
    for name, (rows, inputs, outputs) in {"8192 x 8192 x 8192": (8192, 8192, 8192), **shapes}.items():
        x = int8(rows, inputs), torch.ones(rows, device="cuda")
        weight = int8(outputs, inputs), torch.ones(outputs, device="cuda")
        spent = seconds_of(partial(gpu.int8_linear, *x, *weight), repeats=repeats)
        rate = 2 * rows * inputs * outputs / spent / 1e12
        line(f"int8 linear {name}", spent, rate=rate, ceiling=ceilings.int8 / 1e12, unit="TOP/s")


def bench_few_rows(ceilings: Ceilings, repeats: int) -> None:
    for name, (inputs, outputs) in LAYERS.items():
        copies = range(copies_of(inputs * outputs))
        weights, plain = [int8(outputs, inputs) for _ in copies], [bf16(outputs, inputs) for _ in copies]
        scales = torch.ones(outputs, device="cuda")
        for rows in (1, 8, 16, 32, 64):
            values, ones, x = int8(rows, inputs), torch.ones(rows, device="cuda"), bf16(rows, inputs)
            spent = seconds_of(*(partial(gpu.int8_linear, values, ones, w, scales) for w in weights), repeats=repeats)
            other = seconds_of(*(partial(torch.mm, x, w.T) for w in plain), repeats=repeats)
            moved = inputs * outputs + rows * (inputs + 2 * outputs)
            bytes_line(f"int8 linear {name}, {rows} rows", spent, moved, ceilings, f"{other / spent:.2f}x torch's bf16")


def step(contexts: list[int], counts: list[int]) -> RaggedBatch:
    """Sequences in blocks shuffled over the planes, as after some hours of serving."""
    widths = [-(-n // BLOCK) for n in contexts]
    ids = torch.randperm(sum(widths)).tolist()
    tables = [[ids.pop() for _ in range(width)] for width in widths]
    starts = [n - count for n, count in zip(contexts, counts, strict=True)]
    tokens = [[0] * count for count in counts]
    return RaggedBatch.build(tokens=tokens, starts=starts, block_tables=tables, block_size=BLOCK, device="cuda")


def paged_kv(blocks: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Planes, with scales for int8, as many as the L2 cache cannot hold."""
    shape = (blocks, BLOCK, KV_HEADS, HEAD_DIM)
    copies = copies_of(2 * blocks * BLOCK * KV_HEADS * HEAD_DIM * dtype.itemsize)
    if dtype is torch.bfloat16:
        return [(bf16(*shape), bf16(*shape)) for _ in range(copies)]
    return [
        (int8(*shape), int8(*shape), *(torch.rand(shape[:3], device="cuda") * 0.02 for _ in range(2)))
        for _ in range(copies)
    ]


def bench_attention(ceilings: Ceilings, repeats: int) -> None:
    scale = HEAD_DIM**-0.5
    for sequences, context in ((64, 4096), (256, 1024), (8, 32768), (1, 8192)):
        batch, q = step([context] * sequences, [1] * sequences), bf16(sequences, HEADS, HEAD_DIM)
        for dtype in (torch.bfloat16, torch.int8):
            planes = paged_kv(sequences * -(-context // BLOCK), dtype)
            calls = (partial(gpu.paged_attention, q, k, v, batch, scale, None, *scales) for k, v, *scales in planes)
            spent = seconds_of(*calls, repeats=repeats)
            token = 2 * KV_HEADS * (HEAD_DIM * dtype.itemsize + (4 if dtype is torch.int8 else 0))
            name = f"decode attention {sequences} x {context}, {str(dtype).removeprefix('torch.')}"
            bytes_line(name, spent, sequences * context * token + 2 * q.nbytes, ceilings)
    for sequences, count in ((1, 8192), (4, 2048)):
        batch, q = step([count] * sequences, [count] * sequences), bf16(sequences * count, HEADS, HEAD_DIM)
        k, v, *_ = paged_kv(sequences * count // BLOCK, torch.bfloat16)[0]
        spent = seconds_of(partial(gpu.paged_attention, q, k, v, batch, scale, None), repeats=repeats)
        rate = sequences * 2 * HEADS * HEAD_DIM * count * (count + 1) / spent / 1e12
        name = f"prompt attention {sequences} x {count}, bfloat16"
        line(name, spent, rate=rate, ceiling=ceilings.bf16 / 1e12, unit="TFLOP/s")


def bench_rows(ceilings: Ceilings, repeats: int) -> None:
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    for rows in (64, 8192):
        x = [(bf16(rows, HIDDEN), bf16(rows, HIDDEN)) for _ in range(copies_of(rows * HIDDEN * 4))]
        gate_up = [bf16(rows, 2 * INTERMEDIATE) for _ in range(copies_of(rows * INTERMEDIATE * 4))]

        norms = (partial(gpu.add_rms_norm, *pair, weight, 1e-5, quantized=True) for pair in x)
        spent = seconds_of(*norms, repeats=repeats)
        bytes_line(f"add, RMSNorm, quantize, {rows} rows", spent, rows * HIDDEN * 7, ceilings)
        spent = seconds_of(*(partial(gpu.silu_mul, one, quantized=True) for one in gate_up), repeats=repeats)
        bytes_line(f"SiLU, multiply, quantize, {rows} rows", spent, rows * INTERMEDIATE * 5, ceilings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["linear", "few", "attention", "rows"], help="groups to time")
    parser.add_argument("--repeats", type=int, default=20, help="of each timed graph")
    options = parser.parse_args()
    if not torch.cuda.is_available() or find_spec("triton") is None:
        print("bench.kernels needs a CUDA device and triton (the extra `gpu`); there is none here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    ceilings = measure_ceilings(options.repeats)
    print(f"{torch.cuda.get_device_name()}: copy {ceilings.bandwidth / 1e9:.0f} GB/s,", end=" ")
    print(f"torch._int_mm {ceilings.int8 / 1e12:.0f} TOP/s, bfloat16 product {ceilings.bf16 / 1e12:.0f} TFLOP/s")
    groups = {"linear": bench_linear, "few": bench_few_rows, "attention": bench_attention, "rows": bench_rows}
    for name in options.only:
        groups[name](ceilings, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
