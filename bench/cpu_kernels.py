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
from itertools import chain
from typing import Any

import torch

from bench.random_model import SHAPES, llama, random_model, weight_bytes
from kvcache.memory.device import DeviceKV, token_bytes
from serving.batch.ragged import RaggedBatch
from serving.forward.cpu_forward import CpuForward
from serving.kernels import cpu
from serving.messages import SamplingParams
from serving.model.decoder import Decoder
from serving.model.spec import ModelSpec
from serving.sampling.cpu_sampling import CpuSampling
from serving.sampling.penalties import PenaltyState
from serving.sampling.sampler import Sampler, SampleRow

BLOCK = 16  # tokens a KV block
VOCAB = SHAPES["smollm2"]["vocab_size"]


def random_kv(spec: ModelSpec, dtype: str, blocks: int) -> DeviceKV:
    """KV blocks that have been written: pages that never were would be read from the cache."""
    device_kv = DeviceKV(spec.kv_layers(dtype), blocks, BLOCK)
    for plane in chain.from_iterable(device_kv.planes):
        if plane.dtype is torch.int8:
            plane.random_(-127, 128)
        else:
            plane.normal_(std=0.02)
    return device_kv


def batch_of(sequences: int, new: int, context: int) -> RaggedBatch:
    """`sequences` of `new` tokens each, `context` tokens in KV once they are written."""
    width = -(-context // BLOCK)
    return RaggedBatch.build(
        tokens=[[(7 * b + i) % VOCAB for i in range(new)] for b in range(sequences)],
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
    weight = torch.randint(-127, 128, (outputs, inputs)).to(kind.dtype)
    w = kernels.pack(weight, scale=torch.ones(outputs) if kind is cpu.Kind.INT8 else None)
    x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
    return 2 * rows * outputs * inputs / timed(lambda: kernels.linear(x, w, out=out), seconds)[0]


def report(model: Decoder, forward: CpuForward, kv_bytes: int, bandwidth: float, rate: float, seconds: float) -> None:
    """`kv_bytes` are a token's, over all layers."""

    def row(name: str, batch: RaggedBatch, floor: float) -> None:
        best, median = timed(partial(forward.greedy, batch, None), seconds)
        times = f"min {best * 1e3:8.2f} ms  median {median * 1e3:8.2f} ms  floor {floor * 1e3:7.2f} ms"
        print(f"  {name:31} {times}  ({floor / best:4.0%} of the floor's speed)")

    for count in (1, 8, 32):
        floor = (weight_bytes(model) + count * 300 * kv_bytes) / bandwidth
        row(f"decode batch {count:3}, context 300:", batch_of(count, 1, 300), floor)
    spec = model.spec
    dense = sum(weight.numel() for layer in model.layers for weight in layer.parameters() if weight.dim() == 2)
    for count in (256, 2048):
        pairs = spec.layers * spec.heads * spec.head_dim * count * (count + 1) / 2  # query-key pairs, twice each below
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
            logits = torch.randn(count, VOCAB) * 2.5
            sampling = SamplingParams(max_tokens=1, **params)
            rows = [SampleRow(sampling, at, (), (1,), (), PenaltyState((1,), VOCAB)) for at in range(count)]
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
    kv_dtype = str(cpu.Kind[options.kv.upper()].dtype).removeprefix("torch.")
    spec = llama(**SHAPES["smollm2"] | {"layers": options.layers})
    print(f"form {kernels.form}, {kernels.threads} threads, read bandwidth {bandwidth / 1e9:.0f} GB/s")
    print("sampling tokens, minima:")
    report_sampling(kernels, options.seconds)
    for name in options.weights:
        kind = cpu.Kind[name.upper()]
        dtype = torch.float32 if kind is cpu.Kind.F32 else torch.bfloat16
        model = random_model(spec, name, dtype, torch.device("cpu"), kept="")
        device_kv = random_kv(spec, kv_dtype, blocks=32 * 19 + 128)
        forward = CpuForward(model, device_kv.planes, kernels, spec.max_position)
        rate = multiply_rate(kernels, kind, options.seconds)
        print(f"{name} weights, {options.kv} KV: large linear layers {rate / 1e9:.0f} GOP/s")
        report(model, forward, token_bytes(device_kv.specs), bandwidth, rate, options.seconds)


if __name__ == "__main__":
    main()
