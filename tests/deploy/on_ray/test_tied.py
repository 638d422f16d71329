"""A child of an actor ends with it, and one whose actor has gone before it was bound does not begin."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from tests.flow.server import REPOSITORY

ENVIRON = {**os.environ, "PYTHONPATH": REPOSITORY}


def test_it_becomes_the_command() -> None:
    command = [sys.executable, "-m", "deploy.on_ray.tied", str(os.getpid()), "--version"]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("millrace ")


def test_it_does_not_begin_without_its_parent() -> None:
    command = [sys.executable, "-m", "deploy.on_ray.tied", "1", "--version"]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_it_dies_with_its_parent() -> None:
    """The parent between is killed; the pipe that only the child still holds ends."""
    own = "import os, sys, subprocess; subprocess.Popen([sys.executable, '-m', 'deploy.on_ray.tied', str(os.getpid()), "
    own += "'kvcache', '--ram', '1MiB', '--routers', '127.0.0.1:1']).wait()"
    parent = subprocess.Popen([sys.executable, "-c", own], env=ENVIRON, stderr=subprocess.PIPE, text=True)
    with parent:
        assert parent.stderr is not None
        assert parent.stderr.readline(), "the child has something to say"
        parent.send_signal(signal.SIGKILL)
        while ready := select.select([parent.stderr], [], [], 30)[0]:
            if not parent.stderr.readline():
                break
    assert ready, "the child goes on"
