"""`millrace serve` of this checkout as child processes to measure: started, waited for, watched and stopped.

It knows processes and three of the server's pages, and nothing of what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import orjson

from bench.connection import HttpClient, TransportError
from bench.endpoint import ServerError

START_SECONDS = 180.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.1
ROOT = Path(__file__).resolve().parents[1]
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")  # a second


class OwnServer:
    """One server on a free port of this host. Use as an async context manager; what it logs is in `log`.

    `workers` are the names of those that have to report before it counts as ready. A canary's tokens are not sent
    unless the flags say so: an idle server is to leave the cores to the one that is measured. `module` has `serve`.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        workers: Sequence[str],
        log: Path,
        start_seconds: float = START_SECONDS,
        module: str = "deploy.cli",
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        own = ("--host", "127.0.0.1", "--port", str(self.port), "--shutdown-timeout", "5")
        quiet = () if "--canary-interval" in flags else ("--canary-interval", "0")
        self.command = [sys.executable, "-m", module, "serve", *flags, *own, *quiet]
        self._workers = set(workers)
        self._start_seconds = start_seconds
        self._client = HttpClient(self.url, timeout=10.0)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> OwnServer:
        """Raises ServerError when it ends, or is not ready in time."""
        _stop_as_interrupted()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the measurement, which then stops it
            )
        try:
            await self._wait_ready(self._start_seconds)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to all of it when it has not gone in time."""
        await self._client.close()
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of its workers
        await process.wait()

    async def _wait_ready(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            if not self.running:
                break
            with contextlib.suppress(TransportError):
                if (await self._client.get("/health")).status == 200 and self._workers <= await self.reporting():
                    return
            await asyncio.sleep(POLL_SECONDS)
        told = self.log.read_text(errors="replace").strip().splitlines()
        last = told[-1] if told else "it said nothing"
        raise ServerError(f"a server did not come up ({last}); its log is {self.log}")

    async def reporting(self) -> set[str]:
        """Names of the workers that the router hears of. Raises TransportError."""
        text = (await self._client.get("/metrics")).body.decode()
        return set(re.findall(r'millrace:worker_draining\{engine="([^"]+)"', text))

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is held any more; False when something still is, or nobody answers."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(TransportError, orjson.JSONDecodeError):
                answer = await self._client.get("/audit")
                if answer.status == 200 and orjson.loads(answer.body).get("idle"):
                    return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    def resident_bytes(self) -> dict[int, int]:
        """Resident memory of the server and each process below it, by process id; shared pages count in each."""
        return {} if self._process is None else {pid: resident(pid) for pid in descendants(self._process.pid)}


def _stop_as_interrupted() -> None:
    """SIGTERM ends the measurement as Ctrl-C does, which stops its servers: they are sessions of their own."""
    with contextlib.suppress(ValueError):  # not the main thread: whoever has that decides
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(root: int) -> list[int]:
    """The process and all that come from it, as far as they run."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def resident(pid: int) -> int:
    """Bytes; 0 for a process that has gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """That a process has computed so far; 0 for one that has gone."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def commit() -> str:
    """The checkout's commit, with a `+` when files differ from it; empty where git says nothing."""
    try:
        asked = ["git", "describe", "--always", "--dirty=+", "--abbrev=9"]
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
