"""Times each Triton kernel on a GPU and says what share of the device's own ceiling it reaches.

Run `python -m bench.kernels`; without a CUDA device it says so and exits with 2, unless TRITON_INTERPRET=1 and `--tiny`
go through the motions. Ceilings are measured in the same run: bytes read and written by a large copy, and operations
of torch's own products of two 8,192² matrices, int8 and bfloat16. Each call is timed in a CUDA graph, over inputs that
together do not fit into the L2 cache; the median counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from bench.kernel_bench import TINY, KernelBench, KernelSizes, device_name
from serving.batch.ragged import RaggedBatch
from serving.kernels.layer_weights import LinearWeights, MlpWeights, MoeWeights
from serving.messages import SamplingParams
from serving.sampling import torch_sampling
from serving.sampling.sampler import SampleRow

if find_spec("triton") is not None:
    from serving.kernels import gpu
    from serving.kernels.gpu.mixture import ExpertMixture
    from serving.kernels.gpu.prompt_trial import LibraryTrial, NotUsed
    from serving.kernels.gpu.prompts import PromptShape
    from serving.sampling import triton_sampling

BLOCK = 16  # tokens a KV block
KINDS = (torch.bfloat16, torch.int8)


def bench_linear(bench: KernelBench) -> None:
    sizes, side = bench.sizes, bench.sizes.square
    shapes = {f"{name}, {sizes.many} rows": (sizes.many, *shape) for name, shape in sizes.layers().items()}
    for name, (rows, inputs, outputs) in {f"{side} x {side} x {side}": (side, side, side), **shapes}.items():
        x = bench.int8(rows, inputs), bench.ones(rows)
        weight = bench.int8(outputs, inputs), bench.ones(outputs)
        spent = bench.seconds_of(partial(gpu.int8_linear, *x, *weight))
        rate = 2 * rows * inputs * outputs / spent
        bench.line(f"int8 linear {name}", spent, rate=rate, ceiling=bench.ceilings.int8, unit="TOP/s")


def bench_few_rows(bench: KernelBench) -> None:
    for name, (inputs, outputs) in bench.sizes.layers().items():
        copies = range(bench.copies_of(inputs * outputs))
        weights, plain = [bench.int8(outputs, inputs) for _ in copies], [bench.bf16(outputs, inputs) for _ in copies]
        scales = bench.ones(outputs)
        for rows in bench.sizes.few:
            values, ones, x = bench.int8(rows, inputs), bench.ones(rows), bench.bf16(rows, inputs)
            spent = bench.seconds_of(*(partial(gpu.int8_linear, values, ones, w, scales) for w in weights))
            other = bench.seconds_of(*(partial(torch.mm, x, w.T) for w in plain))
            moved = inputs * outputs + rows * (inputs + 2 * outputs)
            bench.bytes_line(f"int8 linear {name}, {rows} rows", spent, moved, f"{other / spent:.2f}x torch's bf16")


def step(contexts: list[int], counts: list[int], device: torch.device) -> RaggedBatch:
    """Sequences in blocks shuffled over the planes, as after some hours of serving."""
    widths = [-(-n // BLOCK) for n in contexts]
    ids = torch.randperm(sum(widths)).tolist()
    tables = [[ids.pop() for _ in range(width)] for width in widths]
    starts = [n - count for n, count in zip(contexts, counts, strict=True)]
    tokens = [[0] * count for count in counts]
    return RaggedBatch.build(tokens=tokens, starts=starts, block_tables=tables, block_size=BLOCK, device=device)


def paged_kv(bench: KernelBench, blocks: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Planes, with scales for int8, as many as the L2 cache cannot hold."""
    shape = (blocks, BLOCK, bench.sizes.kv_heads, bench.sizes.head_dim)
    copies = bench.copies_of(2 * blocks * BLOCK * bench.sizes.kv_heads * bench.sizes.head_dim * dtype.itemsize)
    if dtype is torch.bfloat16:
        return [(bench.bf16(*shape), bench.bf16(*shape)) for _ in range(copies)]
    return [
        (*(bench.int8(*shape) for _ in "kv"), *(torch.rand(shape[:3], device=bench.device) * 0.02 for _ in "kv"))
        for _ in range(copies)
    ]


def bench_decodes(bench: KernelBench) -> None:
    sizes, scale = bench.sizes, bench.sizes.head_dim**-0.5
    for sequences, context in sizes.decodes:
        batch = step([context] * sequences, [1] * sequences, bench.device)
        q = bench.bf16(sequences, sizes.heads, sizes.head_dim)
        for dtype in KINDS:
            planes = paged_kv(bench, sequences * -(-context // BLOCK), dtype)
            calls = (partial(gpu.paged_attention, q, k, v, batch, scale, None, *scales) for k, v, *scales in planes)
            spent = bench.seconds_of(*calls)
            token = 2 * sizes.kv_heads * (sizes.head_dim * dtype.itemsize + (4 if dtype is torch.int8 else 0))
            name = f"decode attention {sequences} x {context}, {str(dtype).removeprefix('torch.')}"
            bench.bytes_line(name, spent, sequences * context * token + 2 * q.nbytes)


def bench_prompts(bench: KernelBench) -> None:
    sizes, scale = bench.sizes, bench.sizes.head_dim**-0.5
    for sequences, count in sizes.prompts:
        batch = step([count] * sequences, [count] * sequences, bench.device)
        q = bench.bf16(sequences * count, sizes.heads, sizes.head_dim)
        for dtype in KINDS:
            k, v, *scales = paged_kv(bench, sequences * -(-count // BLOCK), dtype)[0]
            spent = bench.seconds_of(partial(gpu.paged_attention, q, k, v, batch, scale, None, *scales))
            rate = sequences * 2 * sizes.heads * sizes.head_dim * count * (count + 1) / spent
            name = f"prompt attention {sequences} x {count}, {str(dtype).removeprefix('torch.')}"
            note = "" if scales else beside_flashinfer(bench, spent, q, (k, v), batch)
            bench.line(name, spent, rate=rate, ceiling=bench.ceilings.bf16, unit="TFLOP/s", note=note)


def beside_flashinfer(
    bench: KernelBench, spent: float, q: Tensor, planes: tuple[Tensor, Tensor], batch: RaggedBatch
) -> str:
    """How many times as quick as FlashInfer, its plan left out, `spent` seconds are; empty where it is absent."""
    if find_spec("flashinfer") is None:
        return ""
    sizes = bench.sizes
    shape = PromptShape(
        heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, block_size=BLOCK, dtype=q.dtype
    )
    try:
        with LibraryTrial():
            from serving.kernels.gpu.flashinfer_prompts import FlashInferPrompts  # the extra `flashinfer`

            prompts = FlashInferPrompts(shape, bench.device).step(batch)
            attend = partial(gpu.paged_attention, q, *planes, batch, sizes.head_dim**-0.5, None, prompts=prompts)
            return f"{bench.seconds_of(attend) / spent:.2f}x FlashInfer's"
    except NotUsed as error:
        return f"FlashInfer does not run: {type(error.__cause__).__name__}"


def bench_experts(bench: KernelBench) -> None:
    """A layer's experts, routing and all: few rows beside the weights they meet, many beside products of one matrix."""
    hidden, inner, experts, top_k = bench.sizes.mixture
    router = LinearWeights(weight=bench.bf16(experts, hidden))
    for dtype in KINDS:
        made = partial(random_linear, bench, dtype)
        mlps = [MlpWeights(gate_up=made(2 * inner, hidden), down=made(hidden, inner)) for _ in range(experts)]
        mixture = ExpertMixture(MoeWeights(router=router, experts=tuple(mlps), top_k=top_k, normalized=True))
        name = f"{experts} experts, {str(dtype).removeprefix('torch.')}"
        for rows in bench.sizes.few:
            logits = [bench.bf16(rows, experts) for _ in range(8)]
            spent = bench.seconds_of(*(partial(mixture, bench.bf16(rows, hidden), one) for one in logits))
            met = sum(len(set(one.topk(top_k).indices.flatten().tolist())) for one in logits) / len(logits)
            bench.bytes_line(f"{name}, {rows} rows", spent, met * 3 * hidden * inner * dtype.itemsize)
        rows = bench.sizes.many
        spent = bench.seconds_of(partial(mixture, bench.bf16(rows, hidden), bench.bf16(rows, experts)))
        ceiling, unit = (bench.ceilings.int8, "TOP/s") if dtype is torch.int8 else (bench.ceilings.bf16, "TFLOP/s")
        rate = 6 * rows * top_k * hidden * inner / spent
        bench.line(f"{name}, {rows} rows", spent, rate=rate, ceiling=ceiling, unit=unit)


def random_linear(bench: KernelBench, dtype: torch.dtype, outputs: int, inputs: int) -> LinearWeights:
    if dtype is torch.int8:
        return LinearWeights(weight=bench.int8(outputs, inputs), scale=bench.ones(outputs))
    return LinearWeights(weight=bench.bf16(outputs, inputs))


def bench_rows(bench: KernelBench) -> None:
    hidden, inner = bench.sizes.hidden, bench.sizes.intermediate
    weight = bench.ones(hidden, torch.bfloat16)
    for rows in bench.sizes.rows:
        x = [(bench.bf16(rows, hidden), bench.bf16(rows, hidden)) for _ in range(bench.copies_of(rows * hidden * 4))]
        gate_up = [bench.bf16(rows, 2 * inner) for _ in range(bench.copies_of(rows * inner * 4))]
        norms = (partial(gpu.add_rms_norm, *pair, weight, 1e-5, quantized=True) for pair in x)
        spent = bench.seconds_of(*norms)
        bench.bytes_line(f"add, RMSNorm, quantize, {rows} rows", spent, rows * hidden * 7)
        spent = bench.seconds_of(*(partial(gpu.silu_mul, one, quantized=True) for one in gate_up))
        bench.bytes_line(f"SiLU, multiply, quantize, {rows} rows", spent, rows * inner * 5)


def bench_sampling(bench: KernelBench) -> None:
    """By the host's clock: a call makes tensors of its parameters, which no graph holds."""
    count, vocab = bench.sizes.sampled, bench.sizes.vocab
    logits = torch.randn(count, vocab, device=bench.device)
    params = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=1)
    rows = [SampleRow(params, position=n, output_tokens=(), prompt_tokens=()) for n in range(count)]
    spent = [0.0, 0.0]
    for number, draw in enumerate((torch_sampling.draw, triton_sampling.draw)):
        sample = partial(torch_sampling.sample_on_device, logits, rows, draw)
        sample()
        spent[number] = bench.seconds_waited_for(sample)
    sorting, searching = spent
    bench.bytes_line(
        f"top-p sampling, {count} sequences", searching, logits.nbytes, f"{sorting / searching:.2f}x torch's"
    )


GROUPS: dict[str, tuple[Callable[[KernelBench], None], ...]] = {
    "linear": (bench_linear,),
    "few": (bench_few_rows,),
    "attention": (bench_decodes, bench_prompts),
    "rows": (bench_rows, bench_sampling),
    "experts": (bench_experts,),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups to time")
    parser.add_argument("--repeats", type=int, default=20, help="of each timed graph")
    parser.add_argument("--tiny", action="store_true", help="shapes that the interpreter can compute")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args(arguments)
    cuda, has_triton = torch.cuda.is_available(), find_spec("triton") is not None
    if not has_triton or not (cuda or (options.tiny and gpu.INTERPRETED)):
        print("bench.kernels needs a CUDA device and triton (the extra `gpu`); there is none here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda" if cuda else "cpu")
    bench = KernelBench(device, TINY if options.tiny else KernelSizes(), options.repeats, options.json)
    with torch.inference_mode():
        bench.measure_ceilings()
        ceilings = bench.ceilings
        print(f"{device_name(device)}: copy {ceilings.bandwidth / 1e9:.0f} GB/s,", end=" ")
        print(f"torch._int_mm {ceilings.int8 / 1e12:.0f} TOP/s, bfloat16 {ceilings.bf16 / 1e12:.0f} TFLOP/s")
        for name in options.only:
            for measure in GROUPS[name]:
                measure(bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
