"""Times whole decode steps of a Llama-shaped model with random weights on a GPU, as a worker computes them.

Run `python -m bench.gpu_decode`; without a CUDA device it says so and exits with 2. A step is everything from lists of
block numbers to a token in host memory: batch, CUDA graph, greedy choice; the next begins before its tokens are read.
The roofline is the time a copy, measured in the same run, would take to move what a step must read: every weight
but the embedding once, of experts those that its rows meet in the mean, and the KV of every sequence.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.random_model import MIXTURES, SHAPES, llama, random_model, step_weight_bytes
from kvcache.memory.device import DeviceKV, token_bytes
from serving.batch.ragged import RaggedBatch
from serving.forward.cuda_graphs import GraphSizes
from serving.forward.forward import Forward

BLOCK = 16  # tokens a KV block
PROMPT_TOKENS = 512  # kernels are tuned for up to so many rows, as a worker's are by default
COPIED_BYTES = 1 << 30
SPARED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    weights: str
    kv: str
    batch: int
    context: int  # tokens, of the middle step
    graphs: bool
    graph_context: int  # tokens that the graph was captured for; 0 without graphs
    step_ms: float
    tokens_per_second: float
    step_bytes: int
    copy_bytes_per_second: float  # read and written, of a large copy

    @property
    def share(self) -> float:
        """Of the roofline."""
        return self.step_bytes / self.copy_bytes_per_second / (self.step_ms / 1e3)


@dataclass(slots=True)
class DecodeReport:
    """What has been measured so far; with `out` it is written there with every row."""

    device: str
    shape: str
    out: Path | None = None
    rows: list[Result] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    held_before: dict[str, int] = field(default_factory=dict)  # bytes, by weights, when their model was made
    peak: dict[str, int] = field(default_factory=dict)  # bytes, by weights

    def add(self, result: Result) -> None:
        self.rows.append(result)
        show(result)
        self.write()

    def write(self) -> None:
        if self.out is not None:
            told: dict[str, Any] = {"device": self.device, "shape": self.shape}
            told["rows"] = [{**asdict(result), "roofline_share": result.share} for result in self.rows]
            told |= {"skipped": self.skipped, "held_before": self.held_before, "peak_bytes": self.peak}
            self.out.write_text(json.dumps(told, indent=2) + "\n")


def decode(forward: Forward, batch: int, context: int, steps: int, blocks: int, device: torch.device) -> list[float]:
    """Seconds from one step's tokens in host memory to the next one's, `steps` times, with so many tokens behind it."""
    order = torch.randperm(blocks).tolist()
    width = blocks // batch
    tables = [order[width * b : width * (b + 1)] for b in range(batch)]
    tokens: Tensor | None = None
    begun: list[tuple[Tensor, torch.cuda.Event | None]] = []
    times: list[float] = []
    for number in range(steps + 2):  # the first is not of the rhythm, and the last is only begun
        start = context - steps // 2 + number
        step = RaggedBatch.build(
            tokens=[[1]] * batch, starts=[start] * batch, block_tables=tables, block_size=BLOCK, device=device
        )
        tokens = forward.greedy(step if tokens is None else replace(step, tokens=tokens), None)
        begun.append(to_host(tokens))
        if number:
            host, copied = begun[number - 1]
            if copied is not None:
                copied.synchronize()
            host.tolist()
            times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def to_host(tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on its way to the host, and what to wait for before it is read."""
    if tokens.device.type != "cuda":
        return tokens, None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return host, copied


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that a copy of `size` random bytes reads and writes: the best of ten."""
    source = torch.empty(size, dtype=torch.int8, device=device).random_(-127, 128)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        _finish(device)
        began = time.perf_counter()
        target.copy_(source)
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fill_randomly(planes: Sequence[Sequence[Tensor]]) -> None:
    """KV as a model leaves it: no zeros, which a device moves for less power; INT8 with scales above zero."""
    for plane in (plane for layer in planes for plane in layer):
        if plane.dtype is torch.int8:
            plane.random_(-127, 128)
        elif plane.dim() == 3:  # scales
            plane.uniform_(0.001, 0.02)
        else:
            plane.normal_()


def release(device: torch.device) -> None:
    """Give back what a model has held: its graphs and the forward refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Of the device's memory, by tensors of this process; 0 where torch does not count."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def room(device: torch.device) -> float:
    """Bytes that KV may take beside the model: graphs, their partial results and libraries need some as well."""
    return 0.9 * torch.cuda.mem_get_info(device)[0] - SPARED_BYTES if device.type == "cuda" else float("inf")


def measure(options: argparse.Namespace, device: torch.device, report: DecodeReport) -> None:
    """One kind of weights after another; nothing of the first is left when the second is made."""
    bandwidth = copy_bandwidth(device, COPIED_BYTES if device.type == "cuda" else COPIED_BYTES >> 6)
    for weights in options.weights:
        release(device)
        report.held_before[weights] = held_bytes(device)
        measure_weights(options, device, weights, bandwidth, report)
        report.peak[weights] = held_bytes(device, peak=True)
        report.write()


@torch.inference_mode()
def measure_weights(
    options: argparse.Namespace, device: torch.device, weights: str, bandwidth: float, report: DecodeReport
) -> None:
    """A row for each batch and context whose KV finds room."""
    from serving.forward.triton_forward import TritonForward

    spec = llama(**(SHAPES | MIXTURES)[options.shape])
    model = random_model(spec, weights, torch.bfloat16, device)
    specs = spec.kv_layers(options.kv)
    most, free = room(device) / (BLOCK * token_bytes(specs)), []
    for batch, context in product(options.batches, options.contexts):
        if batch * width_of(context, options.steps) <= most:
            free.append((batch, context))
        else:
            report.skipped.append(f"{weights}, {batch} x {context}: no room for the KV")
    if not free:
        return
    blocks = max(batch * width_of(context, options.steps) for batch, context in free)
    sizes = graph_sizes(options)
    kv = DeviceKV(specs, blocks, BLOCK, device)
    fill_randomly(kv.planes)
    forward = TritonForward(model, kv.planes, sizes.contexts[-1])
    # There are no graphs on a CPU, and nothing to tune under the interpreter.
    graphs = device.type == "cuda" and options.cuda_graphs
    if device.type == "cuda":
        forward.warm_up(PROMPT_TOKENS, sizes if graphs else None)
    for batch, context in free:
        taken = statistics.median(decode(forward, batch, context, options.steps, blocks, device))
        size = sizes.fit(batch, context + options.steps // 2)
        report.add(
            Result(
                weights=weights,
                kv=options.kv,
                batch=batch,
                context=context,
                graphs=graphs,
                graph_context=size[1] if graphs and size is not None else 0,
                step_ms=taken * 1e3,
                tokens_per_second=batch / taken,
                step_bytes=step_weight_bytes(model, batch) + batch * context * token_bytes(specs),
                copy_bytes_per_second=bandwidth,
            )
        )


def tokens_of(context: int, steps: int) -> int:
    """Of a sequence at the end of `decode`."""
    return context - steps // 2 + steps + 2


def width_of(context: int, steps: int) -> int:
    """Blocks of such a sequence."""
    return -(-tokens_of(context, steps) // BLOCK)


def graph_sizes(options: argparse.Namespace) -> GraphSizes:
    """Those that a worker with these limits would replay such steps from, or of the contexts asked for."""
    most = options.max_model_len or tokens_of(max(options.contexts), options.steps)
    ladder = GraphSizes.up_to(max(options.batches), most)
    padded = {size[0] for batch in options.batches if (size := ladder.fit(batch, 1)) is not None}
    contexts = tuple(sorted(set(options.graph_contexts))) if options.graph_contexts else ladder.contexts
    return GraphSizes(sequences=tuple(sorted(padded)), contexts=contexts)


def show(result: Result) -> None:
    print(
        f"{result.weights:8} {result.kv:8} {result.batch:5} {result.context:7} {result.step_ms:9.3f}"
        f" {result.tokens_per_second:10.1f} {result.step_bytes / 1e9:7.2f} {result.share:6.0%}",
        flush=True,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES | MIXTURES, default="8b")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=("int8", "bfloat16", "quantized"),
        default=["int8", "bfloat16"],
        help="int8: all layers but the head; quantized: those that `millrace quantize` makes INT8",
    )
    parser.add_argument("--kv", choices=("bfloat16", "int8"), default="bfloat16", help="what the KV cache keeps")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64], help="sequences a step")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096], help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=64, help="timed a row; the median counts")
    parser.add_argument("--max-model-len", type=int, help="graphs as of a worker with this limit (the longest context)")
    parser.add_argument("--graph-contexts", nargs="+", type=int, help="capture graphs for these contexts instead")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args(arguments)
    if min(*options.batches, *options.contexts, options.steps) < 1 or options.steps // 2 >= min(options.contexts):
        parser.error("there must be sequences, steps, and contexts longer than half the steps")
    longest = tokens_of(max(options.contexts), options.steps)
    limits = [options.max_model_len or longest, max(options.graph_contexts or [longest])]
    if min(limits) < longest:
        parser.error(f"the longest context and its steps are {longest} tokens, and graphs end before")
    return options


def why_not(shape: str) -> str | None:
    """Why nothing can be timed here; None where it can."""
    if find_spec("triton") is None:
        return "bench.gpu_decode needs triton (the extra `gpu`)"
    from serving.kernels import gpu

    if torch.cuda.is_available() or (shape == "tiny" and gpu.INTERPRETED):
        return None
    return (
        "bench.gpu_decode needs a CUDA device, and there is none here"
        " (TRITON_INTERPRET=1 with --shape tiny goes through the motions on a CPU)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    reason = why_not(options.shape)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted: no figure here means anything"
    print(f"{name}; {options.shape} shape, greedy, medians of {options.steps} steps")
    print(f"{'weights':8} {'KV':8} {'batch':>5} {'context':>7} {'ms/step':>9} {'tok/s':>10} {'GB read':>7} {'roof':>6}")
    report = DecodeReport(device=name, shape=options.shape, out=options.json)
    measure(options, device, report)
    for line in report.skipped:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
