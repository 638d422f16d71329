"""A real millrace server as child processes, and what a test may do to it: ask, watch, freeze, kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from tests.fakes.awake import Awake
from tests.fakes.forks import Running, started
from tests.fakes.stopping import harm, stop
from tests.flow.ports import free_port

REPOSITORY = str(Path(__file__).resolve().parents[2])
START_SECONDS = 90.0  # a loaded machine starts five Python processes slowly
IDLE_SECONDS = 15.0  # and looks at what they hold now and then
OFTEN, OFTEN_SECONDS, SELDOM = 0.02, 5.0, 0.1  # between looks: they take the cores from what is waited for
KV_MEMORY = {"MILLRACE_KV_CACHE_MEMORY": "128MiB"}  # an idle worker has pages found for all of it, or 512 MiB


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until the condition holds; its value. Fails the test when time is up, but for that of a standstill."""
    with Awake() as awake:
        began = time.monotonic()
        while awake.seconds(began) < seconds:
            value = condition()
            if value:
                return value
            time.sleep(OFTEN if awake.seconds(began) < OFTEN_SECONDS else SELDOM)
    raise AssertionError(f"not within {seconds} s: {what}")


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """A metric's samples in what /metrics answers: labels and value."""
    found = re.findall(rf"^millrace:{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in found]


def start_millrace(*arguments: str, log: IO[str], environ: dict[str, str] | None = None) -> Running:
    """The `millrace` of this checkout as a child process that logs into a file."""
    told = {**KV_MEMORY, **os.environ, "PYTHONPATH": REPOSITORY, **(environ or {})}
    return started("deploy.cli", arguments, told, log)


def end(process: Running, seconds: float = 60.0) -> int:
    """SIGTERM, and SIGKILL to one that stays; the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


class Asking:
    """What a test asks of a router's HTTP door at `url`; the workers named report to it once all is ready."""

    def __init__(self, url: str, workers: Sequence[str] = ()):
        self.url = url
        self.worker_names = list(workers)

    def running(self) -> None:
        """Fails the test where the processes cannot come up any more."""

    def log(self) -> str:
        """What they have logged."""
        return ""

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and body; status 0 while nobody listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError):
            return 0, b""

    def wait_ready(self) -> None:
        """Every worker reports and /health is 200."""

        def ready() -> bool:
            self.running()
            return self.get("/health")[0] == 200 and set(self.worker_names) <= set(self.reporting())

        wait_until(ready, START_SECONDS, f"the server is ready; its log:\n{self.log()}")

    def audit(self) -> dict[str, Any]:
        status, body = self.get("/audit")
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def wait_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Nothing is held anywhere, and nothing leaked."""
        last: dict[str, Any] = {}

        def idle() -> bool:
            last.update(self.audit())
            return bool(last["idle"])

        try:
            wait_until(idle, seconds, "idle")
        except AssertionError:
            raise AssertionError(f"still held after {seconds} s: {last}") from None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 when there is none."""
        status, body = self.get("/metrics")
        assert status == 200, f"/metrics answered {status}"
        wanted = labels.items()
        return sum(value for found, value in samples(body.decode(), name) if wanted <= found.items())

    def reporting(self) -> list[str]:
        """Names of the workers the router knows."""
        text = self.get("/metrics")[1].decode()
        return re.findall(r'millrace:worker_draining\{engine="([^"]+)"', text)


class MillraceServer(Asking):
    """`millrace serve` with these arguments, on a port of its own. Use as a context manager."""

    def __init__(self, *arguments: str, workers: Sequence[str] = (), environ: dict[str, str] | None = None):
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}", workers)
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log", prefix="millrace-", delete=False)  # noqa: SIM115
        given = [*arguments, "--port", str(self.port)]
        if "--canary-interval" not in arguments:  # tests count what workers do
            given += ["--canary-interval", "0"]
        if "--router-snapshot" not in arguments:
            given += ["--router-snapshot", "never"]
        self.process = start_millrace("serve", *given, log=self._log, environ=environ)

    def __enter__(self) -> MillraceServer:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        code = end(self.process)
        self._log.close()
        return code

    def running(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")

    def log(self) -> str:
        return Path(self._log.name).read_text()

    # ---- doing harm --------------------------------------------------------------------------------------------

    def worker_pid(self, name: str) -> int:
        """The process of the worker of this name, which may be about to be started again."""
        found: int = wait_until(lambda: self._process_of(name), 60.0, f"worker {name} has a process")
        return found

    def _process_of(self, name: str) -> int | None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except (OSError, IndexError):
                    continue
                if parent == self.process.pid and name.encode() in command:
                    return int(entry.name)
        return None

    def signal_worker(self, name: str, number: signal.Signals) -> None:
        harm(self.worker_pid(name), number)

    def stop_worker(self, name: str) -> None:
        """It does nothing from now on, and takes nothing in."""
        stop(self.worker_pid(name))
