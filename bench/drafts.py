"""What drafts bring on real prompts: `python -m bench.drafts --model FOLDER --out FOLDER [--serve-flags '...']`.

Two servers of one model, one of which drafts, are asked the same chats, code and summaries in turns, 1, 8 and 32 at a
time, greedily and at temperature 0.7 with a seed of each request's own, so that both must say the same. Answers are of
different lengths: in step with one another, requests would never meet another one's prompt, but with drafts they do.
Prompts are made out of Python's standard library. It knows servers from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from bench.connection import HttpClient
from bench.endpoint import Endpoint, RequestShape, ServerError, Target, first_model
from bench.load import Pace, Prepared, Watch, run_load
from bench.own_server import OwnServer
from bench.quality import code, text
from bench.report import aligned

QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a miller and his donkey.",
    "List the planets of the solar system with one sentence about each.",
    "What should I see in Rome in two days?",
    "How do I bake bread without yeast?",
    "Write a polite letter that asks a landlord to repair a window.",
    "Explain how a bicycle stays upright.",
    "What is the difference between weather and climate?",
    "Give me five ideas for a birthday party of a ten-year-old.",
    "Tell me about the life of bees.",
    "How does a refrigerator work?",
    "What makes a good friend?",
)
COPY = "Write this code once more, with a comment above each line."
SUMMARISE = "Summarise the text above in three sentences."
PASSAGE = 1200  # characters of a source that a prompt quotes
GOLDEN = 0.618034  # its multiples fill the unit interval evenly
LEAST_REQUESTS = 12  # of a cell and turn
CONCURRENCIES = (1, 8, 32)
TEMPERATURES = (0.0, 0.7)


def passages(source: str, count: int) -> list[str]:
    """Equal pieces at equal distances, each from the beginning of a line."""
    step = (len(source) - PASSAGE) // count
    starts = [source.find("\n", number * step) + 1 for number in range(count)]
    return [source[start : start + PASSAGE] for start in starts]


def prompts(kind: str) -> list[str]:
    """Twelve prompts of one kind: questions, code to write again with comments, prose to summarise."""
    count = len(QUESTIONS)
    if kind == "chat":
        return list(QUESTIONS)
    if kind == "code":
        return [f"{piece}\n\n{COPY}" for piece in passages(code(), count)]
    return [f"{piece}\n\n{SUMMARISE}" for piece in passages(text(), count)]


def length(number: int, mean: int) -> int:
    """Tokens of a request's answer: from half of `mean` to one and a half, all equally often, in a fixed order."""
    return round(mean * (0.5 + (number * GOLDEN) % 1.0))


KINDS = ("chat", "code", "summaries")


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """What a pair of figures is of."""

    concurrency: int
    temperature: float
    kind: str

    def requests(self) -> int:
        """A few times what goes on at once: few of them run while the load ebbs."""
        return LEAST_REQUESTS if self.concurrency == 1 else max(3 * LEAST_REQUESTS, 5 * self.concurrency // 2)


@dataclass(slots=True)
class ComparedServer:
    """One server, and what it gave in each cell: seconds a token after the first, and texts in the order of asking."""

    name: str
    endpoint: Endpoint
    tpots: dict[Cell, list[float]] = field(default_factory=dict)
    texts: dict[Cell, list[str]] = field(default_factory=dict)

    async def ask(self, cell: Cell, output: int, *, counted: bool = True) -> None:
        """Raises ServerError where a request fails."""
        asked = prompts(cell.kind)
        bodies = []
        for number in range(cell.requests()):
            shape = replace(self.endpoint.shape, temperature=cell.temperature, extra={"seed": number})
            tokens = length(number, output)
            body = shape.body(asked[number % len(asked)], tokens)
            bodies.append(Prepared(body=body, prompt_tokens=0, output_tokens=tokens))
        run = await run_load(self.endpoint, bodies, Pace(concurrency=cell.concurrency), Watch())
        for outcome in run.outcomes:
            if outcome.error is not None:
                raise ServerError(f"{self.name}: {outcome.error} {outcome.detail}; see its log")
        if counted:
            self.tpots.setdefault(cell, []).extend(outcome.tpot for outcome in run.outcomes if outcome.tpot is not None)
            self.texts.setdefault(cell, []).extend("".join(outcome.text) for outcome in run.outcomes)


def cells(kinds: Sequence[str], concurrencies: Sequence[int]) -> list[Cell]:
    return [Cell(*each) for each in product(concurrencies, TEMPERATURES, kinds)]


async def measure(options: argparse.Namespace) -> int:
    shared = ["--model", options.model, "--no-enable-prefix-caching", *shlex.split(options.serve_flags)]
    flags = {"without": ["--num-speculative-tokens", "0"], "with": shlex.split(options.draft_flags)}
    asked = cells(options.kinds, options.concurrency)
    async with AsyncExitStack() as stack:
        servers = []
        for name, own in flags.items():
            started = await stack.enter_async_context(
                OwnServer([*shared, *own], workers=["mixed-0"], log=options.out / f"{name}.log")
            )
            client = HttpClient(started.url, timeout=600.0)
            stack.push_async_callback(client.close)
            shape = RequestShape(model=await first_model(client), chat=True)
            servers.append(ComparedServer(name, Endpoint(Target(name=name, url=started.url), client, shape)))
        for server in servers:  # to warm up, and to learn what pays
            for cell in cells(options.kinds, (8,)):
                await server.ask(cell, options.output, counted=False)
        for turn in range(options.rounds):
            for cell in asked:
                for server in servers if turn % 2 == 0 else servers[::-1]:
                    await server.ask(cell, options.output)
                said = f"round {turn + 1} of {options.rounds}: {cell}: {ratio(cell, *servers):.2f}"
                print(said, file=sys.stderr, flush=True)
    without, drafting = servers
    print(table(asked, without, drafting))
    (options.out / "drafts.json").write_text(figures(asked, without, drafting), encoding="utf-8")
    return 0 if without.texts == drafting.texts else 1


def ratio(cell: Cell, without: ComparedServer, drafting: ComparedServer) -> float:
    """Of the median TPOT without drafts."""
    return statistics.median(drafting.tpots[cell]) / statistics.median(without.tpots[cell])


def table(asked: Sequence[Cell], without: ComparedServer, drafting: ComparedServer) -> str:
    """Median TPOT without drafts and with, ms, and their ratio, a line for each concurrency and temperature."""
    kinds = list(dict.fromkeys(cell.kind for cell in asked))
    lines = [["at a time", "temperature", *kinds, "texts"]]
    for concurrency, temperature in dict.fromkeys((cell.concurrency, cell.temperature) for cell in asked):
        row = [cell for cell in asked if (cell.concurrency, cell.temperature) == (concurrency, temperature)]
        shown = [
            f"{_ms(without.tpots[cell])} -> {_ms(drafting.tpots[cell])}: {ratio(cell, without, drafting):.2f}"
            for cell in row
        ]
        pairs = [pair for cell in row for pair in zip(without.texts[cell], drafting.texts[cell], strict=True)]
        same = sum(first == second for first, second in pairs)
        lines.append([str(concurrency), f"{temperature:g}", *shown, f"{same} of {len(pairs)} the same"])
    return aligned(lines)


def figures(asked: Sequence[Cell], *servers: ComparedServer) -> str:
    found = [
        {"cell": [cell.concurrency, cell.temperature, cell.kind], "server": server.name, "tpots": server.tpots[cell]}
        for cell in asked
        for server in servers
    ]
    return json.dumps(found, indent=1)


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or file")
    parser.add_argument("--serve-flags", default="", help="of both servers")
    parser.add_argument("--draft-flags", default="", help="of the one that drafts (default: as it drafts by itself)")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES, help="requests at a time")
    parser.add_argument("--output", type=int, default=80, help="tokens of an answer, in the mean")
    parser.add_argument("--rounds", type=int, default=2, help="their order changes from one to the next")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
