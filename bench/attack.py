"""What a client notices of an attack: its TTFT while others send the worst bodies there are, or long prompts.

    python -m bench.attack [--serve-flags '--mixed 1'] [--seconds 30] [--rounds 3] [--url URL --api-key KEY]

One client asks for a few tokens again and again. Phases take turns in one sitting: nobody else, then an attack by
connections that send without pause. The attackers are one process at the lowest priority, so that what they cost is
what the server does for them. A probe asks for `GET /live` meanwhile: what it waits is the server's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.attack_bodies import AttackBody, long_prompts, small_bodies, worst_bodies
from bench.connection import HttpClient, TransportError
from bench.endpoint import Endpoint, RequestShape, ServerError, Target, first_model
from bench.own_server import OwnServer
from bench.report import aligned
from bench.sse import Outcome

PROBE_SECONDS = 0.02
ATTACKS = ("bodies", "small", "prompts")
KEYS = ("sk-client", "sk-attacker")  # of a server of ours, where each has its own


@dataclass(slots=True)
class Phase:
    """What the client saw of one kind of phase, all rounds together. Seconds."""

    first: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)  # that the attackers got


@dataclass(frozen=True, kw_only=True, slots=True)
class Sitting:
    """Where to send, and for how long."""

    url: str
    endpoint: Endpoint
    probe: HttpClient
    options: argparse.Namespace
    attacker_key: str


async def attack(url: str, bodies: Sequence[AttackBody], connections: int, key: str, only: float) -> dict[str, int]:
    """Send the bodies in turn over so many connections for `only` seconds; how many answers of each status came."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = HttpClient(url, headers=headers, timeout=120.0)
    answers: Counter[str] = Counter()

    async def one(number: int) -> None:
        for body in itertools.islice(itertools.cycle(bodies), number, None):
            try:
                answer = await client.post(body.path, body.body)
                answers[f"{answer.status}"] += 1
            except TransportError as error:
                answers[error.kind] += 1

    senders = [asyncio.create_task(one(number)) for number in range(connections)]
    await asyncio.wait(senders, timeout=only)
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
    await client.close()
    return dict(answers)


@asynccontextmanager
async def attacking(sitting: Sitting, kind: str, answers: Counter[str]) -> AsyncIterator[None]:
    """The attackers, in a process of their own at the lowest priority."""
    options = sitting.options
    command = [sys.executable, "-m", "bench.attack", "--attack", kind, "--url", sitting.url]
    command += ["--connections", str(options.connections), "--seconds", str(options.seconds)]
    command += ["--prompt-tokens", str(options.prompt_tokens), "--only", *options.only]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "MILLRACE_BENCH_KEY": sitting.attacker_key},
    )
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        assert process.stdout is not None
        await process.stdout.readline()  # its bodies are written
        yield
        answers.update(json.loads(await process.stdout.read()))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def phase(sitting: Sitting, kind: str | None, seen: Phase) -> None:
    """One phase: with an attack of this kind, or with none."""
    if kind is None:
        await _watch(sitting, seen)
        return
    async with attacking(sitting, kind, seen.answers):
        await asyncio.sleep(min(1.0, sitting.options.seconds / 10))  # it has begun
        await _watch(sitting, seen)


async def _watch(sitting: Sitting, seen: Phase) -> None:
    probing = asyncio.create_task(_probe(sitting.probe, seen.lags))
    try:
        until = time.monotonic() + 0.8 * sitting.options.seconds
        for number in itertools.count():
            if time.monotonic() > until:
                return
            prompt = [1000 + (number * 7919 + j * 31) % 40_000 for j in range(sitting.options.input_len)]
            outcome = Outcome(prompt_tokens=len(prompt), max_tokens=4)
            body = sitting.endpoint.shape.body(prompt, 4)
            await sitting.endpoint.send(body + b" " * sitting.options.padding, outcome)
            if outcome.error is None:
                seen.first.append(outcome.ttft)
            else:
                seen.wrong.append(f"{outcome.error}: {outcome.detail}")
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)


async def _probe(client: HttpClient, lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await client.get("/live")
        lags.append(time.perf_counter() - began)
        await asyncio.sleep(PROBE_SECONDS)


def markdown(phases: Mapping[str, Phase]) -> str:
    """A row for each kind of phase, and how its TTFT compares with that of the calm ones."""
    calm = phases["nobody else"]
    rows = [["beside it", "requests", "failed", "TTFT p50", "p99", "ratio p50", "p99", "/live p50", "p99", "most"]]
    for name, seen in phases.items():
        if len(seen.first) < 2 or len(seen.lags) < 2:
            rows.append([name, str(len(seen.first)), str(len(seen.wrong)), *(["—"] * 7)])
            continue
        cells = [f"{1e3 * percentile(seen.first, share):.0f} ms" for share in (0.5, 0.99)]
        cells += [f"{percentile(seen.first, share) / percentile(calm.first, share):.2f}" for share in (0.5, 0.99)]
        cells += [f"{1e3 * value:.1f} ms" for value in (*(percentile(seen.lags, s) for s in (0.5, 0.99)),)]
        rows.append([name, str(len(seen.first)), str(len(seen.wrong)), *cells, f"{1e3 * max(seen.lags):.0f} ms"])
    told = [f"{name}: attackers got {dict(seen.answers)}" for name, seen in phases.items() if seen.answers]
    told += [f"{name}: {Counter(seen.wrong).most_common(3)}" for name, seen in phases.items() if seen.wrong]
    return "\n".join([aligned(rows), *told])


def percentile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(1000 * share) - 1]


async def measure(options: argparse.Namespace) -> Mapping[str, Phase]:
    """All rounds. Raises ServerError."""
    own_keys = options.url is None and options.keys
    async with AsyncExitStack() as stack:
        url, key, attacker = options.url, options.api_key, options.attacker_key
        if url is None:
            key, attacker = KEYS if own_keys else ("", "")
            flags = [*shlex.split(options.serve_flags), "--log-level", "error"]
            flags += ["--api-key", ",".join(KEYS)] if own_keys else []
            server = OwnServer(flags, workers=(), log=options.log)
            url = (await stack.enter_async_context(server)).url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client, probe = (HttpClient(url, headers=headers, timeout=120.0) for _ in range(2))
        stack.push_async_callback(client.close)
        stack.push_async_callback(probe.close)
        shape = RequestShape(model=await first_model(client))
        endpoint = Endpoint(Target(name="server", url=url), client, shape)
        sitting = Sitting(url=url, endpoint=endpoint, probe=probe, options=options, attacker_key=attacker)
        phases = {"nobody else": Phase(), **{kind: Phase() for kind in options.attacks}}
        await phase(sitting, None, Phase())  # warms up
        for _ in range(options.rounds):
            for kind in options.attacks:
                await phase(sitting, None, phases["nobody else"])
                await phase(sitting, kind, phases[kind])
        return phases


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", help="a server that runs already; default: one of ours is started")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of a server of ours")
    add("--keys", action="store_true", help="client and attackers each have an API key, on a server of ours")
    add("--api-key", default="", help="the client's, with --url")
    add("--attacker-key", default=os.environ.get("MILLRACE_BENCH_KEY", ""), help="the attackers', with --url")
    add(
        "--attacks",
        nargs="+",
        choices=ATTACKS,
        default=["bodies"],
        help="the worst; as small ones; long prompts (bodies)",
    )
    add("--only", nargs="*", default=[], metavar="NAME", help="of the worst bodies")
    add("--connections", type=int, default=8, help="of the attackers (8)")
    add("--prompt-tokens", type=int, default=1500, help="of each long prompt (1500)")
    add("--input-len", type=int, default=64, help="tokens of the client's prompts (64)")
    add("--padding", type=int, default=0, metavar="BYTES", help="in the client's bodies, which costs little (0)")
    add("--seconds", type=float, default=20.0, metavar="S", help="of each phase (20)")
    add("--rounds", type=int, default=3, help="of phases (3)")
    add("--log", type=Path, default=Path("bench-attack.log"), help="of the server")
    add("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    return parser


def chosen(options: argparse.Namespace) -> list[AttackBody]:
    if options.attack == "prompts":
        return long_prompts(options.prompt_tokens, 256)
    made = small_bodies() if options.attack == "small" else worst_bodies()
    return [body for body in made if not options.only or body.name in options.only]


def main() -> None:
    options = arguments().parse_args()
    if options.attack:
        bodies = chosen(options)
        print("ready", flush=True)
        told = attack(options.url, bodies, options.connections, options.attacker_key, options.seconds)
        print(json.dumps(asyncio.run(told)))
        return
    try:
        print(markdown(asyncio.run(measure(options))))
    except ServerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
