"""Times latent attention (MLA) on the CPU: its two forms against each other, and what widening weights costs a step.

Run `python -m bench.latent`. Weights are random; widths are those of DeepSeek-V3's heads, of which there are fewer. The
forms are timed in turn, on one layer's attention alone; their break-even is where the ratio of medians crosses 1. All
is CPU time of one thread, to which other work on the machine adds least.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.cpu_kernels import batch_of, random_kv
from bench.moe_step import alternating
from bench.random_model import llama, random_model, weight_bytes
from serving.forward.forward import EagerForward
from serving.kernels.torch_linears import use_cpu_linears
from serving.model.mla import KvExpansion, MlaAttention, hold_float32
from serving.model.mla_spec import MlaSpec
from serving.model.spec import ModelSpec

MLA = MlaSpec(kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128, scale=192**-0.5)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
NAMES = {"f32": "float32", "bf16": "bfloat16"}
BATCHES = (1, 8, 32)


def medians(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    return [median for _, median in alternating(calls, seconds, time.thread_time)]


def latent_spec(heads: int, layers: int) -> ModelSpec:
    """DeepSeek-V2-Lite's shape but for its experts: an MLP as wide as those that a token takes."""
    spec = llama(
        hidden=2048,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=MLA.rope_dim,
        intermediate=8448,
        vocab_size=32000,
        max_position=8192,
    )
    return replace(spec, architecture="deepseek_v2", head_dim=MLA.nope_dim + MLA.rope_dim, mla=MLA)


def report_widening(heads: int, layers: int, context: int, seconds: float) -> None:
    """What expands latents held in bfloat16 and widened at each use, against held in float32: same bits.

    Of a decode step, its linear layers INT8, and of the absorbed attention of one of its layers alone.
    """
    model = random_model(latent_spec(heads, layers), "int8", torch.bfloat16, torch.device("cpu"))
    use_cpu_linears(model)
    planes = random_kv(model.spec, "bfloat16", max(BATCHES) * -(-context // 16)).planes
    forward, attention = EagerForward(model, planes), model.layers[0].attention
    assert isinstance(attention, MlaAttention)
    expansions = [module for module in model.modules() if isinstance(module, KvExpansion)]
    narrow, size = [module.weight for module in expansions], weight_bytes(model)
    hold_float32(model)
    wide, wide_size = [module.weight for module in expansions], weight_bytes(model)
    print(f"{layers} layers, {heads} heads, context {context}, weights {size / 1e6:.0f} and {wide_size / 1e6:.0f} MB:")

    def held(weights: Sequence[nn.Parameter], call: Callable[[], Tensor]) -> Tensor:
        for module, weight in zip(expansions, weights, strict=True):
            module.weight = weight
        return call()

    for count in BATCHES:
        batch = batch_of(count, 1, context)
        nope, turned = (torch.randn(count, heads, width).bfloat16() for width in (MLA.nope_dim, MLA.rope_dim))
        attend = partial(attention.absorbed, nope, turned, batch, planes[0])
        for name, call in (("step", partial(forward.logits, batch, None)), ("attention", attend)):
            calls = [partial(held, weights, call) for weights in (narrow, wide)]
            assert torch.equal(calls[0](), calls[1]()), "both have the same bits"
            before, after = (1e3 * spent for spent in medians(calls, seconds))
            ratio = f"{before:8.2f} ms, held in float32 {after:8.2f} ms: {before / after:.2f} times"
            print(f"  batch {count:2} {name:9}: {ratio}")


@dataclass(frozen=True)
class LatentForms:
    """One layer's attention in both forms, its queries drawn."""

    attention: MlaAttention
    planes: tuple[Tensor, ...]
    heads: int
    dtype: torch.dtype

    def seconds(self, new: int, context: int, spent: float) -> list[float]:
        """Of the absorbed and of the expanded form for one sequence."""
        nope = torch.randn(new, self.heads, MLA.nope_dim).to(self.dtype)
        turned = torch.randn(new, self.heads, MLA.rope_dim).to(self.dtype)
        batch = batch_of(1, new, context)
        forms = (self.attention.absorbed, self.attention.expanded)
        return medians([partial(form, nope, turned, batch, self.planes) for form in forms], spent)


def crossing(rows: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Where absorbed / expanded first crosses 1, between rows in proportion to the logarithms."""
    for (less, below), (more, above) in pairwise(zip(rows, ratios, strict=True)):
        if below <= 1 < above:
            at = -math.log(below) / (math.log(above) - math.log(below))
            return float(less * (more / less) ** at)
    return None


def report_forms(weights: str, heads: int, rows: Sequence[int], contexts: Sequence[int], seconds: float) -> None:
    model = random_model(latent_spec(heads, 1), weights, DTYPES[weights], torch.device("cpu"))
    hold_float32(model)
    attention = model.layers[0].attention
    assert isinstance(attention, MlaAttention)
    planes = random_kv(model.spec, NAMES[weights], -(-max(contexts) // 16)).planes[0]
    attended = LatentForms(attention, planes, heads, DTYPES[weights])
    print(f"{weights}, {heads} heads: new tokens from which expanding pays (as expected), ms of both:")
    for context in contexts:
        new = [count for count in rows if count <= context]
        times = [attended.seconds(count, context, seconds) for count in new]
        cells = "  ".join(f"{count}: {a * 1e3:.1f}/{e * 1e3:.1f}" for count, (a, e) in zip(new, times, strict=True))
        found = crossing(new, [a / e for a, e in times])
        expected = next(count for count in range(1, context + 1) if MLA.expands(count, context))
        print(f"  context {context:5}: {'none' if found is None else round(found)} ({expected})   {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", default=["f32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4, help="of the steps")
    parser.add_argument("--context", type=int, default=512, help="tokens, of the steps")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 96, 128, 192, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--only", choices=["widening", "forms"], help="leave out the other")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        if options.only != "forms":
            report_widening(options.heads, options.layers, options.context, options.seconds)
        for weights in [] if options.only == "widening" else options.weights:
            report_forms(weights, options.heads, options.rows, options.contexts, options.seconds)


if __name__ == "__main__":
    main()
