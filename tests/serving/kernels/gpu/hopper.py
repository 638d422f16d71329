"""Compiles every Triton kernel for compute capability 9.0 on a machine without a GPU; `python -m` runs it.

The doors are called as ever, on CPU tensors, with Triton's launch replaced by compilation. It fails if a kernel does
not compile, does not fit, spills registers, or lacks the instructions it was written for.
"""

from __future__ import annotations

import re
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from struct import unpack_from
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
INSTRUCTION = re.compile(r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/(?P<text>.*)", re.MULTILINE)
INSTRUCTION_BYTES = 16

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


@dataclass(frozen=True)
class CompiledKernel:
    label: str
    shared: int  # bytes
    code: bytes  # instructions
    exact: bool  # float32 products: no matrix unit has them

    def wrong(self, found: Counter[str]) -> Iterator[str]:
        """What is, by how many of the watched instructions it has."""
        if self.shared > SHARED_BYTES:
            yield f"{self.label}: does not fit"
        if found["LDL"] or found["STL"]:
            yield f"{self.label}: spills registers, {dict(found)}"
        for start, kinds in EXPECTED.items():
            if self.label.startswith(start) and not self.exact:
                yield from (f"{self.label}: none of {kind}, {dict(found)}" for kind in kinds if not kind & found.keys())


class Compiled:
    """What every launch was compiled to."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.kernels: list[CompiledKernel] = []
        self.case = ""
        self.exact = False

    def take(self, compiled: Any) -> None:
        name, warps, shared = compiled.metadata.name, compiled.metadata.num_warps, compiled.metadata.shared
        self.names[name] += 1
        label = f"{name} ({self.case}, {warps} warps, {shared} bytes shared)"
        self.kernels.append(CompiledKernel(label, shared, code_of(compiled.asm["cubin"]), self.exact))

    def wrong(self) -> list[str]:
        """What is wrong with any. The disassembler, which takes long to start, reads them all in one go."""
        with NamedTemporaryFile(suffix=".bin") as file:
            file.write(b"".join(kernel.code for kernel in self.kernels))
            file.flush()
            command = [TOOLS / "nvdisasm", "--binary", "SM90a", file.name]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ends = list(accumulate(len(kernel.code) for kernel in self.kernels))
        found: list[Counter[str]] = [Counter() for _ in ends]
        at = -1
        for line in INSTRUCTION.finditer(listing):
            at = int(line["at"], 16)
            found[bisect_right(ends, at)].update(WATCHED.findall(line["text"]))
        assert at == ends[-1] - INSTRUCTION_BYTES, "not all was disassembled"
        pairs = zip(self.kernels, found, strict=True)
        return [wrong for kernel, instructions in pairs for wrong in kernel.wrong(instructions)]


def code_of(cubin: bytes) -> bytes:
    """The instructions in a cubin, a 64-bit ELF file: its sections named .text."""
    (headers,) = unpack_from("<Q", cubin, 0x28)
    size, count, named = unpack_from("<3H", cubin, 0x3A)
    sections = [unpack_from("<IIQQQQ", cubin, headers + number * size) for number in range(count)]
    names = sections[named][4]
    code = b"".join(
        cubin[start : start + length]
        for name, _kind, _flags, _address, start, length in sections
        if cubin.startswith(b".text.", names + name)
    )
    assert code and len(code) % INSTRUCTION_BYTES == 0
    return code


def compile_only(compiled: Compiled) -> None:
    """Replace launching and timing by compiling."""
    launch_kernel = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.take(launch_kernel(self, *args, grid=grid, warmup=True, **kwargs))

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
    wrong = compiled.wrong()
    print("\n".join(wrong) or "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
