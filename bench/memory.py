"""What each process of a server holds of the host's memory, after start and after load, beside its parts.

    python -m bench.memory [MODEL] [--quantization int8] [--minutes 3] [--write FILE]

Every form of a server is started, one after the other, and each of its processes read from /proc: what is resident
(RSS), what of that is the process's own (anonymous), what others may map too, its share of it all (PSS), and the most
that was ever resident (VmHWM), which after a start is the start's peak. Then come requests of short and long prompts,
and the processes are read again. A worker's parts are measured in processes of their own: the weights as the kernels
hold them, what importing torch takes, and what the rest of a worker's code takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from random import Random

import orjson

from bench.connection import HttpClient
from bench.endpoint import ServerError, first_model
from bench.own_server import ROOT, OwnServer, commit
from bench.report import aligned

MB = 1e6
FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # flags, and workers that have to report
    "embedded": ((), ()),
    "split": (("--prefill", "1", "--decode", "1", "--kvcache", "1"), ("prefill-0", "decode-0")),
}
PROMPTS, OUTPUTS = (16, 120, 600, 1500), (8, 32, 96)  # tokens of a request, drawn of these
HELPERS = {"serving.api.body_process": "request bodies", "serving.fork_server_process": "fork server"}
WORKERS = ("prefill", "decode", "mixed", "serve (all in one)")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of one process, as /proc/PID/smaps_rollup and status tell them."""

    name: str
    resident: int
    anonymous: int
    mapped_shared: int  # clean pages of files that others map too
    share: int  # PSS
    peak: int  # of what was resident, since the process began

    def row(self) -> list[str]:
        sizes = (self.resident, self.anonymous, self.mapped_shared, self.share, self.peak)
        return [self.name, *(f"{size / MB:.0f}" for size in sizes)]


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Anonymous bytes of what a worker is made of."""

    weights: int  # as the kernels hold them, rotary tables included
    torch: int  # of a process that has imported it
    code: int  # of one that has imported all that a worker does, torch included


def memory_of(pid: int, alone: bool) -> ProcessMemory:
    """Of a process that runs; `alone` where it has no workers below it. Raises OSError when it has gone."""
    folder = Path(f"/proc/{pid}")
    told = (folder / "smaps_rollup").read_text() + (folder / "status").read_text()
    found = {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", told, re.MULTILINE)}
    command = (folder / "cmdline").read_bytes().decode().split("\0")
    return ProcessMemory(
        process_name(command, alone),
        *(found[key] for key in ("Rss", "Anonymous", "Shared_Clean", "Pss", "VmHWM")),
    )


def process_name(command: Sequence[str], alone: bool) -> str:
    """What a process of a server is, by the command it was started with."""
    if "deploy.cli" not in command:
        return next((name for module, name in HELPERS.items() if module in command), Path(command[0]).name)
    role = command[command.index("deploy.cli") + 1]
    if role != "serve":
        return "pool node" if role == "kvcache" else role
    return "serve (all in one)" if alone else "router"


def processes(server: OwnServer, alone: bool) -> list[ProcessMemory]:
    return [memory_of(pid, alone) for pid in server.resident_bytes()]


def tensors_in(value: object) -> Iterator[tuple[int, int]]:
    """Address and bytes of every tensor within dataclasses, lists and tuples."""
    if hasattr(value, "data_ptr") and hasattr(value, "nbytes"):
        yield value.data_ptr(), value.nbytes
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name != "kv":
                yield from tensors_in(getattr(value, field.name))


def show_weights(model: str | None, quantization: str | None) -> None:
    """Load the model as a worker does, and print the bytes of its weights. For a process of its own."""
    from kvcache.memory.device import DeviceKV
    from serving.config import EngineConfig
    from serving.forward.choose import make_forward
    from serving.forward.cpu_forward import CpuForward
    from serving.loader.loading import load, resolve

    loaded = load(resolve(model), quantization=quantization)
    planes = DeviceKV(loaded.spec.kv_layers(loaded.dtype), 1, 32).planes
    limit = loaded.spec.max_position
    forward = make_forward(loaded, planes, EngineConfig(threads=1), limit, releases=True)
    held = forward.decoder if isinstance(forward, CpuForward) else list(loaded.model.parameters())
    print(sum(dict(tensors_in(held)).values()))


def parts(model: str | None, quantization: str | None) -> WorkerParts:
    """Raises subprocess.CalledProcessError where the model cannot be loaded."""
    anonymous = "; print(int(open('/proc/self/smaps_rollup').read().split('Anonymous:')[1].split()[0]) * 1024)"
    weights = f"from bench.memory import show_weights; show_weights({model!r}, {quantization!r})"
    programs = (weights, "import torch" + anonymous, "import deploy.cli, deploy.worker.process" + anonymous)
    told = []
    for program in programs:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        told.append(int(done.stdout.split()[-1]))
    return WorkerParts(*told)


async def load_for(url: str, seconds: float, concurrency: int) -> int:
    """Send requests, so many at a time, until the seconds are over; how many were answered. Raises ServerError."""
    client, drawn, answered = HttpClient(url, timeout=120.0), Random(0), 0
    end = time.monotonic() + seconds
    model = await first_model(client)

    async def some() -> None:
        nonlocal answered
        while time.monotonic() < end:
            prompt = [drawn.randrange(100, 40_000) for _ in range(drawn.choice(PROMPTS))]
            asked = {"model": model, "prompt": prompt, "max_tokens": drawn.choice(OUTPUTS), "ignore_eos": True}
            answer = await client.post("/v1/completions", orjson.dumps(asked | {"temperature": drawn.choice((0, 0.7))}))
            if answer.status != 200:
                raise ServerError(f"a request was answered {answer.status}: {answer.body[:200]!r}")
            answered += 1

    try:
        await asyncio.gather(*(some() for _ in range(concurrency)))
    finally:
        await client.close()
    return answered


async def measured(form: str, options: argparse.Namespace) -> tuple[list[ProcessMemory], list[ProcessMemory], int]:
    """The processes of a form after start and after load, and how many requests that was. Raises ServerError."""
    flags, workers = FORMS[form]
    given = [options.model] if options.model else []
    quantized = ["--quantization", options.quantization] if options.quantization else []
    own = ["--kv-cache-memory", options.kv, "--router-snapshot", "never", "--log-level", "warning"]
    async with AsyncExitStack() as stack:
        server = OwnServer([*given, *flags, *quantized, *own], workers=workers, log=options.log)
        await stack.enter_async_context(server)
        before = processes(server, not workers)
        answered = await load_for(server.url, 60 * options.minutes, options.concurrency)
        await server.wait_idle(30.0)
        return before, processes(server, not workers), answered


HEAD = ["process", "RSS", "own", "shared files", "PSS", "peak", "RSS after load", "own after load"]


def rows(before: Sequence[ProcessMemory], after: Sequence[ProcessMemory]) -> list[list[str]]:
    """A row for each process, in MB."""
    later = {one.name: one for one in after}
    found = []
    for one in before:
        then = later.get(one.name)
        grown = ["—", "—"] if then is None else [f"{then.resident / MB:.0f}", f"{then.anonymous / MB:.0f}"]
        found.append([*one.row(), *grown])
    return found


def part_rows(before: Sequence[ProcessMemory], known: WorkerParts) -> list[list[str]]:
    """What a worker's own memory after start is made of, in MB."""
    found = []
    for one in before:
        if one.name in WORKERS:
            rest = one.anonymous - known.weights - known.code
            sizes = (one.anonymous, known.weights, known.torch, known.code - known.torch, rest)
            over = (one.peak - known.weights) / MB
            found.append([one.name, *(f"{size / MB:.0f}" for size in sizes), f"{over:.0f}"])
    return found


PART_HEAD = ["worker", "own", "weights", "torch", "other code", "rest", "peak less weights"]


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *lines = ("| " + " | ".join(row) + " |" for row in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *lines, ""])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="of the servers (default: the demo model)")
    add("--quantization", choices=("int8",), help="as the servers' flag")
    add("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="of the server (all)")
    add("--minutes", type=float, default=3.0, help="of load on each form (3)")
    add("--concurrency", type=int, default=4, help="requests at a time (4)")
    add("--kv", default="300MB", metavar="BYTES", help="of KV of each worker (300MB)")
    add("--log", type=Path, default=Path("bench-memory.log"), help="of the servers")
    add("--write", type=Path, metavar="FILE", help="write the page of results there as well")
    return parser


async def run(options: argparse.Namespace) -> str:
    """The page; each table is printed as it is ready."""
    known = await asyncio.to_thread(parts, options.model, options.quantization)
    given = " ".join(sys.argv[1:])
    page = [
        "# Memory of each process",
        f"`python -m bench.memory {given}` at {commit()}; {os.cpu_count()} cores, load average"
        f" {os.getloadavg()[0]:.1f}. MB of 10⁶ bytes. KV ({options.kv} a worker) takes memory as blocks are used.",
    ]
    for form in options.forms:
        before, after, answered = await measured(form, options)
        tables = [HEAD, *rows(before, after)], [PART_HEAD, *part_rows(before, known)]
        for table in tables:
            print(aligned(table), end="\n\n", flush=True)
        about = f"After start, and after {options.minutes:g} minutes of load, {answered} requests."
        page += [f"## {form.capitalize()}", about, *map(markdown, tables)]
    return "\n\n".join(page).replace("\n\n\n", "\n\n")


def main() -> int:
    options = arguments().parse_args()
    try:
        page = asyncio.run(run(options))
    except (ServerError, ValueError, subprocess.CalledProcessError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    if options.write is not None:
        options.write.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
