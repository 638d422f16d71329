"""What a router process of its own adds to TTFT on one host: `python -m bench.router_share [MODEL]`.

Two servers run side by side: one process with API, router and worker in it, and one whose worker is another process
that is reached over gRPC (`--mixed 1`). They are asked in turn, one request at a time, so that both meet the same
machine; the difference of the medians is the router's hop. What placing itself takes, among hundreds of workers, is
bench.routing's to say.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

from bench.report import aligned

FORMS = {"one process": [], "router + worker": ["--mixed", "1"]}
START_SECONDS = 180.0
WARM = 20  # requests that are not counted


class ServedForm:
    """`millrace serve` in one form, and a connection to it. Use as a context manager."""

    def __init__(self, form: str, model: str | None, port: int, options: list[str]):
        given = [model] if model is not None else []
        command = [sys.executable, "-m", "deploy.cli", "serve", *given, "--port", str(port), "--host", "127.0.0.1"]
        command += [*FORMS[form], "--canary-interval", "0", "--router-snapshot", "never", *options]
        self.command = command
        self.port = port
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def __enter__(self) -> ServedForm:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise RuntimeError(f"{' '.join(self.command)} does not start; run it by hand to see why")
            time.sleep(0.2)
        self.connection.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait(60)

    def _healthy(self) -> bool:
        asking = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            asking.request("GET", "/health")
            return asking.getresponse().status == 200
        except OSError:
            return False
        finally:
            asking.close()

    def first_token(self, prompt: list[int]) -> float:
        """Seconds from sending to the first event; the rest of the answer is read too."""
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
        began = time.perf_counter()
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = self.connection.getresponse()
        line = answer.readline()
        taken = time.perf_counter() - began
        if answer.status != 200 or not line.startswith(b"data: {"):
            raise RuntimeError(f"status {answer.status}: {line + answer.read()!r}")
        answer.read()
        return taken


def measure(asked: argparse.Namespace) -> Mapping[str, list[float]]:
    """TTFT by form, in seconds; each round asks both, in an order that changes."""
    draw = random.Random(asked.seed)
    one, two = (ServedForm(form, asked.model, asked.port + number, asked.options) for number, form in enumerate(FORMS))
    with one, two:
        servers = list(zip(FORMS, (one, two), strict=True))
        found: dict[str, list[float]] = {form: [] for form in FORMS}
        for number in range(WARM + asked.requests):
            for form, server in servers if number % 2 else reversed(servers):
                seconds = server.first_token([draw.randrange(3, asked.vocab) for _ in range(asked.input_len)])
                if number >= WARM:
                    found[form].append(seconds)
    return found


def show(found: Mapping[str, list[float]]) -> None:
    rows = [["TTFT, ms", "p10", "p50", "p90", "p99"]]
    for form, seconds in found.items():
        cuts = statistics.quantiles(seconds, n=100)
        rows.append([form, *(f"{1e3 * cuts[share - 1]:.2f}" for share in (10, 50, 90, 99))])
    print(aligned(rows))
    alone, apart = (statistics.median(seconds) for seconds in found.values())
    print(f"the router's hop: {1e3 * (apart - alone):.2f} ms of TTFT p50")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router_share", description=__doc__)
    parser.add_argument("model", nargs="?", help="what to serve (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--requests", type=int, default=300, help="requests of each form (default: 300)")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--vocab", type=int, default=380, help="token ids of prompts are below this (default: 380)")
    parser.add_argument("--port", type=int, default=8860, help="of the first server; the second takes the next")
    parser.add_argument("--seed", type=int, default=0, help="of prompts (default: 0)")
    parser.add_argument("--serve", type=shlex.split, default=[], dest="options", help="options of both servers")
    show(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
