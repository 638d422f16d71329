"""How long `millrace serve` takes to be ready, and what it takes, of this checkout and others, in turns.

    python -m scripts.start_seconds [--against FOLDER ...] [--turns 6] [--kill WORKER] MODEL [flags of serve]

It prints the median and every turn of each: seconds until `/health` says that the server is ready, CPU seconds that its
processes have taken by then, and what they hold (PSS: a page that several share counts once). With `--kill` also the
seconds from SIGKILL of that worker, such as prefill-0, until the router hears of it again.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from bench.memory import memory_of
from bench.own_server import ROOT, cpu_seconds, descendants, free_port
from bench.progress import say

LOOK_EVERY = 0.02  # seconds
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds until ready, seconds of CPU until then, MiB that are held, seconds until a killed worker was back."""

    ready: float
    cpu: float
    held: float
    back: float | None


def started(checkout: Path, arguments: Sequence[str], kill: str | None = None) -> Start:
    """One start. Raises RuntimeError when the server ends before it is ready, or has no such worker."""
    port = free_port()
    command = [sys.executable, "-m", "deploy.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    began = time.monotonic()
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(command, cwd=checkout, env=environ, stdout=log, stderr=log) as server,
    ):

        def until(condition: Callable[[], bool]) -> None:
            while not condition():
                if server.poll() is not None:
                    told = Path(log.name).read_text(errors="replace")
                    raise RuntimeError(f"the server of {checkout} ended with {server.returncode}\n{told}")
                time.sleep(LOOK_EVERY)

        try:
            until(lambda: is_ready(f"http://127.0.0.1:{port}/health"))
            ready, pids, back = time.monotonic() - began, descendants(server.pid), None
            cpu, held = sum(map(cpu_seconds, pids)), sum(memory_of(pid, alone=True).share for pid in pids) / MIB
            if kill is not None:
                until(lambda: comings(Path(log.name), kill) == 1)
                os.kill(process_of(kill, pids), signal.SIGKILL)
                killed = time.monotonic()
                until(lambda: comings(Path(log.name), kill) == 2)
                back = time.monotonic() - killed
            return Start(ready, cpu, held, back)
        finally:
            server.terminate()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, HTTPException, OSError):
        return False


def process_of(name: str, pids: Sequence[int]) -> int:
    """That of the worker of this name. Raises RuntimeError."""
    for pid in pids:
        with suppress(OSError):
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    raise RuntimeError(f"no process is {name}")


def comings(log: Path, name: str) -> int:
    """How often the router has told that a worker of this name is there."""
    return len(re.findall(rf" {re.escape(name)} \(\S+\) is here$", log.read_text(errors="replace"), re.MULTILINE))


def shown(what: str, unit: str, found: Sequence[float]) -> str:
    return f"{what} {statistics.median(found):.2f} {unit} ({', '.join(f'{each:.2f}' for each in found)})"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.start_seconds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="FOLDER", help="another checkout")
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="(6)")
    parser.add_argument("--kill", metavar="WORKER", help="once the server is ready")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of millrace serve: a model, and flags")
    given = parser.parse_args()
    if given.turns < 1:
        parser.error("--turns: at least 1")
    taken: dict[Path, list[Start]] = {ROOT: [], **{folder.resolve(): [] for folder in given.against}}
    for turn in range(given.turns):
        for checkout in list(taken)[:: -1 if turn % 2 else 1]:
            taken[checkout].append(started(checkout, given.arguments, given.kill))
            say(f"turn {turn + 1} of {given.turns}: {taken[checkout][-1].ready:.2f} s, {checkout}")
    for checkout, starts in taken.items():
        print(checkout)
        print(shown("  ready after", "s", [each.ready for each in starts]))
        if given.kill is not None:
            print(shown("  back after", "s", [each.back for each in starts if each.back is not None]))
        print(shown("  CPU", "s", [each.cpu for each in starts]))
        print(shown("  held", "MiB", [each.held for each in starts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
