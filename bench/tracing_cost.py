"""What traces cost: the same requests to servers that record none, a share or all of them, in turn.

    python -m bench.tracing_cost [MODEL] [--rounds 20] [--requests 20] [--write FILE]

Servers with `--trace-sample-ratio` 0, 0.1 and 1, exporting to a file, run beside one without traces. A round sends each
the same number of requests, in an order that turns from round to round; a second server without traces shows what is
noise. Ratios are those to the first one's, of one round, so that both meet the same machine; told are their medians and
quartiles: of the seconds a request takes, and of the CPU seconds that all the server's processes use for it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from bench.connection import HttpClient
from bench.endpoint import ServerError, first_model
from bench.own_server import OwnServer
from bench.report import aligned
from bench.tokencost import cpu_seconds

OFF, AGAIN = "off", "off, again"
RATIOS = ("0", "0.1", "1")
FLAGS = "--prefill 1 --decode 1"
WARM = 10  # requests to each server that are not counted


@dataclass(slots=True)
class ServedSide:
    """A server, a client of it, and what each round's request took: seconds, and CPU seconds."""

    server: OwnServer
    client: HttpClient
    spans: Path
    body: bytes = b""
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    async def ask(self, count: int, concurrency: int) -> None:
        """Raises ServerError, TransportError."""

        async def some(number: int) -> None:
            for _ in range(number):
                answer = await self.client.post("/v1/completions", self.body)
                if answer.status != 200:
                    raise ServerError(f"{answer.status}: {answer.body[:200]!r}")

        await asyncio.gather(*(some(count // concurrency) for _ in range(concurrency)))

    async def round(self, count: int, concurrency: int) -> None:
        cpu, began = self.cpu_seconds(), time.perf_counter()
        await self.ask(count, concurrency)
        self.seconds.append((time.perf_counter() - began) / count)
        self.cpu.append((self.cpu_seconds() - cpu) / count)

    def cpu_seconds(self) -> float:
        return sum(sum(cpu_seconds(pid).values()) for pid in self.server.resident_bytes())

    def recorded(self) -> int:
        return len(self.spans.read_bytes().splitlines()) if self.spans.exists() else 0


def body(model: str, tokens: int) -> bytes:
    """A greedy completion of exactly so many tokens."""
    asked = {"model": model, "prompt": list(range(10, 74)), "max_tokens": tokens}
    return orjson.dumps({**asked, "ignore_eos": True, "temperature": 0})


async def started(stack: AsyncExitStack, name: str, options: argparse.Namespace, folder: Path) -> ServedSide:
    """Raises ServerError."""
    spans = folder / f"{name}.jsonl"
    traced = [] if name in (OFF, AGAIN) else ["--otlp-traces-endpoint", f"file://{spans}", "--trace-sample-ratio", name]
    given = [options.model] if options.model else []
    flags = [*given, *shlex.split(options.serve_flags), "--router-snapshot", "never", "--log-level", "error", *traced]
    server = await stack.enter_async_context(OwnServer(flags, workers=options.workers, log=options.log))
    client = HttpClient(server.url)
    stack.push_async_callback(client.close)
    side = ServedSide(server, client, spans)
    model = await first_model(client)
    side.body = body(model, options.tokens)
    await side.ask(WARM, 1)
    return side


async def measure(options: argparse.Namespace) -> Mapping[str, ServedSide]:
    """All sides, after all rounds; those that trace have exported everything."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        names = (OFF, *RATIOS, AGAIN)
        sides = {name: await started(stack, name, options, folder) for name in names}
        for number in range(options.rounds):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn])[:: 1 if number % 2 else -1]:
                await sides[name].round(options.requests, options.concurrency)
        for side in sides.values():
            await side.server.stop()
        counts = {name: side.recorded() for name, side in sides.items()}
        if counts["0"] or not counts["1"]:
            raise ServerError(f"spans recorded at 0: {counts['0']}, at 1: {counts['1']}: this measured something else")
        return sides


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(sides: Mapping[str, ServedSide]) -> list[list[str]]:
    """A row for each side."""
    base = sides[OFF]
    rows = [["traces", "ms a request", "ratio (quartiles)", "CPU ms a request", "ratio (quartiles)"]]
    for name, side in sides.items():
        shown = []
        for own, against in ((side.seconds, base.seconds), (side.cpu, base.cpu)):
            shown.append(f"{1e3 * statistics.median(own):.2f}")
            shown.append(quartiles([one / other for one, other in zip(own, against, strict=True)]))
        rows.append([name if name in (OFF, AGAIN) else f"ratio {name}", *shown])
    return rows


def report(rows: Sequence[Sequence[str]], options: argparse.Namespace, load: str) -> str:
    """The page of bench/results."""
    head, *lines = ("| " + " | ".join(row) + " |" for row in rows)
    ruler = "|" + "---|" * len(rows[0])
    about = (
        f"{options.rounds} rounds of {options.requests} requests to each server, {options.concurrency} at a time, 64"
        f" prompt tokens and {options.tokens} output tokens each; `{options.serve_flags}`; spans go to a file. Ratios"
        f" are those to the first server without traces in the same round; the second one shows what is noise."
        f" {os.cpu_count()} cores, load averages {load} before and after."
    )
    numbers = (f"--{name} {getattr(options, name)}" for name in ("rounds", "requests", "concurrency", "tokens"))
    given = ["MODEL", *numbers, f"--serve-flags {shlex.quote(options.serve_flags)}"]
    command = "    python -m bench.tracing_cost " + " ".join(given)
    return "\n".join(["# What traces cost", "", about, "", command, "", head, ruler, *lines, ""])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tracing_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="of the servers (default: the demo model)")
    add("--rounds", type=int, default=20, help="of all servers (20)")
    add("--requests", type=int, default=20, help="a round, to each server; a multiple of --concurrency (20)")
    add("--concurrency", type=int, default=1, help="requests at a time (1)")
    add("--tokens", type=int, default=16, help="of each output (16)")
    add("--serve-flags", default=FLAGS, metavar="FLAGS", help=f"of every server ({FLAGS})")
    add("--workers", nargs="*", default=["prefill-0", "decode-0"], help="of each that have to report first")
    add("--log", type=Path, default=Path("bench-tracing.log"), help="of the servers")
    add("--write", type=Path, metavar="FILE", help="write the page of results there as well")
    return parser


def main() -> int:
    options = arguments().parse_args()
    load = f"{os.getloadavg()[0]:.1f}"
    try:
        sides = asyncio.run(measure(options))
    except (ServerError, ValueError) as error:
        print(f"tracing_cost: {error}", file=sys.stderr)
        return 2
    rows = table(sides)
    print(aligned(rows))
    if options.write is not None:
        options.write.write_text(report(rows, options, f"{load} and {os.getloadavg()[0]:.1f}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
