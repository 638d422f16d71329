"""Times the compiled CPU kernels on random weights of SmolLM2-135M's shape: whole steps, layers, and sampling tokens.

The least of many repetitions counts, because other work on the host adds time and never takes any away. `bench.cpu`
makes a table of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from bench.cpu_floor import MachineLimits, StepNeeds, decode_needs, product_kind
from bench.random_model import SHAPES, llama, random_model
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
CONTEXT = 300  # tokens in KV of each sequence that decodes
READ = 256 << 20  # bytes read to know how fast memory is: more than caches hold


def random_kv(spec: ModelSpec, dtype: str, blocks: int) -> DeviceKV:
    """KV blocks that have been written: pages that never were would be read from the cache."""
    device_kv = DeviceKV(spec.kv_layers(dtype), blocks, BLOCK)
    for plane in chain.from_iterable(device_kv.planes):
        if plane.dtype is torch.int8:
            plane.random_(-127, 128)
        elif dtype == "int8":
            plane.uniform_(0.01, 0.03)  # scales
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


def mixed_batch(sequences: int, context: int, prompt: int) -> RaggedBatch:
    """A token each of `sequences` with `context` tokens in KV once it is written, and a whole prompt after them."""
    width, blocks = -(-context // BLOCK), -(-prompt // BLOCK)
    return RaggedBatch.build(
        tokens=[*([7 * b % VOCAB] for b in range(sequences)), [(7 * i + 3) % VOCAB for i in range(prompt)]],
        starts=[*[context - 1] * sequences, 0],
        block_tables=[
            *(list(range(b * width, (b + 1) * width)) for b in range(sequences)),
            list(range(sequences * width, sequences * width + blocks)),
        ],
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


def read_bandwidth(kernels: cpu.Kernels, seconds: float) -> float:
    """Bytes a second this process reads from memory with all its threads.

    The best of what torch reads for a sum and the kernels for one row: neither comes near the other on every machine.
    """
    data = torch.ones(READ // 4, dtype=torch.float32)
    summed = timed(data.sum, seconds / 2)[0]
    inputs = 1024
    w = kernels.pack(data.view(torch.bfloat16).view(-1, inputs))
    x, out = torch.ones(1, inputs), torch.empty(1, w.outputs)
    return READ / min(summed, timed(lambda: kernels.linear(x, w, out=out), seconds / 2)[0])


def multiply_rate(kernels: cpu.Kernels, kind: cpu.Kind, seconds: float) -> float:
    """Operations a second (two a multiply-add) of one large linear layer."""
    rows, outputs, inputs = 512, 3072, 576
    weight = torch.randint(-127, 128, (outputs, inputs)).to(kind.dtype)
    w = kernels.pack(weight, scale=torch.ones(outputs) if kind is cpu.Kind.INT8 else None)
    x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
    return 2 * rows * outputs * inputs / timed(lambda: kernels.linear(x, w, out=out), seconds)[0]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One kind of step; seconds."""

    name: str
    least: float
    median: float
    floor: float  # what reading memory, or multiplying alone, would take

    @property
    def share(self) -> float:
        """Of the floor's speed."""
        return self.floor / self.least


@dataclass(frozen=True, slots=True)
class Kinds:
    """What is multiplied in a model of random weights: its linear layers' weights, and what KV holds."""

    weights: cpu.Kind
    kv: cpu.Kind

    @property
    def others(self) -> cpu.Kind:
        """Of the head, as a worker has it."""
        return cpu.Kind.F32 if self.weights is cpu.Kind.F32 else cpu.Kind.BF16


def steps(
    model: Decoder, forward: CpuForward, kinds: Kinds, kv_bytes: int, limits: MachineLimits, seconds: float
) -> Iterator[StepTime]:
    """Decode steps over CONTEXT tokens, the last of them with prompts too, and prompts. `kv_bytes` are a token's, over
    all layers.

    The floor of a step that decodes is the longer of reading its weights and KV and of multiplying, each kind of
    product at the rate of its own. That of a prompt is its multiply-adds, all at the rate of its linear layers:
    attention's take longer where weights are INT8 and KV is not.
    """

    def step(name: str, batch: RaggedBatch, floor: float) -> StepTime:
        return StepTime(name, *timed(partial(forward.greedy, batch, None), seconds), floor)

    spec, rate = model.spec, limits.rates[kinds.weights]
    dense = sum(weight.numel() for layer in model.layers for weight in layer.parameters() if weight.dim() == 2)

    def pair_products(count: int) -> float:
        """Multiply-adds of a prompt's queries and keys, and as many of its weights and values."""
        return spec.layers * spec.heads * spec.head_dim * count * (count + 1) / 2

    for count in (1, 8, 32):
        needs = decode_needs(model, forward, kinds.kv, kv_bytes, count, CONTEXT)
        yield step(f"decode, batch {count}", batch_of(count, 1, CONTEXT), limits.floor(needs))
    for count in (64, 480):  # beside the last of these
        operations = dict(needs.operations)
        operations[kinds.weights] += 2.0 * dense * count
        operations[product_kind(kinds.kv)] += 4.0 * pair_products(count)
        floor = limits.floor(StepNeeds(needs.read, operations))
        yield step(f"batch 32 + prompt of {count}", mixed_batch(32, CONTEXT, count), floor)
    for count in (256, 2048):
        floor = (2 * dense * count + 4 * pair_products(count)) / rate
        yield step(f"prompt of {count:,}", batch_of(1, count, count), floor)


def random_forward(kernels: cpu.Kernels, kinds: Kinds, layers: int) -> tuple[Decoder, CpuForward, int]:
    """SmolLM2-135M's shape with random weights, and the bytes of a token's KV, of which there is enough for `steps`."""
    spec = llama(**SHAPES["smollm2"] | {"layers": layers})
    model = random_model(spec, kinds.weights.name.lower(), kinds.others.dtype, torch.device("cpu"))
    device_kv = random_kv(spec, str(kinds.kv.dtype).removeprefix("torch."), blocks=32 * 19 + 128)
    return model, CpuForward(model, device_kv.planes, kernels, spec.max_position), token_bytes(device_kv.specs)


def model_steps(
    kernels: cpu.Kernels, kinds: Kinds, layers: int, bandwidth: float, seconds: float
) -> Iterator[StepTime]:
    """Steps of SmolLM2-135M's shape with random weights of one kind, the head's as a worker has it."""
    model, forward, kv_bytes = random_forward(kernels, kinds, layers)
    multiplied = {kinds.weights, kinds.others, product_kind(kinds.kv)}
    rates = {kind: multiply_rate(kernels, kind, seconds) for kind in sorted(multiplied)}
    yield from steps(model, forward, kinds, kv_bytes, MachineLimits(bandwidth, rates), seconds)


SAMPLED: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3},
    "logprobs 5": {"logprobs": 5},
}


def sampling_times(kernels: cpu.Kernels, counts: Sequence[int], seconds: float) -> Iterator[tuple[str, list[float]]]:
    """Seconds of sampling a step of so many rows, whose logits are spread like a normal distribution."""
    sampler = Sampler(CpuSampling(kernels))
    for name, params in SAMPLED.items():
        times = []
        for count in counts:
            logits = torch.randn(count, VOCAB) * 2.5
            sampling = SamplingParams(max_tokens=1, **params)
            rows = [SampleRow(sampling, at, (), (1,), (), PenaltyState((1,), VOCAB)) for at in range(count)]
            times.append(timed(partial(sampler, logits, rows), seconds)[0])
        yield name, times
