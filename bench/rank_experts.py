"""Times what a rank computes of the INT8 rows that it has received: experts together, and module by module.

Run `python -m bench.rank_experts`. Weights are random and lie as a checkpoint has them; rows are quantized already, and
both ways take turns and have the same bits. A floor is the bytes of weights over the read bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from torch import nn

from bench.cpu_kernels import read_bandwidth
from bench.moe_step import alternating
from serving.expert_parallel.exchange import Received, Rows
from serving.expert_parallel.grouped import grouped
from serving.expert_parallel.layer import one_by_one
from serving.kernels import cpu
from serving.kernels.int8 import quantize_rows
from serving.model.gated_mlp import GatedMlp
from serving.model.quantized_linear import QuantizedLinear

SIZES = ((576, 128), (576, 1536), (2048, 768), (7168, 256))  # hidden width, an expert's
HEADER = ("hidden x expert's width", "MB", "one by one ms", "together ms", "times", "of the floor")


def random_expert(hidden: int, width: int) -> GatedMlp:
    with torch.device("meta"):
        expert = GatedMlp(hidden, width)
    for name in ("gate_up", "down"):
        like = expert.get_submodule(name)
        assert isinstance(like, nn.Linear)
        weight = torch.randint(-127, 128, (like.out_features, like.in_features), dtype=torch.int8)
        scale = torch.full((like.out_features,), like.in_features**-0.5 / 73)
        expert.set_submodule(name, QuantizedLinear(weight, scale))
    return expert


def cells(hidden: int, width: int, count: int, rows: int, seconds: float, bandwidth: float) -> list[str]:
    slots = [random_expert(hidden, width) for _ in range(count)]
    given = Rows(*quantize_rows(torch.randn(count * rows, hidden)))
    received = Received.of(given, torch.full((count,), rows, dtype=torch.int32))
    outs = [torch.empty(count * rows, hidden, dtype=torch.bfloat16) for _ in range(2)]
    together = grouped(slots)
    assert together is not None
    calls = partial(one_by_one, slots, received, outs[0]), partial(together.results, received, outs[1])
    (_, single), (_, joined) = alternating(calls, seconds)
    assert torch.equal(*outs), "both have the same bits"
    size = count * 3 * hidden * width
    times = f"{1e3 * single:.2f}", f"{1e3 * joined:.2f}", f"{single / joined:.2f}"
    return [f"{hidden} x {width}", f"{size / 1e6:.0f}", *times, f"{joined / (size / bandwidth):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of the rank")
    parser.add_argument("--experts", type=int, default=32, help="behind its slots")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="of each expert")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = cpu.load(threads=args.threads)
    if kernels is None:
        raise SystemExit("the CPU kernels cannot be built here")
    bandwidth = statistics.median(read_bandwidth(kernels, args.seconds / 3) for _ in range(3))
    print(f"{args.experts} experts, {args.threads} threads, read bandwidth {bandwidth / 1e9:.0f} GB/s")
    with torch.inference_mode():
        for rows in args.rows:
            print(f"\n{rows} rows of each expert\n\n| " + " | ".join(HEADER) + " |\n" + "| --- " * len(HEADER) + "|")
            for hidden, width in SIZES:
                found = cells(hidden, width, args.experts, rows, args.seconds, bandwidth)
                print("| " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
