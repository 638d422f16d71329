"""Brings deploy/compose up in real containers, kills each in turn under a request, and writes what happened.

    python -m scripts.containers --compose podman-compose --engine podman --out bench/results/DATE-compose.md

The image has to be there. It needs the right to kill processes of containers, and leaves no container running.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

FOLDER = Path(__file__).resolve().parent.parent / "deploy/compose"
SERVICES = ("kvcache", "prefill", "decode", "router")
UP_SECONDS, ANSWER_SECONDS, GRACE = 300.0, 300.0, "60"
STORY = "The miller opened the gate, and the race carried the water to the wheel. "
MANY = 60  # times the sentence above is told in a prompt that takes a while to compute
QUESTION = "What is gravity? Answer in one sentence."
AGAIN_SECONDS = 0.2  # between a connection that broke and the next
TOKENS, SOME = 120, 60  # of an answer; characters that are there when somebody is killed


@dataclass
class Answer:
    """A streamed chat, as it arrives in a thread."""

    text: str = ""
    placement: str = ""
    error: str = ""
    broken: list[str] = field(default_factory=list)  # what its connections broke off with; it went on after each
    first: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    gaps: list[float] = field(default_factory=list)
    last: float = 0.0  # when the last chunk came

    @property
    def waits(self) -> str:
        """Seconds until the first token, and the longest between two later ones."""
        first, rest = sum(self.gaps[:2]), self.gaps[2:]  # the very first chunk has the role alone
        return f"{first:.1f} s | {max(rest, default=0.0):.1f} s"


class Deployment:
    """The Compose project, driven by its command line, and its API at `url`."""

    def __init__(self, compose: Sequence[str], engine: str, url: str):
        self.compose = (*compose, "-f", str(FOLDER / "compose.yaml"))
        self.engine = engine
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=ANSWER_SECONDS)

    def run(self, *arguments: str) -> None:
        """The Compose command with these arguments; it ends the program where that fails, with what it said."""
        done = subprocess.run([*self.compose, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(arguments)} failed: {done.stdout}{done.stderr}")

    def inspect(self, name: str, form: str) -> str:
        command = [self.engine, "inspect", "--format", form, name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def containers(self, service: str) -> list[str]:
        command = [self.engine, "ps", "--all", "--format", "{{.Names}}"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return [name for name in names if service in name.replace("-", "_").split("_") and "millrace" in name]

    def process(self, service: str) -> int:
        """Of its container, 0 while there is none."""
        (name,) = self.containers(service)
        return int(self.inspect(name, "{{.State.Pid}}"))

    def kill(self, service: str) -> int:
        """SIGKILL to its process, as when it crashes: the engine has not been asked, and starts it again."""
        process = self.process(service)
        if process <= 0:  # which to the kernel is a group of processes, ours among them
            raise SystemExit(f"{service} has no process to kill")
        os.kill(process, signal.SIGKILL)
        return process

    def healthy(self, service: str) -> bool:
        """The image's own health check says so; podman without systemd runs it only when asked."""
        (name,) = self.containers(service)
        command = ["podman", "healthcheck", "run", name]
        if self.engine != "podman":
            return self.inspect(name, "{{.State.Health.Status}}") == "healthy"
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def health(self) -> bool:
        try:
            return self.client.get("/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def overview(self) -> dict[str, Any]:
        """What /v1/workers says; nothing while nobody answers."""
        try:
            found: dict[str, Any] = self.client.get("/v1/workers", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return {"workers": [], "requests_running": 0}
        return found

    def roles(self) -> list[str]:
        """Of the workers that live."""
        return sorted(one["role"] for one in self.overview()["workers"] if one["state"] == "live")

    def running(self) -> int:
        """Requests that the router has placed."""
        return int(self.overview()["requests_running"])

    def whole(self) -> bool:
        """A prefill and a decode worker live, and so does the pool's node."""
        return self.health() and self.roles() == ["decode", "prefill"] and self.metric("pool_capacity_bytes") > 0

    def metric(self, name: str) -> float:
        try:
            lines = self.client.get("/metrics", timeout=5).text.splitlines()
        except httpx.HTTPError:
            return 0.0
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"millrace:{name}{{"))

    def ask(self, prompt: str, tokens: int = TOKENS) -> Answer:
        """A streamed chat of so many tokens, begun in a thread of its own."""
        answer = Answer()
        threading.Thread(target=self._stream, args=(prompt, tokens, answer), daemon=True).start()
        return answer

    def _stream(self, prompt: str, tokens: int, answer: Answer) -> None:
        """To its end, over as many connections as it takes; each asks for what follows the last event that came."""
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True}
        body |= {"max_tokens": tokens, "ignore_eos": True}
        headers, over = {"idempotency-key": str(uuid4())}, time.monotonic() + ANSWER_SECONDS
        answer.last = time.monotonic()
        while not self._read(body, headers, answer):
            if time.monotonic() > over:
                answer.error = f"not whole after {ANSWER_SECONDS:g} s"
                break
            time.sleep(AGAIN_SECONDS)
        answer.ended.set()
        answer.first.set()

    def _read(self, body: dict[str, Any], headers: dict[str, str], answer: Answer) -> bool:
        """What one connection brings; False if there is more to be asked for."""
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as got:
                if got.status_code == 503:  # the router is back and its workers are not known to it yet
                    return False
                answer.placement = got.headers.get("x-millrace-placement", "")
                mark = ""
                for line in got.iter_lines():
                    if line == "data: [DONE]":
                        return True
                    if line.startswith("id: "):
                        mark = line[4:]
                    elif line.startswith("data: "):
                        now = time.monotonic()
                        answer.gaps.append(now - answer.last)
                        answer.last = now
                        _take(json.loads(line[6:]), answer)
                        headers |= {"last-event-id": mark} if mark else {}  # not before its event is here
                        mark = ""
                answer.error = answer.error or f"the stream ended early (status {got.status_code})"
        except httpx.ConnectError:
            return False
        except httpx.HTTPError as error:
            answer.broken.append(type(error).__name__)
            return False
        return True


def _take(chunk: dict[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]["message"]
    for choice in chunk.get("choices", ()):
        text = choice["delta"].get("content")
        if text:
            answer.text += text
            answer.first.set()


def wait(condition: Callable[[], Any], what: str, seconds: float = UP_SECONDS) -> float:
    """Poll until it holds; seconds that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def finished(answer: Answer) -> Answer:
    wait(answer.ended.is_set, "the answer ends", ANSWER_SECONDS)
    return answer


def kill_under_load(site: Deployment, service: str, prompt: str) -> str:
    """One row of the table: what a request saw when the service was killed under it.

    The same is asked again at the end, with nobody killed: the text has to be the same.
    """
    wait(site.whole, "all are there")
    answer = site.ask(prompt)
    if service == "prefill":  # it has nothing to do with a request whose first token is there
        wait(lambda: site.running() or answer.ended.is_set(), "the prompt is computed")
        moment = "after the first token" if answer.first.is_set() else "while it computed the prompt"
    else:
        wait(lambda: len(answer.text) > SOME or answer.ended.is_set(), "the answer has begun")
        moment = "after the answer's end" if answer.ended.is_set() else "in mid-answer"
    killed = site.kill(service)
    began = time.monotonic()
    wait(lambda: site.process(service) not in (killed, 0) and site.healthy(service), f"{service} is back")
    back = time.monotonic() - began
    finished(answer)
    wait(site.whole, "all are there again")
    broke = f"went on after {', '.join(answer.broken)}: " if answer.broken else ""
    told = answer.error or ("the same text" if answer.text == finished(site.ask(prompt)).text else "ANOTHER TEXT")
    return f"| {service} | {moment} | {broke}{told} | {answer.waits} | {back:.1f} s |"


def prove(site: Deployment, image: str) -> list[str]:
    """Everything, as lines of a page."""
    size = int(site.inspect(image, "{{.Size}}")) / 1e6
    began = time.monotonic()
    site.run("up", "-d")
    up = time.monotonic() - began
    wait(site.health, "the API is healthy")
    ready = time.monotonic() - began
    first = finished(site.ask(QUESTION))
    answered = time.monotonic() - began
    ill = [service for service in SERVICES if not site.healthy(service)]
    stored = wait(lambda: site.metric("pool_blocks") > 0, "the pool has blocks")
    rows = [kill_under_load(site, service, f"{number}. {STORY * MANY}") for number, service in enumerate(SERVICES)]
    site.run("up", "-d", "--scale", "prefill=3")
    scaled = wait(lambda: site.roles().count("prefill") == 3, "there are three prefill workers")
    last = finished(site.ask(QUESTION))
    return [
        f"- Image `{image}`: {size:.0f} MB.",
        f"- `up -d` returned after {up:.1f} s, `/health` was 200 after {ready:.1f} s, and the first streamed answer, "
        f"of {TOKENS} tokens, had ended after {answered:.1f} s{f': {first.error}' if first.error else ''}.",
        f"- It was placed as `{first.placement}`; the pool's node had its blocks {stored:.1f} s later.",
        f"- `up -d --scale prefill=3`: three prefill workers {scaled:.1f} s after it returned; the same question "
        f"{'had the same answer' if last.text == first.text and not last.error else 'had ANOTHER ANSWER'}.",
        f"- The image's health check fails in {ill}." if ill else "- The image's health check passes in all four.",
        "",
        "| killed | when | the request | first token after | longest pause later | healthy again after |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}"


def give(title: str, head: str, lines: Sequence[str], out: Path | None) -> None:
    """Print a page, and write it where it is asked for."""
    page = "\n".join([f"# {title}", "", head, "", *lines, ""])
    print(page)
    if out is not None:
        out.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compose", default="docker compose", help="the Compose command (default: %(default)s)")
    parser.add_argument("--engine", default="docker", help="docker or podman (default: %(default)s)")
    parser.add_argument("--image", default="localhost/millrace:cpu-demo", help="default: %(default)s")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the API is published")
    parser.add_argument("--out", type=Path, help="the page to write; default: standard output")
    parsed = parser.parse_args()
    site = Deployment(shlex.split(parsed.compose), parsed.engine, parsed.url)
    try:
        lines = prove(site, parsed.image)
    finally:
        subprocess.run([*site.compose, "down", "--remove-orphans", "-t", GRACE], capture_output=True, check=False)
    version = subprocess.run([parsed.engine, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    head = f"{machine()}; {version}. `python -m scripts.containers`."
    give("Compose in real containers", head, lines, parsed.out)


if __name__ == "__main__":
    main()
