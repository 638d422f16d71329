"""Times the fused CPU decoder step on random weights of SmolLM2-135M's shape, and sampling tokens from its logits.

Run `python -m bench.cpu_kernels`. It prints the minimum and the median of many steps, because other work on the host
adds time and never takes any away. The floor of a decode step is the bytes it must read (weights and KV) over the read
bandwidth measured in the same run; that of a prompt is its multiply-adds over the best INT8 or bfloat16 rate measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.layer_weights import LayerWeights
from serving.messages import SamplingParams
from serving.sampling.cpu_sampling import CpuSampling
from serving.sampling.penalties import PenaltyState
from serving.sampling.sampler import Sampler, SampleRow

BLOCK = 16  # tokens a KV block
SHAPE = cpu.DecoderShape(
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    eps=1e-5,
)


def random_linear(kernels: cpu.Kernels, kind: cpu.Kind, outputs: int, inputs: int) -> cpu.PackedLinear:
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    if kind is not cpu.Kind.INT8:
        return kernels.pack(weight.to(kind.dtype))
    scale = weight.abs().amax(dim=1) / 127
    return kernels.pack((weight / scale[:, None]).round().to(torch.int8), scale=scale)


def random_kv(kind: cpu.Kind, blocks: int) -> cpu.KvPlanes:
    size = (blocks, BLOCK, SHAPE.kv_heads, SHAPE.head_dim)
    if kind is not cpu.Kind.INT8:
        return cpu.KvPlanes(k=torch.randn(size).to(kind.dtype), v=torch.randn(size).to(kind.dtype))
    k, v = (torch.randint(-127, 128, size, dtype=torch.int8) for _ in range(2))
    return cpu.KvPlanes(k=k, v=v, k_scale=torch.full(size[:3], 0.02), v_scale=torch.full(size[:3], 0.02))


def random_decoder(kernels: cpu.Kernels, kind: cpu.Kind, kv_kind: cpu.Kind, layers: int, blocks: int) -> cpu.CpuDecoder:
    s = SHAPE
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    angles = torch.arange(8192)[:, None] * 10000.0 ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
    return cpu.CpuDecoder(
        kernels,
        s,
        embedding=torch.randn(s.vocab, s.hidden).bfloat16(),
        layers=[
            LayerWeights(
                attention_norm=torch.ones(s.hidden),
                mlp_norm=torch.ones(s.hidden),
                qkv=random_linear(kernels, kind, qkv, s.hidden),
                o=random_linear(kernels, kind, s.hidden, s.heads * s.head_dim),
                gate_up=random_linear(kernels, kind, 2 * s.intermediate, s.hidden),
                down=random_linear(kernels, kind, s.hidden, s.intermediate),
            )
            for _ in range(layers)
        ],
        final_norm=torch.ones(s.hidden),
        head=random_linear(kernels, kind, s.vocab, s.hidden),
        cos=angles.cos().contiguous(),
        sin=angles.sin().contiguous(),
        kv=[random_kv(kv_kind, blocks) for _ in range(layers)],
    )


def batch_of(sequences: int, new: int, context: int) -> RaggedBatch:
    """`sequences` of `new` tokens each, `context` tokens in KV once they are written."""
    width = -(-context // BLOCK)
    return RaggedBatch.build(
        tokens=[[(7 * b + i) % SHAPE.vocab for i in range(new)] for b in range(sequences)],
        starts=[context - new] * sequences,
        block_tables=[list(range(b * width, (b + 1) * width)) for b in range(sequences)],
        block_size=BLOCK,
    )


def timed(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Minimum and median seconds of `call`, repeated for about `seconds` (five times at least)."""
    call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def read_bandwidth(seconds: float) -> float:
    """Bytes a second this process reads from memory with all its threads."""
    data = torch.ones(64 << 20, dtype=torch.int64)
    return data.numel() * 8 / timed(lambda: data.sum(), seconds)[0]


def multiply_rate(kernels: cpu.Kernels, kind: cpu.Kind, seconds: float) -> float:
    """Operations a second (two a multiply-add) of one large linear layer."""
    rows, outputs, inputs = 2048, 3072, 576
    w, x, out = random_linear(kernels, kind, outputs, inputs), torch.randn(rows, inputs), torch.empty(rows, outputs)
    return 2 * rows * outputs * inputs / timed(lambda: kernels.linear(x, w, out=out), seconds)[0]


def report(decoder: cpu.CpuDecoder, kv_kind: cpu.Kind, bandwidth: float, rate: float, seconds: float) -> None:
    def row(name: str, batch: RaggedBatch, floor: float) -> None:
        best, median = timed(partial(decoder.step, batch, greedy=True), seconds)
        times = f"min {best * 1e3:8.2f} ms  median {median * 1e3:8.2f} ms  floor {floor * 1e3:7.2f} ms"
        print(f"  {name:31} {times}  ({floor / best:4.0%} of the floor's speed)")

    layers = len(decoder.layers)
    per_token = 2 * SHAPE.kv_heads * SHAPE.head_dim * kv_kind.dtype.itemsize * layers
    linears = [w for layer in decoder.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    weight_bytes = sum(w.packed.nbytes for w in (*linears, decoder.head))
    for count in (1, 8, 32):
        floor = (weight_bytes + count * 300 * per_token) / bandwidth
        row(f"decode batch {count:3}, context 300:", batch_of(count, 1, 300), floor)
    dense = sum(w.outputs * w.inputs for w in linears)
    for count in (256, 2048):
        pairs = layers * SHAPE.heads * SHAPE.head_dim * count * (count + 1) / 2  # query-key pairs, twice each below
        row(f"prefill {count:4} tokens:", batch_of(1, count, count), (2 * dense * count + 4 * pairs) / rate)


def report_sampling(kernels: cpu.Kernels, seconds: float) -> None:
    """Sampling tokens from logits spread like a normal distribution, as the engine's sampler does it."""
    sampler = Sampler(CpuSampling(kernels))
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature 1": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50": {"top_k": 50},
        "min-p 0.05": {"min_p": 0.05},
        "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3},
        "logprobs 5": {"logprobs": 5},
    }
    for name, params in kinds.items():
        times = []
        for count in (1, 8, 32):
            logits = torch.randn(count, SHAPE.vocab) * 2.5
            sampling = SamplingParams(max_tokens=1, **params)
            rows = [SampleRow(sampling, at, (), (1,), (), PenaltyState((1,), SHAPE.vocab)) for at in range(count)]
            times.append(timed(partial(sampler, logits, rows), seconds / 4)[0])
        columns = (f"{count:2} rows {t * 1e3:6.3f} ms" for count, t in zip((1, 8, 32), times, strict=True))
        print(f"  {name:14} {'  '.join(columns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=cpu.default_threads())
    parser.add_argument("--form", help="instruction set; the best by default")
    parser.add_argument("--weights", nargs="+", default=["int8", "bf16"], choices=["int8", "bf16", "f32"])
    parser.add_argument("--kv", default="bf16", choices=["int8", "bf16", "f32"])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    options = parser.parse_args()
    torch.manual_seed(0)
    kernels = cpu.load(threads=options.threads, form=options.form, progress=print)
    if kernels is None:
        raise SystemExit("the CPU kernels cannot be built here")
    torch.set_num_threads(options.threads)
    bandwidth = read_bandwidth(options.seconds)
    torch.set_num_threads(1)  # torch's waiting threads would take the cores from the kernels
    kv_kind = cpu.Kind[options.kv.upper()]
    print(f"form {kernels.form}, {kernels.threads} threads, read bandwidth {bandwidth / 1e9:.0f} GB/s")
    print("sampling tokens, minima:")
    report_sampling(kernels, options.seconds)
    for name in options.weights:
        kind = cpu.Kind[name.upper()]
        decoder = random_decoder(kernels, kind, kv_kind, options.layers, blocks=32 * 19 + 128)
        rate = multiply_rate(kernels, kind, options.seconds)
        print(f"{name} weights, {options.kv} KV: large linear layers {rate / 1e9:.0f} GOP/s")
        report(decoder, kv_kind, bandwidth, rate, options.seconds)


if __name__ == "__main__":
    main()
