"""A crowd of connections that want nothing good, against a server that has one client to serve meanwhile.

`python -m tests.flow.crowd` prints as a table what it does to that client, and to the server's memory and descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import httpx

from tests.flow.server import MillraceServer, wait_until
from tests.tiny import tiny_llama

SOURCES = 32  # addresses of loopback that the crowd comes from; the client to serve has another
OPENING = 256  # connections that are being opened at once
PAIRS = 16  # pairs of requests that run at once
PAIR_STAYS_S = 0.2
TICK_S = 0.2  # between two pieces of headers
# For the server: most of what memory its process gains is otherwise KV's, which has pages before requests write to it.
LITTLE_KV = ("--kv-cache-memory", "16MiB")
# Twenty connections of a crowd.
MIXTURE = ("silent", "kept", "slow", "silent", "endless", "kept", "silent", "slow", "pair", "half closed") * 2
MIXTURE = (*MIXTURE[:-1], "half body")
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: tiny\r\n"


def completion(tokens: int) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "stream": True}).encode()
    return HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body


FIRST = {
    "silent": b"",
    "kept": b"GET /live HTTP/1.1\r\nhost: tiny\r\n\r\n",
    "slow": HEAD + b"x-slow: ",
    "endless": HEAD + b"x-more: " + b"y" * 50_000 + b"\r\n",
    "half closed": HEAD,
    "half body": HEAD + b'content-length: 1000\r\n\r\n{"model":',
    "pair": completion(200) + completion(200),
}
NEXT = {"slow": b"y", "endless": b"x-more: " + b"y" * 50_000 + b"\r\n"}


class Hostile(asyncio.Protocol):
    """One connection of a kind of `MIXTURE`."""

    def __init__(self, kind: str, tally: Counter[str]):
        self.kind = kind
        self.tally = tally
        self.gone = asyncio.Event()
        self.answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.tally["opened"] += 1
        self.tally["open"] += 1
        self.tally["open at once"] = max(self.tally["open at once"], self.tally["open"])
        self.transport.write(FIRST[self.kind])
        if self.kind == "half closed":
            self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        if not self.answered:
            self.answered = True
            self.tally[data[9:12].decode("latin-1")] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.tally["open"] -= 1
        self.gone.set()

    def go_on(self) -> None:
        """The next piece, where there is one."""
        if self.kind in NEXT and not self.gone.is_set():
            self.transport.write(NEXT[self.kind])


async def crowd(port: int, count: int, seconds: float, kinds: Sequence[str]) -> Counter[str]:
    """Open so many, hold them for so long at most, and leave; what came of them, and how many were still open."""
    tally: Counter[str] = Counter()
    opening, pairs = asyncio.Semaphore(OPENING), asyncio.Semaphore(PAIRS)
    members: list[Hostile] = []
    loop = asyncio.get_running_loop()

    async def join(number: int, kind: str) -> Hostile | None:
        source = f"127.0.1.{1 + number % SOURCES}"
        async with opening:
            try:
                _, member = await loop.create_connection(
                    lambda: Hostile(kind, tally), "127.0.0.1", port, local_addr=(source, 0)
                )
            except OSError:
                tally["not opened"] += 1
                return None
        return member

    async def pair(number: int) -> None:
        async with pairs:
            member = await join(number, "pair")
            if member is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(member.gone.wait(), PAIR_STAYS_S)
                member.transport.abort()

    async def stay(number: int, kind: str) -> None:
        member = await join(number, kind)
        if member is not None:
            members.append(member)

    async def push() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for member in members:
                member.go_on()

    pushing = asyncio.create_task(push())
    chosen = list(islice(cycle(kinds), count))
    random.Random(count).shuffle(chosen)
    await asyncio.gather(*(pair(i) if kind == "pair" else stay(i, kind) for i, kind in enumerate(chosen)))
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(member.gone.wait() for member in members)), seconds)
    tally["open at the end"] = sum(not member.gone.is_set() for member in members)
    pushing.cancel()
    for member in members:
        member.transport.abort()
    return tally


@contextmanager
def attacking(
    port: int, count: int, seconds: float, kinds: Sequence[str], niceness: int
) -> Iterator[subprocess.Popen[str]]:
    """The crowd in a process of its own; at the lowest priority, 19, what it costs is what the server does for it."""
    command = [sys.executable, "-m", "tests.flow.crowd", "--attack", str(port), "--connections", str(count)]
    command += ["--seconds", str(seconds), "--kinds", *kinds]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@dataclass
class Served:
    """What the client got: seconds to its first tokens, and everything else that it should not have got."""

    first: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def until(self, server: MillraceServer, enough: Callable[[], Any], text: str | None = None) -> str:
        """Ask for the same text again and again, on new connections; the text."""
        body = {"model": "tiny", "prompt": [9, 8, 7], "max_tokens": 12, "temperature": 0, "stream": True}
        while True:
            began = time.perf_counter()
            try:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
                    lines = answer.iter_lines()
                    found = [line for line in lines if self._first(line, began)]
                    said = "".join(json.loads(line[6:])["choices"][0]["text"] for line in found)
                    text = said if text is None else text
                    if answer.status_code != 200 or said != text:
                        self.wrong.append(f"{answer.status_code}: {said!r}")
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
            self._new = True
            if enough():
                return text or ""

    _new: bool = True

    def _first(self, line: str, began: float) -> bool:
        event = line.startswith("data: {")
        if event and self._new:
            self.first.append(time.perf_counter() - began)
            self._new = False
        return event

    def percentile(self, share: float) -> float:
        """Milliseconds to the first token."""
        return 1000 * statistics.quantiles(self.first, n=100, method="inclusive")[round(100 * share) - 1]


@dataclass(frozen=True)
class Figures:
    """The server's process at one time."""

    descriptors: int
    resident: int  # bytes

    @staticmethod
    def of(server: MillraceServer) -> Figures:
        folder = Path(f"/proc/{server.process.pid}")
        resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Figures(len(list((folder / "fd").iterdir())), resident)


@dataclass
class Visit:
    """A crowd came and went."""

    before: Figures
    peak: Figures
    after: Figures
    crowd: Counter[str]
    served: Served
    ended: dict[str, float]


def visit(
    server: MillraceServer,
    count: int,
    seconds: float,
    text: str,
    kinds: Sequence[str] = MIXTURE,
    rest: float = 0.0,
    niceness: int = 0,
) -> Visit:
    """Let the crowd come while the client is served, and wait until the server holds nothing of it.

    After that it may rest for some seconds: it gives memory back then.
    """
    before, served = Figures.of(server), Served()
    most = [before]
    ended = counted(server)
    with attacking(server.port, count, seconds, kinds, niceness) as process:

        def over() -> bool:
            most.append(Figures.of(server))
            return process.poll() is not None

        served.until(server, over, text)
        assert process.stdout is not None
        tally = Counter(json.loads(process.stdout.read()))
    wait_until(lambda: Figures.of(server).descriptors <= before.descriptors + 4, 30, "descriptors have returned")
    server.wait_idle()
    time.sleep(rest)
    peak = Figures(max(f.descriptors for f in most), max(f.resident for f in most))
    now = counted(server)
    return Visit(before, peak, Figures.of(server), tally, served, {name: now[name] - ended[name] for name in now})


def counted(server: MillraceServer) -> dict[str, float]:
    reasons = ("connections", "address", "evicted", "silent", "header_timeout", "header_size", "header_count")
    reasons += ("pipelined", "body_pieces", "malformed", "keep_alive", "body_unread", "send_timeout")
    return {reason: server.metric("http_connections_ended_total", reason=reason) for reason in reasons}


def undisturbed(server: MillraceServer, requests: int) -> tuple[str, Served]:
    served = Served()
    return served.until(server, lambda: len(served.first) >= requests), served


def table(calm: Served, visits: list[Visit]) -> None:
    print("| | requests | wrong | TTFT p50 | p99 | descriptors | at most | after | resident | at most | after |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    print(f"| undisturbed | {len(calm.first)} | {len(calm.wrong)} | {calm.percentile(0.5):.0f} ms |", end="")
    print(f" {calm.percentile(0.99):.0f} ms | | | | | | |")
    for number, one in enumerate(visits, 1):
        cells = [f"crowd {number}", len(one.served.first), len(one.served.wrong)]
        cells += [f"{one.served.percentile(share):.0f} ms" for share in (0.5, 0.99)]
        cells += [one.before.descriptors, one.peak.descriptors, one.after.descriptors]
        cells += [f"{f.resident >> 20} MiB" for f in (one.before, one.peak, one.after)]
        print("| " + " | ".join(map(str, cells)) + " |")
    for number, one in enumerate(visits, 1):
        ended = {reason: int(count) for reason, count in one.ended.items() if count}
        print(f"\ncrowd {number}: {dict(one.crowd)}; ended by the server: {ended}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.flow.crowd")
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=15.0, help="for which they are held at most once all are open")
    parser.add_argument("--rest", type=float, default=7.0, help="seconds after each visit, before memory is looked at")
    parser.add_argument("--visits", type=int, default=2)
    parser.add_argument("--calm", type=int, default=200, help="requests before the first visit")
    parser.add_argument("--nice", type=int, default=19, help="of the crowd, whose own cost is not the server's")
    parser.add_argument("--kinds", nargs="+", choices=sorted(FIRST), default=MIXTURE, help="default: a mixture")
    given, flags = parser.parse_known_args()
    if given.attack:
        print(json.dumps(asyncio.run(crowd(given.attack, given.connections, given.seconds, given.kinds))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "tiny")
        started = (str(model), "--served-model-name", "tiny", *LITTLE_KV, *flags)
        with MillraceServer(*started, workers=("mixed-0",)) as server:
            text, calm = undisturbed(server, given.calm)
            crowds = (given.connections, given.seconds, text, given.kinds, given.rest, given.nice)
            table(calm, [visit(server, *crowds) for _ in range(given.visits)])


if __name__ == "__main__":
    main()
