"""Seconds from the start of `millrace serve` until it is ready, of this checkout and others, in turns.

    python -m scripts.start_seconds [--against FOLDER ...] [--turns 6] MODEL [flags of serve]

It prints the median and every turn of each. `/health` says when a server is ready.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from bench.own_server import ROOT, free_port
from bench.progress import say

LOOK_EVERY = 0.02  # seconds


def seconds_to_ready(checkout: Path, arguments: Sequence[str]) -> float:
    """One start. Raises RuntimeError when the server ends before it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "deploy.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    began = time.monotonic()
    with subprocess.Popen(command, cwd=checkout, env=environ, stdout=subprocess.DEVNULL) as server:
        try:
            while not is_ready(f"http://127.0.0.1:{port}/health"):
                if server.poll() is not None:
                    raise RuntimeError(f"the server of {checkout} ended with {server.returncode}")
                time.sleep(LOOK_EVERY)
            return time.monotonic() - began
        finally:
            server.terminate()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, HTTPException, OSError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.start_seconds", description=__doc__)
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="FOLDER", help="another checkout")
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="(6)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of millrace serve: a model, and flags")
    given = parser.parse_args()
    if given.turns < 1:
        parser.error("--turns: at least 1")
    taken: dict[Path, list[float]] = {ROOT: [], **{folder.resolve(): [] for folder in given.against}}
    for turn in range(given.turns):
        for checkout in list(taken)[:: -1 if turn % 2 else 1]:
            taken[checkout].append(seconds_to_ready(checkout, ["--log-level", "error", *given.arguments]))
            say(f"turn {turn + 1} of {given.turns}: {taken[checkout][-1]:.2f} s, {checkout}")
    for checkout, seconds in taken.items():
        print(f"{statistics.median(seconds):.2f} s  {checkout}  ({', '.join(f'{each:.2f}' for each in seconds)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
