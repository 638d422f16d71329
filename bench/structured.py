"""Structured output measured on servers that run: `python -m bench.structured --url NAME=URL [--url …]`.

Random JSON schemas are asked for, each answer is judged by `jsonschema`, which had no part in making it, and servers
are compared text by text. `--tpot` measures instead what constrained rows cost those beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from bench.connection import HttpClient, Response
from bench.report import aligned

WORDS = ("name", "age", "city", "river", "mill", "wheel", "price", "count", "tags", "kind", "state", "note", "color")
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(red|green) [a-z]{2,6}$", "^[a-f]{0,9}$")
DEPTH = 3
LONG = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "price": {"type": "number"},
            "kind": {"enum": ["river", "mill", "wheel"]},
            "open": {"type": "boolean"},
        },
        "required": ["name", "age", "price", "kind", "open"],
        "additionalProperties": False,
    },
}


def random_schema(draw: random.Random, depth: int = DEPTH) -> dict[str, Any]:
    """A schema whose every output ends: strings, arrays and numbers have a longest, and nesting a deepest."""
    kinds = ["string", "pattern", "integer", "number", "boolean", "enum", "const", "null"]
    kind = draw.choice([*kinds, *(["object", "array", "anyOf"] * 3 if depth else [])])
    if kind == "object":
        names = draw.sample(WORDS, draw.randint(1, 5))
        required = [name for name in names if draw.random() < 0.8]
        properties = {name: random_schema(draw, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = draw.randint(0, 2)
        items = random_schema(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(2, 3))]}
    if kind == "string":
        return {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 24)}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind == "integer":
        least = draw.randint(-1000, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 5000)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": draw.randint(1, 100), "multipleOf": 0.25}
    if kind == "enum":
        return {"enum": draw.sample([*WORDS, 1, 2.5, None, True], draw.randint(1, 5))}
    if kind == "const":
        return {"const": draw.choice(WORDS)}
    return {"type": kind}


@dataclass(frozen=True, slots=True)
class Answer:
    """`verdict`: valid, invalid, unfinished, or the status of a refusal."""

    verdict: str
    text: str


async def ask(client: HttpClient, number: int, schema: dict[str, Any], max_tokens: int) -> Answer:
    body = {
        "messages": [{"role": "user", "content": f"Number {number}: an example of {json.dumps(schema)}, please."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "max_tokens": max_tokens,
    }
    answer: Response = await client.post("/v1/chat/completions", orjson.dumps(body))
    if answer.status != 200:
        return Answer(f"{answer.status}: {answer.message()}", "")
    (choice,) = orjson.loads(answer.body)["choices"]
    text: str = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        return Answer("unfinished", text)
    return Answer("valid" if follows(schema, text) else "invalid", text)


def follows(schema: dict[str, Any], text: str) -> bool:
    from jsonschema import Draft202012Validator

    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


async def judge(client: HttpClient, schemas: Sequence[dict[str, Any]], senders: int, max_tokens: int) -> list[Answer]:
    room = asyncio.Semaphore(senders)

    async def one(number: int) -> Answer:
        async with room:
            return await ask(client, number, schemas[number], max_tokens)

    return await asyncio.gather(*(one(number) for number in range(len(schemas))))


async def tpot(client: HttpClient, number: int, constrained: bool, tokens: int) -> float:
    """Milliseconds a token after the first, of one stream that lasts to its last token."""
    form = {"guided_json": LONG} if constrained else {"ignore_eos": True}
    prompt = f"Stream {number}: a list of rivers, with their mills, their wheels and their prices, as JSON."
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **form}
    arrivals = _Arrivals()
    answer = await client.post("/v1/completions", orjson.dumps(body), arrivals)
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {answer.message()}")
    return 1e3 * (arrivals.last - arrivals.first) / (tokens - 1)


class _Arrivals:
    """When the first and the last bytes came (bench.connection.BodySink)."""

    first = last = 0.0

    def feed(self, data: bytes, now: float) -> None:
        self.first = self.first or now
        if b'"text"' in data:
            self.last = now

    def close(self, now: float) -> None:
        """Nothing is left to be read."""


async def compare(options: argparse.Namespace, clients: dict[str, HttpClient]) -> int:
    schemas = [random_schema(random.Random(options.seed + number)) for number in range(options.count)]
    answers: dict[str, list[Answer]] = {}
    for name, client in clients.items():
        began = time.monotonic()
        answers[name] = await judge(client, schemas, options.concurrency, options.max_tokens)
        counts = Counter(answer.verdict for answer in answers[name])
        print(f"{name}: {dict(counts.most_common())} of {len(schemas)} in {time.monotonic() - began:.0f} s", flush=True)
        for number, answer in enumerate(answers[name]):
            if answer.verdict != "valid":
                print(f"  {answer.verdict}: {json.dumps(schemas[number])} → {answer.text[:200]!r}")
    first, *others = answers.values()
    for name, answered in zip(list(answers)[1:], others, strict=True):
        same = sum(one.text == two.text for one, two in zip(first, answered, strict=True))
        print(f"{name}: {same} of {len(schemas)} texts equal to {next(iter(answers))}'s")
    return int(any(answer.verdict != "valid" for found in answers.values() for answer in found))


async def cost(options: argparse.Namespace, clients: dict[str, HttpClient]) -> int:
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.repeat):
        for name, client in clients.items():
            for half in (False, True):
                streams = [tpot(client, n, half and n % 2 == 0, options.tokens) for n in range(options.concurrency)]
                found.setdefault((name, half), []).append(statistics.mean(await asyncio.gather(*streams)))
    rows = [["server", "TPOT, ms", "with half the rows constrained", "ratio"]]
    for name in clients:
        plain, beside = (statistics.median(found[name, mixed]) for mixed in (False, True))
        rows.append([name, f"{plain:.2f}", f"{beside:.2f}", f"{beside / plain:.3f}"])
    print(aligned(rows))
    return 0


async def measure(options: argparse.Namespace) -> int:
    clients = {}
    for given in options.url or ["http://127.0.0.1:8000"]:
        name, _, url = given.rpartition("=")
        clients[name or url] = HttpClient(url, timeout=600.0)
    return await (cost if options.tpot else compare)(options, clients)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--url", action="append", metavar="[NAME=]URL", help="a server; several are compared")
    parser.add_argument("--count", type=int, default=1000, help="schemas (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of schemas (default: 0)")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time (default: 32)")
    parser.add_argument("--max-tokens", type=int, default=1000, help="of an answer (default: 1000)")
    parser.add_argument("--tpot", action="store_true", help="measure what constrained rows cost")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens a stream, with --tpot (default: 64)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds, with --tpot (default: 5)")
    sys.exit(asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
