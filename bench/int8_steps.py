"""What a step takes by how much of a model is INT8: forms of one model in turns, on the compiled kernels.

    python -m bench.int8_steps [MODEL] [--threads N] [--turns N]

Forms are bfloat16, INT8 as `millrace quantize` writes it by default, and INT8 in every linear of every layer. Steps of
all forms are taken in turns, so that what else runs meets all alike; the ratio is the median of the turns' own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.cpu_kernels import batch_of, random_kv
from bench.report import aligned
from serving.forward.cpu_forward import CpuForward
from serving.kernels import cpu
from serving.loader.loading import load, resolve
from serving.quantization.scheme import PORTABLE, ROTATED

BLOCKS = 32 * 20  # for 32 sequences of 300 tokens
FORMS = {"bfloat16": None, "INT8, portable": PORTABLE, "INT8": ROTATED}
STEPS = {
    "decode 1, context 300": (1, 1, 300),
    "decode 8": (8, 1, 300),
    "decode 32": (32, 1, 300),
    "prompt 256": (1, 256, 256),
    "prompt 2,048": (1, 2048, 2048),
}
"""Sequences, new tokens of each, and tokens of each after the step."""


def weight_bytes(decoder: cpu.CpuDecoder) -> int:
    """What a step of one token reads: every linear's packed numbers, the head's among them."""
    linears = [linear for w in decoder.layers for linear in (w.qkv, w.o, w.mlp.gate_up, w.mlp.down)]  # type: ignore[union-attr]
    return sum(linear.packed.nbytes for linear in (*linears, decoder.head))


def in_turns(steps: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
    """Seconds of each step in each turn, after one that is not counted."""
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(turns + 1):
        for step, seconds in zip(steps, taken, strict=True):
            began = time.perf_counter()
            step()
            if turn:
                seconds.append(time.perf_counter() - began)
    return taken


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.int8_steps", description="Step times by what is INT8.")
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a hub name (default: the demo model)")
    parser.add_argument("--threads", type=int, help="compute threads (default: the cores this process may use)")
    parser.add_argument("--turns", type=int, default=60, help="steps of each kind and form; prompts a fifth (60)")
    given = parser.parse_args(arguments)
    kernels = cpu.load(threads=given.threads)
    if kernels is None:
        raise ValueError("the CPU kernels cannot be built here: install g++ or clang++")
    torch.set_num_threads(1)
    path, forwards = resolve(given.model), []
    for scheme in FORMS.values():
        model = load(path, "bfloat16", quantization=None if scheme is None else "int8", scheme=scheme).model
        planes = random_kv(model.spec, "bfloat16", BLOCKS).planes
        forwards.append(CpuForward(model, planes, kernels, 2048, releases=True))
    print(f"{kernels.threads} threads, form {kernels.form}; weights of a step of one token, MB:")
    print(aligned([list(FORMS), [f"{weight_bytes(one.decoder) / 1e6:.0f}" for one in forwards]]) + "\n")
    rows = [["median of the turns, ms", *FORMS, "INT8 / portable"]]
    for name, shape in STEPS.items():
        batch = batch_of(*shape)
        turns = given.turns if shape[1] == 1 else max(given.turns // 5, 1)
        taken = in_turns([partial(one.greedy, batch, None) for one in forwards], turns)
        ratios = [new / old for old, new in zip(taken[1], taken[2], strict=True)]
        times = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in taken]
        rows.append([name, *times, f"{statistics.median(ratios):.3f}"])
        print(f"{name}: done", file=sys.stderr)
    print(aligned(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
