"""Whether a tenant can tell, by time or by usage, that another has sent a prefix: interleaved probes, and two tests.

    python -m bench.tenant_probes [MODEL] [--probes 10000] [--serve-flags '--mixed 2 --kvcache 1']

Probes come in pairs of fresh random prompts. Of each pair the victim has just sent one, and in place of the other a
prompt that nobody asks for again; which comes first is drawn. The attacker then sends both, and notes the time to the
first token and `cached_tokens`. The kinds are compared by permutation within pairs (bench.paired_tests): of the mean
logarithm, and of Kolmogorov and Smirnov's distance. The control is the same with the victim as the attacker, and has to
differ: else the probes could not have told anything. Exit status 0: as it should be; 1: not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson

from bench.connection import HttpClient
from bench.endpoint import ServerError, first_model
from bench.own_server import OwnServer
from bench.paired_tests import PairedComparison, compare
from bench.report import aligned
from serving.api.keyring import PREFIX, KeyEntry, key_digest, write_keys

LEVEL = 0.01  # of a false alarm, over both tests
TOKEN_IDS = range(10, 300)  # that every vocabulary has
PROGRESS_LINES = 20  # of a whole run
WARM_UP = 20  # pairs that are not counted
KEYS = "MILLRACE_BENCH_KEYS"
FLAGS = "--prefill 1 --decode 1 --kvcache 1 --routing-policy prefix_aware"


@dataclass(slots=True)
class TimedAnswer:
    """Takes a streamed answer (a bench.connection.BodySink)."""

    first: float | None = None
    data: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes, now: float) -> None:
        self.first = now if self.first is None else self.first
        self.data += data

    def close(self, now: float) -> None: ...

    def cached_tokens(self) -> int:
        """As the last chunk's usage has it. Raises ServerError."""
        for line in reversed(self.data.split(b"\n")):
            if line.startswith(b"data: {") and (usage := orjson.loads(line[6:]).get("usage")):
                return int(usage["prompt_tokens_details"]["cached_tokens"])
        raise ServerError("an answer came without usage")


@dataclass(slots=True)
class ProbeTimes:
    """Seconds to the first token, and cached tokens, of prompts that had been sent and of such that had not."""

    sent: list[float] = field(default_factory=list)
    unsent: list[float] = field(default_factory=list)
    sent_cached: list[int] = field(default_factory=list)
    unsent_cached: list[int] = field(default_factory=list)


class Prober:
    """Sends prompts of random tokens, one after another."""

    def __init__(self, model: str, length: int, draw: random.Random):
        self._model = model
        self._length = length
        self._draw = draw

    def prompt(self) -> list[int]:
        return self._draw.choices(TOKEN_IDS, k=self._length)

    async def ask(self, client: HttpClient, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and cached tokens. Raises ServerError, TransportError."""
        asked = {"model": self._model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        body = orjson.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}})
        answer, began = TimedAnswer(), client.clock()
        response = await client.post("/v1/completions", body, answer)
        if response.status != 200 or answer.first is None:
            raise ServerError(f"a probe was answered with {response.status}: {response.message()}")
        return answer.first - began, answer.cached_tokens()

    async def pair(self, victim: HttpClient, attacker: HttpClient, into: ProbeTimes) -> None:
        """One of each kind, in an order that is drawn."""
        for was_sent in self._draw.sample([True, False], 2):
            probe = self.prompt()
            await self.ask(victim, probe if was_sent else self.prompt())
            seconds, cached = await self.ask(attacker, probe)
            (into.sent if was_sent else into.unsent).append(seconds)
            (into.sent_cached if was_sent else into.unsent_cached).append(cached)


async def measure(options: argparse.Namespace) -> tuple[ProbeTimes, ProbeTimes]:
    """Of another tenant, and of the same one. Raises ServerError, TransportError."""
    async with AsyncExitStack() as stack:
        url, keys = options.url, os.environ.get(KEYS, "").split(",")
        if url is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            given, keys = keys_flags(folder)
            flags = [*([options.model] if options.model else []), *shlex.split(options.serve_flags), *given]
            server = OwnServer([*flags, "--log-level", "error"], workers=options.workers, log=options.log)
            url = (await stack.enter_async_context(server)).url
        elif len(keys) != 2:
            raise ServerError(f"with --url, {KEYS} has to name two keys: the victim's, a comma, the attacker's")
        victim, attacker = (HttpClient(url, headers={"Authorization": f"Bearer {key}"}) for key in keys)
        stack.push_async_callback(victim.close)
        stack.push_async_callback(attacker.close)
        prober = Prober(await first_model(victim), options.prompt_tokens, random.Random(options.seed))
        other, same = ProbeTimes(), ProbeTimes()
        for _ in range(WARM_UP):
            await prober.pair(victim, attacker, ProbeTimes())
        pairs, every = options.probes // 2, max(1, options.probes // 2 // options.control)
        for number in range(pairs):
            if number % max(1, pairs // PROGRESS_LINES) == 0:
                print(f"{2 * number} of {2 * pairs} probes", file=sys.stderr, flush=True)
            await prober.pair(victim, attacker, other)
            if number % every == 0:
                await prober.pair(victim, victim, same)
        return other, same


def keys_flags(folder: Path) -> tuple[list[str], list[str]]:
    """Flags of a server with a key for each of two tenants, and the keys: the victim's and the attacker's."""
    pepper, entries, keys = secrets.token_hex(32), {}, []
    for key_id, tenant in (("victim", "victim"), ("attacker", "attacker")):
        secret = secrets.token_hex(24)
        entries[key_id] = KeyEntry(id=key_id, tenant=tenant, digest=key_digest(pepper.encode(), key_id, secret))
        keys.append(f"{PREFIX}-{key_id}-{secret}")
    (folder / "pepper").write_text(pepper)
    (folder / "keys.jsonl").write_bytes(write_keys(entries))
    return ["--api-keys-file", str(folder / "keys.jsonl"), "--key-pepper-file", str(folder / "pepper")], keys


def verdict(other: ProbeTimes, same: ProbeTimes, rounds: int, seed: int) -> tuple[str, bool]:
    """The table, and whether all is as it should be."""
    rows = [
        ["probes by", "pairs", "p of means", "p of KS", "KS", "AUC", "median sent - unsent", "cached, sent", "unsent"]
    ]
    found: list[PairedComparison] = []
    for name, times in (("another tenant", other), ("the same (control)", same)):
        made = compare(np.array(times.sent), np.array(times.unsent), rounds=rounds, seed=seed)
        found.append(made)
        shown = [f"{made.mean_p:.4f}", f"{made.ks_p:.4f}", f"{made.ks:.4f}", f"{made.auc:.4f}"]
        shown += [f"{1e6 * made.median_difference:+.0f} µs of {1e6 * np.median(times.unsent):.0f}"]
        cached = [f"{min(counts)} to {max(counts)}" for counts in (times.sent_cached, times.unsent_cached)]
        rows.append([name, f"{made.pairs}", *shown, *cached])
    told_by_time, told_by_usage = found[0].differ(LEVEL), max(other.sent_cached) != max(other.unsent_cached)
    works = found[1].differ(LEVEL) and min(same.sent_cached) > max(same.unsent_cached)
    lines = [aligned(rows)]
    lines.append(
        f"level {LEVEL} over both tests; {rounds} permutations within pairs, so no p below {1 / (rounds + 1):.1g}"
    )
    lines.append(f"another tenant's prefix is told by time: {told_by_time}; by usage: {told_by_usage}")
    lines.append(f"the probes could have told: {works}")
    return "\n".join(lines), works and not told_by_time and not told_by_usage


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tenant_probes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="of a server of ours (default: the demo model)")
    add("--probes", type=int, default=10_000, help="of the attacker, half of them of prompts that were sent (10000)")
    add("--control", type=int, default=200, help="pairs of the same tenant, spread over the run (200)")
    add("--prompt-tokens", type=int, default=256, help="of each prompt (256)")
    add("--rounds", type=int, default=9999, help="permutations (9999)")
    add("--seed", type=int, default=0, help="of prompts, orders and permutations (0)")
    add("--url", help=f"a server that runs already, with {KEYS}=victim's,attacker's; default: one of ours is started")
    add("--serve-flags", default=FLAGS, metavar="FLAGS", help=f"of a server of ours ({FLAGS})")
    add("--workers", nargs="*", default=["prefill-0", "decode-0"], help="of it that have to report first")
    add("--log", type=Path, default=Path("bench-tenants.log"), help="of a server of ours")
    return parser


def main() -> int:
    options = arguments().parse_args()
    try:
        other, same = asyncio.run(measure(options))
    except (ServerError, ValueError) as error:
        print(f"tenant_probes: {error}", file=sys.stderr)
        return 2
    told, well = verdict(other, same, options.rounds, options.seed)
    print(told)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
