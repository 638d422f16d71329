"""Compiles every Triton kernel for compute capability 9.0 on a machine without a GPU; `python -m` runs it.

The doors are called as ever, on CPU tensors, with Triton's launch replaced by compilation. It fails if a kernel does
not compile, does not fit, spills registers, or lacks the instructions it was written for.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from serving.batch.ragged import RaggedBatch
from serving.kernels import gpu
from serving.kernels.gpu import launch

SHARED_BYTES = 227 * 1024  # what one program may have
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
WATCHED = re.compile(r"\b(HGMMA|IGMMA|HMMA|IMMA|UTMALDG|LDGSTS|LDL|STL)\b")

# Kernels by the beginning of their name: the matrix and copy instructions at least one of which each must have.
EXPECTED = {
    "_many_rows": [{"IGMMA"}, {"UTMALDG"}],
    "_few_rows": [{"IGMMA", "IMMA"}, {"LDGSTS"}],
    "_decode": [{"HMMA"}, {"LDGSTS"}],
    "_prompt": [{"HGMMA"}, {"LDGSTS"}],
}


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class Compiled:
    """What every launch was compiled to, and what is wrong with it."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.case = ""
        self.exact = False  # float32 products: no matrix unit has them

    def look(self, compiled: Any) -> None:
        name, warps = compiled.metadata.name, compiled.metadata.num_warps
        self.names[name] += 1
        name = f"{name} ({self.case}, {warps} warps, {compiled.metadata.shared} bytes shared)"
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            listing = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
        found = Counter(WATCHED.findall(listing))
        if compiled.metadata.shared > SHARED_BYTES:
            self.wrong.append(f"{name}: does not fit")
        if found["LDL"] or found["STL"]:
            self.wrong.append(f"{name}: spills registers, {dict(found)}")
        for start, kinds in EXPECTED.items():
            if name.startswith(start) and not self.exact:
                self.wrong += [f"{name}: none of {kind}, {dict(found)}" for kind in kinds if not kind & found.keys()]


def compile_only(compiled: Compiled) -> None:
    """Replace launching and timing by compiling."""
    launch_kernel = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.look(launch_kernel(self, *args, grid=grid, warmup=True, **kwargs))

    def time_none(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **meta, **config.all_kwargs()})
        self.fn.run(*args, **{**meta, **config.all_kwargs()})
        return [0.0]

    driver.set_active(Hopper())
    JITFunction.run = run
    Autotuner._bench = time_none
    launch.runs_on = lambda _device: True


def rows() -> None:
    x, weight = torch.zeros(4, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    gate_up = torch.zeros(4, 28672, dtype=torch.bfloat16)
    for quantized in (False, True):
        gpu.add_rms_norm(x, None, weight, 1e-5, quantized=quantized)
        gpu.add_rms_norm(x, x, weight, 1e-5, quantized=quantized)
        gpu.silu_mul(gate_up, quantized=quantized)
    gpu.quantize(x)


def linear() -> None:
    weight, scales = torch.zeros(4096, 4096, dtype=torch.int8), torch.ones(4096)
    for count in (1, 64, 1024):
        values = torch.zeros(count, 4096, dtype=torch.int8)
        gpu.int8_linear(values, scales[:count], weight, scales)
    gpu.int8_linear(values[:8], scales[:8], weight[:1024], scales[:1024], scales[:1024])


def rotary(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    qkv, angles, slots = torch.zeros(4, 48, 128, dtype=dtype), torch.zeros(4, 64), torch.arange(4)
    plane = torch.zeros(4, 16, 8, 128, dtype=kv_dtype)
    scales = [torch.zeros(4, 16, 8)] * 2 if kv_dtype is torch.int8 else []
    gpu.rope_write_kv(qkv, angles, angles, slots, plane, plane, *scales)
    norm = torch.ones(128, dtype=dtype)
    gpu.rope_write_kv(qkv, angles, angles, slots, plane, plane, *scales, norms=(norm, norm), eps=1e-6)


def attention(dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    plane = torch.zeros(40, 16, kv_heads, head_dim, dtype=kv_dtype)
    scales = [torch.zeros(40, 16, kv_heads)] * 2 if kv_dtype is torch.int8 else []
    q = torch.zeros(10, heads, head_dim, dtype=dtype)
    batch = RaggedBatch.build(
        tokens=[[0], [0] * 9], starts=[300, 0], block_tables=[list(range(20)), [20]], block_size=16
    )
    for window in (None, 40):
        gpu.paged_attention(q, plane, plane, batch, 0.1, window, *scales)


def main() -> int:
    compiled = Compiled()
    compile_only(compiled)
    rows()
    linear()
    for dtype, kv_dtype, *shape in (
        (torch.bfloat16, torch.bfloat16, 32, 8, 128),
        (torch.bfloat16, torch.int8, 32, 8, 128),
        (torch.bfloat16, torch.bfloat16, 9, 3, 64),
        (torch.float32, torch.float32, 9, 3, 64),
    ):
        compiled.case, compiled.exact = f"{dtype} over {kv_dtype}, {shape}", dtype is torch.float32
        rotary(dtype, kv_dtype)
        attention(dtype, kv_dtype, *shape)
    for name, count in sorted(compiled.names.items()):
        print(f"{name}: {count}")
    print("\n".join(compiled.wrong) or "all as expected")
    return 1 if compiled.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
