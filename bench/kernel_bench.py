"""Times calls on one device beside its own ceilings, and keeps a row of each; the shapes that `bench.kernels` times.

It knows how a call is timed, and no kernel.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """What is timed: Llama 3 8B's shapes, unless others are given."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    square: int = 8192  # rows and columns of the products that are the ceilings
    copied: int = 1 << 30  # bytes of the copy that is
    cold: int = 512 << 20  # inputs are rotated until they take so many bytes: several times any L2 cache
    many: int = 4096  # rows of a prompt
    few: tuple[int, ...] = (1, 8, 16, 32, 64)
    decodes: tuple[tuple[int, int], ...] = ((64, 4096), (256, 1024), (8, 32768), (1, 8192))  # sequences and contexts
    prompts: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2048))  # sequences and new tokens of each
    rows: tuple[int, ...] = (64, 8192)
    sampled: int = 256  # sequences
    mixture: tuple[int, int, int, int] = (2048, 768, 128, 8)  # of Qwen3-30B-A3B: widths, experts, and those of a row

    def layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each product."""
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim),
            "o": (self.hidden, self.hidden),
            "gate_up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }


TINY = KernelSizes(
    hidden=64,
    intermediate=64,
    heads=2,
    kv_heads=1,
    head_dim=64,
    vocab=200,
    square=64,
    copied=1 << 20,
    cold=1,
    many=32,
    few=(1,),
    decodes=((2, 40),),
    prompts=((1, 40),),
    rows=(4,),
    sampled=4,
    mixture=(64, 32, 4, 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device was seen to do: bytes, int8 operations and bfloat16 operations a second."""

    bandwidth: float
    int8: float
    bf16: float


@dataclass(slots=True)
class KernelBench:
    """Times calls on one device, prints a line for each and keeps them; with `out` they are written there at once."""

    device: torch.device
    sizes: KernelSizes
    repeats: int
    out: Path | None = None
    rows: list[dict[str, object]] = field(default_factory=list)
    ceilings: Ceilings = field(init=False)

    def seconds_of(self, *calls: Call) -> float:
        """Median seconds of one call; `calls` do the same work on inputs of their own, and take turns."""
        for call in calls[:2]:
            call()
        if self.device.type != "cuda":
            return self.seconds_waited_for(*calls)
        count = max(len(calls), 8)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in islice(cycle(calls), count):
                call()
        graph.replay()
        times: list[float] = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / count)
        return statistics.median(times)

    def seconds_waited_for(self, *calls: Call) -> float:
        """The same by the host's clock, each call launched and waited for."""
        times: list[float] = []
        for call in islice(cycle(calls), self.repeats):
            self._finish()
            began = time.perf_counter()
            call()
            self._finish()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def measure_ceilings(self) -> None:
        side = self.sizes.square
        source = torch.empty(self.sizes.copied, dtype=torch.int8, device=self.device).random_(-127, 128)
        target = torch.empty_like(source)
        a, b = self.int8(side, side), self.int8(side, side)
        x, y = self.bf16(side, side), self.bf16(side, side)
        operations = 2 * side**3
        self.ceilings = Ceilings(
            bandwidth=2 * source.numel() / self.seconds_of(partial(target.copy_, source)),
            int8=operations / self.seconds_of(partial(torch._int_mm, a, b.T)),
            bf16=operations / self.seconds_of(partial(torch.mm, x, y.T)),
        )

    def line(self, name: str, seconds: float, *, rate: float, ceiling: float, unit: str, note: str = "") -> None:
        """`rate` and `ceiling` in a second; shown and kept in `unit`, which is G or T of them."""
        scale = 1e9 if unit.startswith("G") else 1e12
        share = rate / ceiling
        print(f"{name:44} {seconds * 1e6:10.1f} µs {rate / scale:9.1f} {unit:7} {share:5.0%}  {note}", flush=True)
        figures = {"name": name, "seconds": seconds, "rate": rate / scale, "ceiling": ceiling / scale}
        self.rows.append({**figures, "unit": unit, "share": share, "note": note})
        self.write()

    def bytes_line(self, name: str, seconds: float, moved: float, note: str = "") -> None:
        rate = moved / seconds
        self.line(name, seconds, rate=rate, ceiling=self.ceilings.bandwidth, unit="GB/s", note=note)

    def write(self) -> None:
        if self.out is not None:
            told = {"device": device_name(self.device), "ceilings": asdict(self.ceilings), "rows": self.rows}
            self.out.write_text(json.dumps(told, indent=2) + "\n")

    def int8(self, *shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=self.device)

    def bf16(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def ones(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(count, dtype=dtype, device=self.device)

    def copies_of(self, bytes_each: int) -> int:
        return max(1, min(64, -(-self.sizes.cold // bytes_each)))

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted: no figure here means anything"
