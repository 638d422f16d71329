"""A served model measured by its clients: start, tokens, TTFT, TPOT, handoffs: `python -m bench.gpu_served FOLDER`.

It starts `millrace serve` over the folder, mixed or with prefill and decode apart, and writes each figure as it comes,
so that a measurement cut short keeps what there is. Times are those of the client's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bench.connection import HttpClient, TransportError
from bench.endpoint import Endpoint, RequestShape, ServerError, Target, first_model
from bench.load import Pace, Prepared, Run, Watch, run_load
from bench.own_server import OwnServer
from bench.sse import Outcome

HEARTBEAT = 0.25  # seconds
SETTLED_HEARTBEATS = 4  # without news: nothing more is on its way
QUIET = (
    *("--num-speculative-tokens", "0", "--no-enable-prefix-caching", "--router-snapshot", "never"),
    *("--heartbeat-interval", str(HEARTBEAT)),
)
ROLES = {"mixed": ("--mixed", "1"), "split": ("--prefill", "1", "--decode", "1")}
WORKERS = {"mixed": ("mixed-0",), "split": ("prefill-0", "decode-0")}
TEXTS, TEXT_TOKENS = 4, 48  # whose tokens are kept, and of each
COUNTED = {"bytes": "millrace:kv_received_bytes_total", "handoffs": "millrace:kv_handoffs_total"}
FIRST_TOKENS = 8  # of the prompts whose TTFT is measured: the second token waits for the handoff, the rest do not


@dataclass(slots=True)
class FiguresFile:
    """What has been found so far, written to `out` with every figure."""

    out: Path | None
    told: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        self.told[name] = value
        print(f"{name}: {json.dumps(value) if len(str(value)) < 300 else '…'}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.told, indent=1) + "\n")


@dataclass(slots=True)
class ServedBench:
    """A server that is ready, and requests to it of random prompts."""

    endpoint: Endpoint
    vocab: int
    drawn: random.Random

    def prompt(self, tokens: int) -> list[int]:
        return [self.drawn.randrange(self.vocab) for _ in range(tokens)]

    def requests(self, count: int, tokens: int, output: int) -> list[Prepared]:
        shape = self.endpoint.shape
        return [
            Prepared(body=shape.body(self.prompt(tokens), output), prompt_tokens=tokens, output_tokens=output)
            for _ in range(count)
        ]

    async def load(self, requests: Sequence[Prepared], concurrency: int) -> Run:
        """Closed loop. Raises ServerError when a request failed."""
        run = await run_load(self.endpoint, requests, Pace(concurrency=concurrency), Watch())
        failed = [outcome for outcome in run.outcomes if outcome.error is not None]
        if failed:
            raise ServerError(f"{len(failed)} of {run.planned} failed: {failed[0].error}: {failed[0].detail}")
        return run

    async def texts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Greedy tokens of prompts that every server is given, one after another. Raises ServerError."""
        drawn, found = random.Random(7), []
        for length in lengths:
            prompt = [drawn.randrange(self.vocab) for _ in range(length)]
            asked = {"prompt": prompt, "max_tokens": TEXT_TOKENS, "temperature": 0, "ignore_eos": True}
            body = orjson.dumps({"model": self.endpoint.shape.model, **asked, "return_token_ids": True})
            answer = await self.endpoint.client.post("/v1/completions", body)
            if answer.status != 200:
                raise ServerError(f"{answer.status}: {answer.message()}")
            found.append(list(orjson.loads(answer.body)["choices"][0]["token_ids"]))
        return found

    async def counted(self) -> dict[str, float]:
        """Bytes and handoffs that decode workers have taken in, once heartbeats have told of the last one."""
        before: dict[str, float] = {}
        while True:
            text = (await self.endpoint.client.get("/metrics")).body.decode()
            now = {name: total(text, metric) for name, metric in COUNTED.items()}
            if now == before:
                return now
            before = now
            await asyncio.sleep(SETTLED_HEARTBEATS * HEARTBEAT)


def total(text: str, metric: str) -> float:
    """The sum of a metric's series in a page of metrics."""
    lines = (line for line in text.splitlines() if line.startswith((metric + "{", metric + " ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items()}


def median_ms(values: Sequence[float]) -> float:
    return 1e3 * statistics.median(values)


def rhythm(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Milliseconds: TTFT, TPOT, and the median time between tokens, in which no prompt of another has a part."""
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    tpots = [tpot for outcome in outcomes if (tpot := outcome.tpot) is not None]
    return {
        "ttft_ms": median_ms([outcome.ttft for outcome in outcomes]),
        "tpot_ms": median_ms(tpots),
        "itl_ms": median_ms(gaps),
    }


def waited_ms(outcomes: Sequence[Outcome]) -> float:
    """Milliseconds that second tokens came later than third and further ones: what is seen of a handoff."""
    later = [gap for outcome in outcomes for gap in outcome.gaps[1:]]
    return max(0.0, median_ms([outcome.gaps[0] for outcome in outcomes if outcome.gaps]) - median_ms(later))


def compared(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many texts are equal, and where the first one differs that is not."""
    for number, (found, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if list(found) != list(wanted):
            pairs = zip(found, wanted, strict=False)
            at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
            equal = sum(list(a) == list(b) for a, b in zip(tokens, expected, strict=True))
            return {"equal": equal, "of": len(expected), "differs": f"text {number} from token {at} on"}
    return {"equal": len(expected), "of": len(expected), "differs": ""}


async def measure(options: argparse.Namespace, figures: FiguresFile) -> None:
    """Raises ServerError, TransportError."""
    flags = [str(options.folder), *ROLES[options.mode], "--device", options.device, *QUIET, *options.serve]
    began = time.perf_counter()
    server = OwnServer(flags, workers=WORKERS[options.mode], log=options.log, start_seconds=options.start_seconds)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        figures.add("ready_s", time.perf_counter() - began)
        client = HttpClient(server.url, timeout=options.start_seconds)
        stack.push_async_callback(client.close)
        shape = RequestShape(model=await first_model(client))
        endpoint = Endpoint(Target(name=options.mode, url=server.url), client, shape)
        vocab = json.loads((options.folder / "config.json").read_text())["vocab_size"] - 3  # without special tokens
        bench = ServedBench(endpoint, vocab, random.Random(0))
        await bench.load(bench.requests(1, 8, 1), 1)
        figures.add("first_answer_s", time.perf_counter() - began)
        if not options.only_start:
            await measure_server(bench, options, figures)
    if options.expect is not None and options.expect.is_file():
        figures.add("same_tokens", compared(figures.told["tokens"], json.loads(options.expect.read_text())["tokens"]))


async def measure_server(bench: ServedBench, options: argparse.Namespace, figures: FiguresFile) -> None:
    short, long = options.input_len, options.long_len
    figures.add("tokens", await bench.texts([short // 16, short, short // 2, long // 2][:TEXTS]))
    before, count = await bench.counted(), options.long_requests
    run = await bench.load(bench.requests(count, long, FIRST_TOKENS), 1)
    outcomes = run.outcomes
    alone = {"tokens": long, **rhythm(outcomes), "waited_ms": waited_ms(outcomes)}
    figures.add("long_prompts", alone)
    if options.mode == "split":
        await measure_handoffs(bench, options, figures, before)
    for concurrency in options.concurrency:
        requests = bench.requests(max(options.fewest, concurrency), short, options.output_len)
        run = await bench.load(requests, concurrency)
        tokens = sum(outcome.output_tokens for outcome in run.outcomes)
        found = {**rhythm(run.outcomes), "tokens_per_second": tokens / run.duration}
        figures.add(f"concurrency_{concurrency}", found)


async def measure_handoffs(
    bench: ServedBench, options: argparse.Namespace, figures: FiguresFile, before: dict[str, float]
) -> None:
    """Bytes of a handoff by the metrics, bytes a second of many in a row, and what streams beside them see."""
    count, long = options.long_requests, options.long_len
    grown = growth(before, await bench.counted())
    waited = figures.told["long_prompts"]["waited_ms"] / 1e3
    each = grown["bytes"] / max(grown["handoffs"], 1.0)
    figures.add("handoff", {**grown, "bytes_each": each, "exposed_bytes_per_second": each / max(waited, 1e-6)})
    before = await bench.counted()
    streams = bench.requests(options.beside, options.input_len, options.stream_len)
    prompts = bench.requests(2 * count, long, 2)
    decoding = asyncio.create_task(bench.load(streams, options.beside))
    prefilling = await bench.load(prompts, 2)
    run = await decoding
    grown = growth(before, await bench.counted())
    rate = (grown["bytes"] - each / long * options.input_len * len(streams)) / prefilling.duration
    beside = {**rhythm(run.outcomes), "streams": options.beside, "prompts": len(prompts), **grown}
    figures.add("during_handoffs", {**beside, "sustained_bytes_per_second": max(0.0, rate)})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.gpu_served", description=__doc__)
    add = made.add_argument
    add("folder", type=Path, help="the model")
    add("--mode", choices=ROLES, default="mixed", help="one worker, or prefill and decode apart (mixed)")
    add("--device", default="cuda", help="(cuda)")
    add("--serve", nargs=argparse.REMAINDER, default=[], help="flags of the server; all that follow are")
    add("--only-start", action="store_true", help="start, answer once, and stop")
    add("--concurrency", nargs="*", type=int, default=[1, 8, 64], help="(1 8 64)")
    add("--input-len", type=int, default=960, help="prompt tokens (960)")
    add("--output-len", type=int, default=128, help="output tokens (128)")
    add("--fewest", type=int, default=3, help="requests at each concurrency, at least (3)")
    add("--long-len", type=int, default=4096, help="tokens of the prompts whose TTFT is measured (4096)")
    add("--long-requests", type=int, default=6, help="how many of them, one at a time (6)")
    add("--beside", type=int, default=8, help="streams beside handoffs (8)")
    add("--stream-len", type=int, default=512, help="output tokens of each (512)")
    add("--start-seconds", type=float, default=300.0, help="until it is ready, at most (300)")
    add("--expect", type=Path, help="figures of another server, whose tokens are to be the same")
    add("--log", type=Path, default=Path("gpu-served.log"), help="of the server")
    add("--json", type=Path, help="write the figures there, too")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    figures = FiguresFile(options.json)
    try:
        asyncio.run(measure(options, figures))
    except (ServerError, TransportError, OSError) as error:
        print(f"gpu_served: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    same = figures.told.get("same_tokens")
    return 1 if same is not None and same["equal"] < same["of"] else 0


if __name__ == "__main__":
    sys.exit(main())
