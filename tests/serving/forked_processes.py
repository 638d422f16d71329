"""Processes that run `tests.fakes.forked`, by a fork server or an interpreter, and what is left of them."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from serving import fork_server
from serving.child_process import helper_environ, module_command
from serving.fork_server import ForkServer, ForkUnavailable
from tests.fakes import forked

LONG = 60.0  # seconds
MODULE = forked.__name__
ENVIRON = helper_environ(os.environ) | {"COLOUR": "blue"}


class Started:
    """A process that runs `tests.fakes.forked`, and the way to it; by an interpreter where there is no server."""

    def __init__(self, server: ForkServer | None, *words: str, environ: dict[str, str] | None = None):
        self.way, theirs = socket.socketpair()
        self.way.settimeout(LONG)
        arguments, told = [str(theirs.fileno()), *words], ENVIRON if environ is None else environ
        with theirs, ExitStack() as undone:
            undone.callback(self.way.close)
            if server is not None:
                self.process: Any = server.start(MODULE, arguments, told, [theirs.fileno()])
            else:
                self.process = subprocess.Popen(
                    [*module_command(MODULE), *arguments],
                    pass_fds=(theirs.fileno(),),
                    env=told,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            undone.pop_all()

    def report(self) -> dict[str, Any]:
        text = b""
        while part := self.way.recv(1 << 16):
            text += part
        self.way.close()
        found: dict[str, Any] = json.loads(text)
        return found

    def begun(self) -> Started:
        assert self.way.recv(1) == b"!"
        return self

    def end(self) -> int:
        self.way.close()
        code: int = self.process.wait(LONG)
        return code


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def lives(pid: int) -> bool:
    """False for one that has ended, also where nobody has asked for its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[int]:
    return {int(pid) for each in Path("/proc/self/task").iterdir() for pid in (each / "children").read_text().split()}


def adopts() -> bool:
    value = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(fork_server.PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def starting(server: ForkServer) -> tuple[threading.Thread, list[str]]:
    """A thread that has it start a process, and why that was refused."""
    refused: list[str] = []

    def start() -> None:
        try:
            Started(server, "0")
        except ForkUnavailable as error:
            refused.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    return thread, refused
