"""`millrace autoscale`: its flags, the fleet that is only watched, and a whole run against a server, until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import orjson
import pytest

from deploy.admin import Server
from deploy.autoscale import HttpSource, WatchedFleet, add_arguments, limits_of, placed, watched
from deploy.autoscaler.actuator import ActuatorError, FleetWorker
from deploy.autoscaler.controller import AutoscaleController, Wiring
from deploy.autoscaler.limits import MOST_WORKERS, AutoscalerLimits, RoleLimits
from deploy.autoscaler.lock import FileLock
from serving.messages import Role
from tests.deploy.autoscaler.figures import offered
from tests.deploy.autoscaler.test_observation import WORKER, answer
from tests.flow.ports import free_port
from tests.house.source import ROOT

SHOWN = answer(1.0, offered(3)) | {"workers": [WORKER, {**WORKER, "name": "d", "role": "decode", "state": "draining"}]}


def parsed(*words: str) -> Any:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


class Shown(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = orjson.dumps(SHOWN)
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shown)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_defaults_are_those_of_the_limits() -> None:
    plain = AutoscalerLimits()
    found = limits_of(parsed())
    assert {name: value for name, value in asdict(found).items() if name != "roles"} == {
        name: value for name, value in asdict(plain).items() if name != "roles"
    }
    assert all(found.of(role) == plain.of(role) for role in Role)


def test_limits_come_from_flags() -> None:
    found = limits_of(
        parsed("--prefill", "2:5", "--decode", ":3", "--mixed", "2:", "--most-workers", "9", "--no-flips")
    )
    assert [found.of(role) for role in Role] == [RoleLimits(2, 5), RoleLimits(1, 3), RoleLimits(2, MOST_WORKERS)]
    assert (found.most_workers, found.flips) == (9, False)
    with pytest.raises(ValueError, match="flap"):
        limits_of(parsed("--scale-up", "0.3"))


@pytest.mark.parametrize("wrong", ["3", "0:2", "5:2", "a:b"])
def test_numbers_of_workers_are_checked(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--prefill", wrong)
    assert "MIN:MAX" in capsys.readouterr().err


async def test_a_watched_fleet_is_shown_and_not_changed(url: str) -> None:
    fleet = WatchedFleet(Server(url, None))
    assert await fleet.workers() == [FleetWorker("p", Role.PREFILL, "ready"), FleetWorker("d", Role.DECODE, "draining")]
    for change in (fleet.add(Role.DECODE), fleet.drain("p"), fleet.flip("p", Role.DECODE)):
        with pytest.raises(ActuatorError, match="--on"):
            await change


def test_a_dry_run_keeps_nobody_from_acting() -> None:
    server = Server("http://127.0.0.1:9", None)
    for words, alone in ((("--on", "router", "--dry-run"), True), ((), True), (("--on", "router"), False)):
        actuator, lock, dry_run = placed(parsed(*words), server)
        assert (isinstance(lock, FileLock), dry_run) == (alone, alone)
        assert (lock is actuator) != alone


async def test_it_serves_its_metrics_and_goes_on_without_a_router(url: str, tmp_path: Path) -> None:
    """Two turns with a router, then one without; then it is told to leave."""
    arguments = parsed("--lock-file", str(tmp_path / "lock"))
    server = Server(url, None)
    actuator, lock = watched(arguments, server)
    turns = 0

    async def sleep(seconds: float) -> None:
        nonlocal turns
        turns += 1
        if turns == 2:
            source.server = Server("http://127.0.0.1:9", None)
        if turns == 4:
            running.cancel()
            await asyncio.Event().wait()

    source = HttpSource(server)
    wiring = Wiring(source=source, actuator=actuator, lock=lock, clock=lambda: 0.0, sleep=sleep)
    controller = AutoscaleController(wiring, AutoscalerLimits(), dry_run=True)
    running = asyncio.create_task(controller.run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert controller.figures.turns == 4 and controller.figures.failures == 2
    assert not controller.health()[0]
    _, other = watched(arguments, server)
    assert await other.held(), "the lock was given back"
    await other.release()


def test_the_process_shows_metrics_logs_in_json_and_leaves_on_a_signal(url: str, tmp_path: Path) -> None:
    port = free_port()
    words = ["--url", url, "--metrics-port", str(port), "--log-format", "json", "--lock-file", str(tmp_path / "lock")]
    command = [sys.executable, "-m", "deploy.cli", "autoscale", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stderr is not None
        line = orjson.loads(process.stderr.readline())
        with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            text = page.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert line["role"] == "autoscaler" and line["dry_run"] is True and "d is draining" in line["reason"]
    assert "millrace:autoscaler_turns_total 1.0" in text
