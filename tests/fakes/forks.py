"""Processes of ours for tests, forked from one that has imported all they need: starting them was a third of all tests.

Where a test asks for another environment than others do, another fork server starts; the oldest goes.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from serving.fork_server import ForkedProcess, ForkServer, ForkUnavailable, read_later

PRELOAD = ("deploy.cli", "deploy.worker.process", "deploy.frontend", "deploy.local", "deploy.serve", "uvloop")
MOST = 2  # fork servers at a time: each has torch
OF_PYTEST = ("PYTEST_CURRENT_TEST",)  # another in each test

Running = subprocess.Popen[bytes] | ForkedProcess
_servers: dict[frozenset[tuple[str, str]], ForkServer] = {}


def started(module: str, arguments: Sequence[str], environ: Mapping[str, str], output: IO[str]) -> Running:
    """`python -m module` with these arguments and this environment, which writes to `output`."""
    environ = {name: value for name, value in environ.items() if name not in OF_PYTEST}
    try:
        return _server(environ).start(module, arguments, environ, output=output.fileno())
    except ForkUnavailable:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)


def no_fork(*_: object, **__: object) -> None:
    """What a fork server that cannot be started says."""
    raise ForkUnavailable("none here")


def _server(environ: Mapping[str, str]) -> ForkServer:
    common = {name: value for name, value in environ.items() if not read_later(name)}
    key = frozenset(common.items())
    found = _servers.pop(key, None) or ForkServer(PRELOAD, common)
    _servers[key] = found  # the last
    while len(_servers) > MOST:
        _servers.pop(next(iter(_servers))).close()
    return found


@atexit.register
def _close() -> None:
    for server in _servers.values():
        server.close()
