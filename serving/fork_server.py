"""A fork server: a process that has imported what others need, and forks one of those in milliseconds.

Importing torch takes two seconds of a core in each new interpreter. A forked process is our child, not the fork
server's: it is waited for, watched and ended as one that we started ourselves, and outlives the fork server. Linux
alone has what that takes (a "child subreaper", prctl(2)); who cannot fork starts an interpreter.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from serving.child_process import module_command
from serving.fork_server_process import MOST_BYTES, ROOM, ForkOrder

log = logging.getLogger(__name__)

MODULE = "serving.fork_server_process"
READY_SECONDS = 60.0  # to import everything on a busy machine
FORK_SECONDS = 10.0
LOOK_SECONDS = 0.05  # between looks whether the fork server lives, while an answer is awaited
# Settings that nothing reads before a forked process does its work. Of any other a library or the interpreter may have
# read what the fork server has: where a process is to have another value it is not forked.
READ_LATER = ("MILLRACE_", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "CXX")
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37


class ForkUnavailable(Exception):
    """The process was not forked, and will not be: start an interpreter."""


class ForkedProcess:
    """A forked child of ours, with what `subprocess.Popen` has for one. Safe for threads."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        """Raises ForkUnavailable where it is no child of this process."""
        self.pid = pid
        self.args = tuple(args)
        self.returncode: int | None = None  # minus the signal's number where one ended it
        self._reaping = threading.Lock()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise ForkUnavailable(f"process {pid} cannot be watched: {error}") from error
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError as error:
            os.close(self._pidfd)
            raise ForkUnavailable(f"process {pid} is no child of ours") from error

    def __repr__(self) -> str:
        return f"<ForkedProcess {self.pid}: {' '.join(self.args)}>"

    def fileno(self) -> int:
        """A descriptor that can be read from once the process has ended; -1 once `poll` or `wait` has said so."""
        return self._pidfd

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._pidfd)
                    self._pidfd = -1
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status once it has ended. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0.0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with suppress(OSError):  # another thread has waited for it meanwhile
                duplicate = os.dup(self._pidfd)
                try:
                    _readable(duplicate, left)
                finally:
                    os.close(duplicate)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        with self._reaping:
            if self.returncode is None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts processes that run our modules. `environ` is what the server itself has; it starts with the first one.

    A forked process is as one that `python -P -m module` has started in a session of its own, with no standard input,
    but that it comes with the modules that are to be `preload`ed, and with what libraries have read of `environ`.
    Safe for threads.
    """

    def __init__(self, preload: Sequence[str], environ: Mapping[str, str]) -> None:
        self.preload = tuple(preload)
        self.environ = dict(environ)
        self.failure: str | None = None if _supported() else "this system cannot hand forked processes over"
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        files: Sequence[int] = (),
        *,
        output: int | None = None,
    ) -> ForkedProcess:
        """Run `main()` of this module with these arguments, all of this environment, and `files`, descriptors that keep
        their numbers. What it returns is the exit status. Raises ForkUnavailable.

        It has our working directory, cores and niceness, and writes to the descriptor `output`, or where we do.
        """
        if (name := self._differs(environ)) is not None:
            raise ForkUnavailable(f"a library may have read another {name}")
        with self._starting:
            if self.failure is not None:
                raise ForkUnavailable(self.failure)
            server = self._running()
            ours, theirs = socket.socketpair()
            with ours, theirs, _here() as folder:
                order = ForkOrder(
                    module=module,
                    arguments=list(arguments),
                    environ=dict(environ),
                    cores=sorted(os.sched_getaffinity(0)),
                    niceness=os.getpriority(os.PRIO_PROCESS, 0),
                    files=(1, 2, *files),
                )
                outputs = (1, 2) if output is None else (output, output)
                process = self._forked(server, order, [theirs.fileno(), folder, *outputs, *files])
                ours.send(b"!")  # it waits for that, and ends where nobody knows of it
                return process

    def close(self) -> None:
        """It forks no more; what it has forked goes on."""
        self.failure = "the fork server has been closed"  # who waits for it sees that
        with self._starting:
            self._end()

    def _differs(self, environ: Mapping[str, str]) -> str | None:
        """A setting that may have been read already, and not as it is here."""
        differing = {name for name, _ in environ.items() ^ self.environ.items()}
        return min((name for name in differing if not name.startswith(READ_LATER)), default=None)

    def _running(self) -> socket.socket:
        """The way to a server that lives. Raises ForkUnavailable."""
        process, way = self._process, self._socket
        if way is not None and process is not None and process.poll() is None:
            return way
        self._end()
        way, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._socket = way
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own module
                    [*module_command(MODULE), str(theirs.fileno()), ROOM],
                    pass_fds=(theirs.fileno(),),
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for us
                )
                way.send(json.dumps(self.preload).encode())
            except OSError as error:
                self._end()
                raise ForkUnavailable(f"no fork server: {error}") from error
        try:
            self._heard(READY_SECONDS)
        except ForkUnavailable as error:
            if self.failure is None:
                self.failure = f"no fork server: {error}"  # it would fail likewise again, and take as long
                log.warning("%s; processes start without, and import everything themselves", self.failure)
            raise
        return way

    def _forked(self, server: socket.socket, order: ForkOrder, files: Sequence[int]) -> ForkedProcess:
        """Raises ForkUnavailable."""
        try:
            word = order.packed()
        except OverflowError as error:
            raise ForkUnavailable(str(error)) from error
        with _adopting():
            try:
                server.settimeout(FORK_SECONDS)
                socket.send_fds(server, [word], files)
            except OSError as error:
                self._end()
                raise ForkUnavailable(f"the fork server was not told: {error}") from error
            told = json.loads(self._heard(FORK_SECONDS))
            if "pid" not in told:
                raise ForkUnavailable(f"the fork server could not fork: {told['error']}")
            return ForkedProcess(told["pid"], [*module_command(order.module), *order.arguments])

    def _heard(self, seconds: float) -> bytes:
        """Its next word. A server that says none in time is ended. Raises ForkUnavailable."""
        assert self._socket is not None
        until, reason = time.monotonic() + seconds, f"no answer within {seconds:g} s"
        while time.monotonic() < until and self.failure is None:
            if _readable(self._socket.fileno(), LOOK_SECONDS):
                with suppress(OSError):
                    if word := self._socket.recv(MOST_BYTES):
                        return word
                reason = "it has ended"
                break
        self._end()
        raise ForkUnavailable(self.failure or reason)

    def _end(self) -> None:
        process, way = self._process, self._socket
        self._process = self._socket = None
        if way is not None:
            way.close()
        if process is not None:
            process.kill()
            process.wait()


def _supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(ctypes.CDLL(None), "prctl")


def _readable(descriptor: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if seconds is None else max(1, round(seconds * 1e3))))


@contextmanager
def _here() -> Iterator[int]:
    """A descriptor of the working directory, which may have no name any more."""
    folder = os.open(".", os.O_PATH)
    try:
        yield folder
    finally:
        os.close(folder)


_adoptions = threading.Lock()


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile a process below us whose parent ends becomes our child."""
    prctl, before = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    with _adoptions:
        prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
