"""What a streamed token costs in CPU between the engine's output and the socket: `python -m bench.tokencost`.

Starts servers of its own, embedded and split, and drives each with short and with long answers: the difference is the
tokens' alone, without what a request costs. Threads that compute are told from the rest by the CPU time they use.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
COMPUTES = 0.3  # a thread that uses this share of the time in steps computes
FORMS = {"embedded": [], "split": ["--prefill", "1", "--decode", "1"]}


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds by (process, thread), seconds in steps by engine, and tokens so far."""

    threads: dict[tuple[int, int], float]
    steps: float
    tokens: float


class ServeProcess:
    """`millrace serve` and the processes it starts."""

    def __init__(self, form: str, port: int, options: list[str]):
        command = [sys.executable, "-m", "deploy.cli", "serve", "--port", str(port), *FORMS[form], *options]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(command)} does not start; run it by hand to see why")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return bool(self.get("/health"))
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            text: str = reply.read().decode()
            return text

    def read(self) -> Reading:
        time.sleep(2.5)  # until heartbeats have told the router all of it
        text = self.get("/metrics")
        return Reading(
            threads={(pid, tid): used for pid in family(self.process.pid) for tid, used in cpu_seconds(pid).items()},
            steps=total(text, "millrace:engine_step_seconds_total"),
            tokens=total(text, "millrace:generation_tokens_total"),
        )

    def load(self, requests: int, concurrency: int, length: int, seed: int) -> None:
        command = [sys.executable, "-m", "deploy.cli", "bench", "--url", self.url, "--input-len", "64"]
        command += ["--output-len", str(length), "--concurrency", str(concurrency), "--num-requests", str(requests)]
        command += ["--seed", str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def family(pid: int) -> list[int]:
    """The process and all it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in family(int(child)))]


def cpu_seconds(pid: int) -> dict[int, float]:
    """By thread."""
    found = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        fields = stat.read_text().rpartition(")")[2].split()
        found[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / TICK
    return found


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def used(before: Reading, after: Reading) -> tuple[dict[int, float], float]:
    """CPU seconds by process without the threads that compute, and the tokens that came meanwhile."""
    limit = COMPUTES * (after.steps - before.steps)
    by_process: dict[int, float] = {}
    for (pid, tid), seconds in after.threads.items():
        spent = seconds - before.threads.get((pid, tid), 0.0)
        by_process[pid] = by_process.get(pid, 0.0) + (spent if spent < limit else 0.0)
    return by_process, after.tokens - before.tokens


def measure(form: str, asked: argparse.Namespace) -> None:
    server = ServeProcess(form, asked.port, asked.options)
    try:
        server.load(asked.concurrency, asked.concurrency, 32, 0)
        rounds = []
        for seed in range(1, asked.rounds + 1):
            readings = [server.read()]
            for length in (asked.short, asked.long):
                server.load(asked.requests, asked.concurrency, length, seed)
                readings.append(server.read())
            (short, few), (long, many) = used(*readings[:2]), used(*readings[1:])
            rounds.append({pid: (long[pid] - short[pid]) / (many - few) * 1e6 for pid in long})
        processes = family(server.process.pid)
        each = [statistics.median(found[pid] for found in rounds) for pid in processes]
    finally:
        server.close()
    whole = statistics.median(sum(found.values()) for found in rounds)
    parts = " + ".join(f"{cost:.0f}" for cost in each)
    print(f"{form:9} {whole:6.1f} us a token   (processes: {parts}; rounds {[round(sum(f.values())) for f in rounds]})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tokencost", description=__doc__)
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time (default: 32)")
    parser.add_argument("--requests", type=int, default=64, help="requests of each length and round (default: 64)")
    parser.add_argument("--short", type=int, default=16, help="tokens of a short answer (default: 16)")
    parser.add_argument("--long", type=int, default=272, help="tokens of a long answer (default: 272)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is shown (default: 3)")
    parser.add_argument("--port", type=int, default=8850, help="port to serve at (default: 8850)")
    parser.add_argument("--form", choices=tuple(FORMS), help="only this one")
    default = ["--quantization", "int8", "--num-speculative-tokens", "0"]
    parser.add_argument("options", nargs="*", default=default, help=f"options of the server (default: {default})")
    asked = parser.parse_args()
    for form in FORMS if asked.form is None else [asked.form]:
        measure(form, asked)


if __name__ == "__main__":
    main()
