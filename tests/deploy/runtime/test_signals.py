"""A process that is told to leave while its model loads, in a thread that nobody can stop, leaves at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.fakes.awake import Awake
from tests.fakes.stopping import harm
from tests.tiny import tiny_llama

pytestmark = pytest.mark.thorough

LOADING = """
import sys, time
from deploy import cli, serve
from deploy.worker import model_cache

def load(*given):
    print("loads", flush=True)
    time.sleep(600)

model_cache.load_from = load
if sys.argv[2:]:
    import os, threading
    from pathlib import Path
    from serving.temporary import temporary_folder
    os.set_blocking(1, True)
    made = temporary_folder(Path(sys.argv[2]))
    (made.__enter__() / "weights").write_bytes(b"x")
    read, write = os.pipe()
    os.dup2(write, 2)  # nobody reads it
    os.set_blocking(2, False)
    try:
        while os.write(2, bytes(65536)):
            pass
    except BlockingIOError:
        os.set_blocking(2, True)
    cli.setup_logging = lambda *_: None
    serve.log.info = lambda *given: None
sys.exit(cli.main(["serve", sys.argv[1], "--port", "0", "--host", "127.0.0.1"]))
"""


def until_it_loads(process: subprocess.Popen[str]) -> None:
    """It is killed where it does not within a minute."""
    timer = threading.Timer(60.0, process.kill)
    timer.start()
    try:
        assert process.stdout is not None and process.stdout.readline() == "loads\n"
    finally:
        timer.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_leaves_while_its_model_loads(tmp_path: Path, number: signal.Signals) -> None:
    """Before: after the load, with tracebacks; and as process 1 of a container not at all."""
    command = [sys.executable, "-c", LOADING, str(tiny_llama(tmp_path / "tiny"))]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        Awake() as awake,
    ):
        try:
            until_it_loads(process)
            began = time.monotonic()
            harm(process.pid, number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        assert awake.seconds(began) < 10.0
    assert process.returncode == 0 and "Traceback" not in said
    assert f"{number.name} before anything was served: leaving" in said.splitlines()[-1]


def test_it_leaves_no_folder_behind_and_waits_for_no_reader(tmp_path: Path) -> None:
    """Before: a model that came from the pool stayed in shared memory, and a pipe that was full held the signal up."""
    (tmp_path / "memory").mkdir()
    command = [sys.executable, "-c", LOADING, str(tiny_llama(tmp_path / "tiny")), str(tmp_path / "memory")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            until_it_loads(process)
            assert len(list((tmp_path / "memory").iterdir())) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert list((tmp_path / "memory").iterdir()) == []


NEEDED = """
import sys, time
from deploy.runtime.signals import LeavesWhenDone

signals = LeavesWhenDone("when nobody needs it", float(sys.argv[1]))
if sys.argv[2] == "needed":
    with signals.needed():
        print("ready", flush=True)
        while not signals.asked:
            time.sleep(0.01)
        print("asked", flush=True)
        time.sleep(float(sys.argv[3]))
    print("done", flush=True)
else:
    print("ready", flush=True)
    time.sleep(600)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("seconds", "when", "longer", "said", "status"),
    [
        ("60", "needed", "0.2", ["asked", "done"], 7),
        ("inf", "needed", "0.2", ["asked", "done"], 7),
        ("0.3", "needed", "600", ["asked"], 0),
        ("0", "needed", "600", [], 0),
        ("60", "idle", "0", [], 0),
    ],
)
def test_a_process_that_is_needed_leaves_when_it_is_not_or_when_its_time_is_over(
    seconds: str, when: str, longer: str, said: list[str], status: int
) -> None:
    command = [sys.executable, "-c", NEEDED, seconds, when, longer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            output, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (output.split(), process.returncode) == (said, status), told
    assert told.count("SIGTERM") == 1


def test_a_process_that_is_needed_stays_though_nobody_reads_what_it_says() -> None:
    command = [sys.executable, "-c", NEEDED, "60", "needed", "0.2"]
    read, write = os.pipe()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write, text=True) as process:
        os.close(write)
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            os.close(read)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (output.split(), process.returncode) == (["asked", "done"], 7)
