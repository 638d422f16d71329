"""A measurement that is ended takes its servers with it: they are in sessions of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

MEASURES = """
import asyncio, sys
from pathlib import Path
from bench.own_server import OwnServer

async def measure():
    async with OwnServer([], workers=[], log=Path(sys.argv[1]), module="tests.fakes.served") as server:
        print(server._process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(measure())
"""
SECONDS = 30.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_ended_measurement_leaves_no_server(tmp_path: Path, interrupted: bool) -> None:
    command = [sys.executable, "-c", MEASURES, str(tmp_path / "log")]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as measuring:
        assert measuring.stdout is not None
        server = Path("/proc") / measuring.stdout.readline().strip()
        assert (server / "stat").exists(), measuring.communicate()[1]
        if interrupted:
            measuring.send_signal(signal.SIGINT)
        else:
            measuring.terminate()
        measuring.wait(SECONDS)
    assert measuring.returncode != 0 and not server.exists()
