"""Compiles every Triton kernel for compute capability 9.0 on a machine without a GPU; `python -m` runs it.

The doors are called as ever, on CPU tensors, with Triton's launch replaced by compilation. It fails if a kernel does
not compile, does not fit, spills registers, lacks the instructions it was written for, or takes other resources than
docs/kernel-resources.md says, which `--write` writes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
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
from serving.kernels.gpu import drawing, grouped_linear, kv_rows, launch, leaf_digests, routing
from serving.kernels.gpu.radix_search import DrawColumns
from serving.kernels.layer_weights import LinearWeights
from tests.serving.kernels.segments import CopiedSegments

SHARED_BYTES = 227 * 1024  # what one program may have
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
WATCHED = re.compile(r"\b(HGMMA|IGMMA|HMMA|IMMA|UTMALDG|LDGSTS|LDL|STL)\b")
NARROW = re.compile(r"\bLDGSTS\.E(?![.\w]*\.(64|128)\b)")  # an asynchronous copy of four bytes
INSTRUCTION = re.compile(r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/(?P<text>.*)", re.MULTILINE)
INSTRUCTION_BYTES = 16
BRANCH = re.compile(r"\bBRA 0x(?P<to>[0-9a-f]+)")

# A turn of the digest's loop is one of a warp's for each KiB, which takes 16 ns on a link of 64 GB/s. Two in a hundred
# of what 132 multiprocessors can issue meanwhile, four instructions a clock at 1.7 GHz:
LONGEST_LOOPS = {"_digest": int(0.02 * 132 * 4 * 1.7e9 * 1024 / 64e9)}
SIZED, REGISTER_COUNT = 0x04, 0x2F  # in a cubin's .nv.info
TABLE = Path(__file__).resolve().parents[4] / "docs/kernel-resources.md"
HEADING = f"""# What the Triton kernels take

Compiled for compute capability 9.0 (H100, H200) by Triton {triton.__version__}, at the shapes of an 8B; the most of all
variants of a case. A multiprocessor has 65,536 registers and 227 KiB of shared memory for its programs. Copies of 4
bytes are instructions that bring no more than that to shared memory: entries of block tables, and scales. Spills are
instructions that move registers to memory and back. Written by `python -m tests.serving.kernels.gpu.hopper --write`,
held by `tests/serving/kernels/gpu/test_own_process.py`.

| kernel | case | warps | registers a thread | shared bytes | copies of 4 bytes | spills |
|---|---|---|---|---|---|---|"""

# Kernels by the beginning of their name: the matrix and copy instructions at least one of which each must have.
EXPECTED = {
    "_many_rows": [{"IGMMA"}, {"UTMALDG"}],
    "_few_rows": [{"IGMMA", "IMMA"}, {"LDGSTS"}],
    "_grouped": [{"HGMMA", "HMMA", "IGMMA", "IMMA"}, {"LDGSTS"}],
    "_decode": [{"HMMA"}, {"LDGSTS"}],
    "_prompt": [{"HGMMA"}, {"LDGSTS"}],
    "_range": [{"HGMMA", "HMMA"}, {"LDGSTS"}],
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
    case: tuple[str, str]  # the kernel's name, and what it was compiled for
    warps: int
    registers: int  # of a thread
    shared: int  # bytes
    code: bytes  # instructions
    exact: bool  # float32 products: no matrix unit has them

    def wrong(self, found: Counter[str], loop: int) -> Iterator[str]:
        """What is, by how many of the watched instructions it has, and how many its longest loop has in all."""
        for start, most in LONGEST_LOOPS.items():
            if self.label.startswith(start) and not 0 < loop <= most:
                yield f"{self.label}: {loop} instructions in its loop, not up to {most}"
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
        code, registers = code_of(compiled.asm["cubin"])
        self.kernels.append(CompiledKernel(label, (name, self.case), warps, registers, shared, code, self.exact))

    def table(self, found: Sequence[Counter[str]]) -> str:
        """What each kernel takes at most for each case, as Markdown; by how many of the watched instructions it has."""
        most: dict[tuple[str, str], tuple[int, ...]] = {}
        for kernel, instructions in zip(self.kernels, found, strict=True):
            spilled = instructions["LDL"] + instructions["STL"]
            takes = kernel.warps, kernel.registers, kernel.shared, instructions["narrow"], spilled
            most[kernel.case] = tuple(map(max, takes, most.get(kernel.case, takes)))
        rows = [f"| `{name}` | {case} | {' | '.join(map(str, most[name, case]))} |" for name, case in sorted(most)]
        return "\n".join((HEADING, *rows, ""))

    def watched(self) -> list[tuple[Counter[str], int]]:
        """Of each kernel the instructions that matter, and how many its longest loop has in all.

        The disassembler, slow to start, reads them all in one go.
        """
        with NamedTemporaryFile(suffix=".bin") as file:
            file.write(b"".join(kernel.code for kernel in self.kernels))
            file.flush()
            command = [TOOLS / "nvdisasm", "--binary", "SM90a", file.name]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ends = list(accumulate(len(kernel.code) for kernel in self.kernels))
        found: list[Counter[str]] = [Counter() for _ in ends]
        loops = [0] * len(ends)
        at = -1
        for line in INSTRUCTION.finditer(listing):
            at = int(line["at"], 16)
            number = bisect_right(ends, at)
            found[number].update(WATCHED.findall(line["text"]))
            found[number]["narrow"] += len(NARROW.findall(line["text"]))
            if (branch := BRANCH.search(line["text"])) and (to := int(branch["to"], 16)) < at:
                loops[number] = max(loops[number], (at - to) // INSTRUCTION_BYTES + 1)
        assert at == ends[-1] - INSTRUCTION_BYTES, "not all was disassembled"
        return list(zip(found, loops, strict=True))


def code_of(cubin: bytes) -> tuple[bytes, int]:
    """The instructions in a cubin, a 64-bit ELF file: its sections named .text; and the registers they take."""
    (headers,) = unpack_from("<Q", cubin, 0x28)
    size, count, named = unpack_from("<3H", cubin, 0x3A)
    sections = [unpack_from("<IIQQQQ", cubin, headers + number * size) for number in range(count)]
    names = sections[named][4]

    def contents(name: bytes) -> list[bytes]:
        found = [section for section in sections if cubin.startswith(name, names + section[0])]
        return [cubin[start : start + length] for *_, start, length in found]

    code = b"".join(contents(b".text."))
    assert code and len(code) % INSTRUCTION_BYTES == 0
    (info,) = contents(b".nv.info\0")
    return code, register_count(info)


def register_count(info: bytes) -> int:
    """The most registers of a thread by what a cubin says of its functions: attributes, some with a sized value."""
    at, counts = 0, []
    while at < len(info):
        form, attribute, length = unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            if attribute == REGISTER_COUNT:
                counts.append(unpack_from("<II", info, at)[1])
            at += length
    return max(counts)


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


def routed() -> None:
    """A decode step of 64 rows among 128 experts."""
    chosen, weights = routing.route(torch.zeros(64, 128, dtype=torch.bfloat16), 8, normalized=True)
    routing.by_expert(chosen, range(128), 128)
    parts = torch.zeros(512, 2048, dtype=torch.bfloat16)
    grouped_linear.weighted_sum(parts, chosen, weights, range(128), torch.bfloat16)
    for quantized in (False, True):
        grouped_linear.pairs_silu_mul(parts, chosen, range(128), quantized=quantized)


def grouped(dtype: torch.dtype) -> None:
    """Experts of 2,048 inputs and 1,536 outputs, for blocks of few rows and of many."""
    scale = torch.ones(1536) if dtype is torch.int8 else None
    weights = grouped_linear.ExpertWeights.of([LinearWeights(weight=torch.zeros(1536, 2048, dtype=dtype), scale=scale)])
    for count in (8, 200):
        rows = routing.by_expert(torch.zeros(count, 1, dtype=torch.int32), range(1), 1)
        x, scales = torch.zeros(count, 2048, dtype=dtype), None if scale is None else torch.ones(count)
        grouped_linear.grouped_linear(x, scales, rows, weights, torch.bfloat16)


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


def offloaded(dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """A segment of 128 tokens, for a decode step and for a chunk of a prompt."""
    plane = torch.zeros(8, 16, kv_heads, head_dim, dtype=kv_dtype)
    scales = [torch.zeros(8, 16, kv_heads)] * 2 if kv_dtype is torch.int8 else []
    for count in (1, 40):
        q = torch.zeros(count, heads, head_dim, dtype=dtype)
        batch = RaggedBatch.build(
            tokens=[[0] * count],
            starts=[128],
            block_tables=[[0, 1, 2]],
            block_size=16,
            offloaded=CopiedSegments([(plane, plane, *scales)], range(8), 128, 128),
        )
        gpu.paged_attention(q, plane, plane, batch, 0.1, None, *scales)


def copies() -> None:
    """KV of two planes out and in, by units of eight bytes and of one; and its digests."""
    packed = torch.zeros(2 << 20, dtype=torch.uint8)
    leaf_digests.leaf_digests(leaf_digests.constants(), packed, packed, size=2 << 20)
    table, blocks = torch.zeros(2, kv_rows.FIELDS, dtype=torch.int64), torch.zeros(32, dtype=torch.int64)
    for unit in (8, 1):
        rows = kv_rows.PackedRows(0, 2, widest=2048, tokens=512, offset=0, block_size=16, unit=unit)
        kv_rows.gather(table, blocks, torch.zeros(2 << 20, dtype=torch.uint8), rows)
        kv_rows.scatter(table, blocks, torch.zeros(2 << 20, dtype=torch.uint8), rows)


def drawn() -> None:
    logits, asked = torch.zeros(2, 128_256), torch.ones(2, 4, dtype=torch.float64)
    top_k = torch.ones(2, dtype=torch.int64)
    for bounded in (False, True):
        drawing.draw(logits, logits[:, 0].contiguous(), DrawColumns(asked, top_k, bounded=bounded, nucleus=True))


def main() -> int:
    compiled = Compiled()
    compile_only(compiled)
    compiled.case = "rows of 4,096 and 28,672, bfloat16"
    rows()
    compiled.case = "KV of 512 tokens, 2 MiB"
    copies()
    compiled.case = "4,096 inputs, the largest of all tiles"
    linear()
    compiled.case = "64 rows, 8 of 128 experts"
    routed()
    for dtype in (torch.bfloat16, torch.int8):
        compiled.case = f"{str(dtype).removeprefix('torch.')} experts of 2,048 inputs, the largest of all tiles"
        grouped(dtype)
    compiled.case = "128,256 tokens"
    drawn()
    for dtype, kv_dtype, *shape in (
        (torch.bfloat16, torch.bfloat16, 32, 8, 128),
        (torch.bfloat16, torch.int8, 32, 8, 128),
        (torch.bfloat16, torch.bfloat16, 9, 3, 64),
        (torch.float32, torch.float32, 9, 3, 64),
    ):
        kinds = " over ".join(str(kind).removeprefix("torch.") for kind in (dtype, kv_dtype))
        compiled.case = f"{kinds}, {shape[0]} heads of {shape[2]} over {shape[1]}"
        compiled.exact = dtype is torch.float32
        rotary(dtype, kv_dtype)
        attention(dtype, kv_dtype, *shape)
        offloaded(dtype, kv_dtype, *shape)
    for name, count in sorted(compiled.names.items()):
        print(f"{name}: {count}")
    found = compiled.watched()
    wrong = [wrong for kernel, seen in zip(compiled.kernels, found, strict=True) for wrong in kernel.wrong(*seen)]
    table = compiled.table([instructions for instructions, _ in found])
    if "--write" in sys.argv:
        TABLE.write_text(table)
    elif TABLE.read_text() != table:
        wrong.append(f"{TABLE.name} says something else than\n{table}")
    print("\n".join(wrong) or "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
