"""What drafts by a model bring: `python -m bench.proposers --out FOLDER [--dtype float32] [--layers 6]`.

Servers of one model that differ in what drafts for them are asked the same prompts in turn, one request at a time, so
that other work on the host meets all of them alike; with one thread, the time of cores tells what such work does not
lengthen. Their texts are compared, and what was accepted is read from their metrics. It knows servers from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.connection import HttpClient
from bench.endpoint import Endpoint, RequestShape, Target, first_model
from bench.own_server import OwnServer, cpu_seconds
from bench.report import aligned
from bench.sse import Outcome
from serving.checkpoint.weights import destinations
from serving.loader.loading import load, resolve

PROMPTS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a miller and his donkey.",
    "List the planets of the solar system with one sentence about each.",
    "Write a Python function that returns the prime numbers below n, with comments.",
    "Summarise what a water mill does and where it was used.",
    "Repeat this sentence five times: the quick brown fox jumps over the lazy dog.",
)
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


@dataclass(slots=True)
class AskedServer:
    """What one server gave. Seconds a token, after the first."""

    own: OwnServer
    tpots: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds of cores a token, the prompt's among them
    texts: list[str] = field(default_factory=list)


def first_layers(model: str | None, layers: int, out: Path) -> Path:
    """A model's first layers with its embedding, last norm and head, as a folder: a draft that nobody has trained."""
    loaded = load(resolve(model), "float32")
    spec = loaded.spec
    kept = {
        name: value.detach()
        for name, value in loaded.model.named_parameters()
        if not name.startswith("layers.") or int(name.split(".")[1]) < layers
    }
    tensors = {}
    for name, parts in destinations(spec, kept).items():
        sizes = [len(kept[name]) if part.rows is None else part.rows for part in parts]
        for part, rows in zip(parts, torch.split(kept[name], sizes), strict=True):
            tensors[part.name] = rows.clone()
    if spec.tied_embeddings:
        tensors.pop("lm_head.weight", None)
    assert spec.architecture == "llama" and spec.rope is not None
    config = {
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": 1.0 / spec.rope.frequencies[1] ** (spec.head_dim / 2),
        "tie_word_embeddings": spec.tied_embeddings,
        "eos_token_id": list(spec.eos_token_ids),
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def variants(options: argparse.Namespace) -> dict[str, list[str]]:
    """Each server's own flags."""
    model = str(resolve(options.model))
    small = first_layers(options.model, options.layers, options.out / f"first-{options.layers}")

    def drafted(**config: object) -> list[str]:
        return ["--speculative-config", json.dumps({**config, "num_speculative_tokens": options.tokens})]

    return {
        "none": ["--num-speculative-tokens", "0"],
        "ngram": drafted(method="ngram"),
        "itself in INT8": drafted(method="draft_model", model=model, quantization="int8"),
        f"its first {options.layers} layers": drafted(method="draft_model", model=str(small)),
    }


async def ask(server: AskedServer, prompt: str, tokens: int) -> None:
    """One request, whose text and time a token are kept."""
    client = HttpClient(server.own.url, timeout=600.0)
    before = core_seconds(server.own)
    try:
        shape = RequestShape(model=await first_model(client), chat=True)
        outcome = Outcome(prompt_tokens=0, max_tokens=tokens)
        await Endpoint(Target(name="", url=server.own.url), client, shape).send(shape.body(prompt, tokens), outcome)
    finally:
        await client.close()
    assert outcome.error is None and outcome.first is not None and outcome.last is not None, outcome.detail
    server.tpots.append((outcome.last - outcome.first) / (outcome.output_tokens - 1))
    server.cpu.append((core_seconds(server.own) - before) / outcome.output_tokens)
    server.texts.append("".join(outcome.text))


def core_seconds(server: OwnServer) -> float:
    """What the server's processes have computed so far."""
    return sum(map(cpu_seconds, server.resident_bytes()))


async def counted(server: AskedServer) -> list[float]:
    """Drafts, drafted and accepted tokens so far."""
    client = HttpClient(server.own.url, timeout=10.0)
    try:
        page = (await client.get("/metrics")).body.decode()
    finally:
        await client.close()
    found = []
    for name in COUNTERS:
        value = re.search(rf"^millrace:spec_decode_num_{name}_total{{[^}}]*}} (\S+)$", page, re.MULTILINE)
        found.append(float(value[1]) if value is not None else 0.0)
    return found


async def measure(options: argparse.Namespace) -> None:
    flags = [str(resolve(options.model)), "--dtype", options.dtype, "--threads", str(options.threads)]
    async with AsyncExitStack() as stack:
        servers = {}
        asked = {name: own for name, own in variants(options).items() if name == "none" or options.only in name}
        for name, own in asked.items():
            log = options.out / f"{name.replace(' ', '-')}.log"
            started = await stack.enter_async_context(OwnServer([*flags, *own], workers=["mixed-0"], log=log))
            servers[name] = AskedServer(started)
        for turn in range(1 + options.rounds):
            if turn == 1:  # the first was to warm up, and for the servers to learn what pays
                for server in servers.values():
                    server.tpots.clear()
                    server.cpu.clear()
            for prompt in PROMPTS:
                for server in servers.values():
                    await ask(server, prompt, options.output)
        await asyncio.sleep(1.5)  # the counters come with a heartbeat
        print(table(servers, {name: await counted(server) for name, server in servers.items()}))


def table(servers: dict[str, AskedServer], counts: dict[str, list[float]]) -> str:
    plain = servers["none"]
    rows = [["drafts by", "TPOT ms", "min", "of none", "core ms a token", "of none", "drafted", "accepted", "texts"]]
    for name, server in servers.items():
        _, drafted, accepted = counts[name]
        tpot, cpu = (f"{1000 * statistics.median(one):.1f}" for one in (server.tpots, server.cpu))
        share = f"{accepted / drafted:.0%}" if drafted else "-"
        same = "the same" if server.texts == plain.texts else "OTHERS"
        times = [tpot, f"{1000 * min(server.tpots):.1f}", against(plain.tpots, server.tpots)]
        rows.append([name, *times, cpu, against(plain.cpu, server.cpu), f"{drafted:.0f}", share, same])
    return aligned(rows)


def against(plain: list[float], found: list[float]) -> str:
    """The median of what each request took of the same one's time without drafts."""
    return f"{statistics.median(b / a for a, b in zip(plain, found, strict=True)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4, help="drafted at a time")
    parser.add_argument("--layers", type=int, default=6, help="of the model, that draft in the last variant")
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="beside one to warm up")
    parser.add_argument("--only", default="", help="beside none, the variants with this in their names")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and the draft")
    options = parser.parse_args()
    began = time.monotonic()
    asyncio.run(measure(options))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
