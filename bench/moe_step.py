"""Times layers with experts on the CPU: the grouped INT8 products, and decoder steps against dense ones.

Run `python -m bench.moe_step`. Weights are random; steps have SmolLM2-135M's shape with experts of which a token takes
as many parameters as the dense model has. Each figure is the minimum and the median of many calls, dense and sparse in
turn. A step's floor is the bytes it reads over the read bandwidth of the same run: of experts those that the batch
meets in the mean, if each is as likely.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.cpu_kernels import BLOCK, batch_of, random_kv, read_bandwidth
from bench.quality import text
from bench.random_model import SHAPES, llama, random_model, step_weight_bytes
from kvcache.memory.device import token_bytes
from serving.batch.ragged import RaggedBatch
from serving.forward.cpu_forward import CpuForward
from serving.forward.forward import EagerForward
from serving.kernels import cpu
from serving.kernels.layer_weights import MlpWeights, MoeWeights
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.model.moe_spec import MoeSpec
from serving.model.spec import ModelSpec
from serving.text.tokenizer import load_tokenizer

GROUPED = ((576, 128), (576, 256), (576, 1536), (2048, 768))  # hidden width, an expert's
STEPS = (("1 of 8", 8, 1), ("2 of 8", 8, 2), ("4 of 32", 32, 4))  # experts are 1 / (how many a token takes) as wide
CONTEXT = 300
TEXT = 128  # tokens of each text that a model on disk reads

Timed = Callable[[Sequence[Callable[[], object]]], list[tuple[float, float]]]


def alternating(
    calls: Sequence[Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, float]]:
    """Minimum and median seconds of each call, taken in turn for about `seconds` in all (five rounds at least).

    With `clock` time.thread_time they are CPU time of this thread, to which other work on the machine adds least.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    until = clock() + seconds
    while clock() < until or len(times[0]) < 5:
        for call, spent in zip(calls, times, strict=True):
            start = clock()
            call()
            spent.append(clock() - start)
    return [(min(spent), statistics.median(spent)) for spent in times]


def random_experts(kernels: cpu.Kernels, hidden: int, width: int, count: int) -> cpu.PackedExperts:
    """INT8 experts and a bfloat16 router."""

    def linear(outputs: int, inputs: int) -> cpu.PackedLinear:
        scale = torch.full((outputs,), inputs**-0.5 / 73)
        return kernels.pack(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), scale=scale)

    mlps = [MlpWeights(gate_up=linear(2 * width, hidden), down=linear(hidden, width)) for _ in range(count)]
    router = kernels.pack((torch.randn(count, hidden) * hidden**-0.5).bfloat16())
    return cpu.PackedExperts(MoeWeights(router=router, experts=tuple(mlps), top_k=1, normalized=True))


def looped(kernels: cpu.Kernels, experts: cpu.PackedExperts, x: Tensor, out: Tensor) -> None:
    """Each expert's rows, which lie side by side already, by two calls of the engine's INT8 linear layer."""
    each = len(x) // len(experts.weights.experts)
    for number, mlp in enumerate(experts.weights.experts):
        rows = slice(number * each, (number + 1) * each)
        h = kernels.linear(x[rows], mlp.gate_up, finish=cpu.Finish.SWIGLU)
        kernels.linear(h, mlp.down, finish=cpu.Finish.ADD, out=out[rows])


def report_grouped(kernels: cpu.Kernels, count: int, rows: int, bandwidth: float, timed: Timed) -> None:
    print(f"{count} experts, {rows} tokens each, INT8, one call against {2 * count}:")
    for hidden, width in GROUPED:
        experts = random_experts(kernels, hidden, width, count)
        x, outs = torch.randn(count * rows, hidden), [torch.zeros(count * rows, hidden) for _ in range(2)]
        chosen = torch.arange(count, dtype=torch.int32).repeat_interleave(rows)
        kernels.expert_rows(x, chosen, experts, outs[0])
        looped(kernels, experts, x, outs[1])
        assert torch.equal(*outs), "both have the same bits"
        calls = (
            partial(kernels.expert_rows, x, chosen, experts, outs[0]),
            partial(looped, kernels, experts, x, outs[1]),
        )
        (best, median), (loop_best, loop_median) = timed(calls)
        size = count * 3 * hidden * width
        print(
            f"  {hidden:4} x {width:4} ({size / 1e6:3.0f} MB): min {best * 1e3:7.3f} median {median * 1e3:7.3f} ms, "
            f"loop {loop_best * 1e3:7.3f} and {loop_median * 1e3:7.3f} ms: {loop_best / best:.2f} and "
            f"{loop_median / median:.2f} times; {size / best / 1e9:.0f} GB/s ({size / best / bandwidth:.0%} of reading)"
        )


@dataclass(frozen=True)
class TimedModel:
    name: str
    model: Decoder
    forward: CpuForward
    kv_bytes: int  # of a token, over all layers

    @staticmethod
    def make(name: str, spec: ModelSpec, weights: str, kernels: cpu.Kernels) -> TimedModel:
        dtype = torch.float32 if weights == "f32" else torch.bfloat16
        model = random_model(spec, weights, dtype, torch.device("cpu"), kept="")
        kv = random_kv(spec, "bfloat16", blocks=32 * 19 + 128)
        forward = CpuForward(model, kv.planes, kernels, 2048)
        return TimedModel(name, model, forward, token_bytes(kv.specs))

    def bytes_read(self, tokens: int) -> float:
        """Of weights, by a step of so many tokens."""
        return step_weight_bytes(self.model, tokens)


def sparse_spec(dense: ModelSpec, experts: int, top_k: int) -> ModelSpec:
    """As many parameters for a token as `dense` has, besides the routers."""
    width = dense.intermediate // top_k
    moe = MoeSpec(experts=experts, top_k=top_k, intermediate=width, sparse=(True,) * dense.layers)
    return replace(dense, architecture="mixtral", moe=moe)


def report_steps(kernels: cpu.Kernels, weights: str, layers: int, bandwidth: float, timed: Timed) -> None:
    dense = llama(**SHAPES["smollm2"] | {"layers": layers})
    dense_one = TimedModel.make("dense", dense, weights, kernels)
    for name, experts, top_k in STEPS:
        sparse_one = TimedModel.make(name, sparse_spec(dense, experts, top_k), weights, kernels)
        print(f"{weights}, a token takes {name} experts of width {dense.intermediate // top_k}:")
        decodes = [(f"decode batch {count:2}", count, 1, CONTEXT) for count in (1, 8, 32)]
        for told, sequences, new, context in [*decodes, ("prefill 512 tokens", 1, 512, 512)]:
            batch = batch_of(sequences, new, context)
            both = (dense_one, sparse_one)
            times = timed([partial(one.forward.greedy, batch, None) for one in both])
            tokens = sequences * new
            cells = []
            for one, (best, median) in zip(both, times, strict=True):
                floor = (one.bytes_read(tokens) + sequences * context * one.kv_bytes) / bandwidth
                shown = f" floor {floor * 1e3:6.2f}" if new == 1 else ""
                cells.append(f"min {best * 1e3:7.2f} median {median * 1e3:7.2f}{shown}")
            ratio = times[1][0] / times[0][0]
            print(f"  {told:18} dense {cells[0]}; sparse {cells[1]} ms: {ratio:.2f} times")


def text_batch(texts: Sequence[Sequence[int]], new: int) -> RaggedBatch:
    """The last `new` tokens of each text."""
    width = -(-len(texts[0]) // BLOCK)
    return RaggedBatch.build(
        tokens=[one[-new:] for one in texts],
        starts=[len(one) - new for one in texts],
        block_tables=[range(number * width, (number + 1) * width) for number in range(len(texts))],
        block_size=BLOCK,
    )


def report_model(kernels: cpu.Kernels, path: Path, dtype: str, timed: Timed) -> None:
    """The compiled step of a model on disk beside torch's modules, over text: times, and how far they agree."""
    loaded = load(path, dtype)
    read = load_tokenizer(path).encode(text(), add_special_tokens=False)
    texts = [read[at : at + TEXT] for at in range(0, 8 * TEXT, TEXT)]
    planes = random_kv(loaded.spec, loaded.dtype, blocks=8 * -(-TEXT // BLOCK)).planes
    forms = (CpuForward(loaded.model, planes, kernels, 2048), EagerForward(loaded.model, planes))
    forms[0].logits(text_batch(texts, TEXT), None)
    print(f"{path.name}, {loaded.dtype}, {TEXT} tokens of text: compiled step and torch's modules, medians")
    for told, count, new in (("decode batch 1", 1, 1), ("decode batch 8", 8, 1), ("prompt", 1, TEXT)):
        batch = text_batch(texts[:count], new)
        compiled, plain = (form.logits(batch, None) for form in forms)
        apart = float((compiled - plain).abs().max() / plain.abs().max())
        same = int((compiled.argmax(-1) == plain.argmax(-1)).sum())
        (_, ours), (_, torchs) = timed([partial(form.logits, batch, None) for form in forms])
        agree = f"logits within {apart:.1e} of the largest, {same} of {count} likeliest tokens agree"
        print(f"  {told:14} {ours * 1e3:7.1f} and {torchs * 1e3:7.1f} ms: {torchs / ours:.1f} times; {agree}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=cpu.default_threads())
    parser.add_argument("--weights", nargs="+", default=["int8", "bf16"], choices=["int8", "bf16", "f32"])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--experts", type=int, default=64, help="of the grouped products")
    parser.add_argument("--rows", type=int, default=4, help="tokens of each expert there")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--only", choices=["grouped", "steps"], help="leave out the other")
    parser.add_argument("--model", type=Path, help="instead: a folder, whose compiled step is timed beside torch's")
    parser.add_argument("--dtype", default="auto", help="of that model (default: its own)")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the only thread; --threads 1")
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error("CPU time is that of one thread: add --threads 1")
    timed = partial(
        alternating, seconds=options.seconds, clock=time.thread_time if options.cpu_time else time.perf_counter
    )
    torch.manual_seed(0)
    kernels = cpu.load(threads=options.threads, progress=print)
    if kernels is None:
        raise SystemExit("the CPU kernels cannot be built here")
    torch.set_num_threads(options.threads)
    bandwidth = read_bandwidth(kernels, options.seconds)
    torch.set_num_threads(1)  # torch's waiting threads would take the cores from the kernels
    print(f"form {kernels.form}, {kernels.threads} threads, read bandwidth {bandwidth / 1e9:.0f} GB/s")
    if options.model is not None:
        with torch.inference_mode():
            report_model(kernels, options.model, options.dtype, timed)
        return
    if options.only != "steps":
        report_grouped(kernels, options.experts, options.rows, bandwidth, timed)
    for weights in [] if options.only == "grouped" else options.weights:
        report_steps(kernels, weights, options.layers, bandwidth, timed)


if __name__ == "__main__":
    main()
