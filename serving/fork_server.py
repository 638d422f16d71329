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
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serving.child_process import ENDED_FROM_OUTSIDE, module_command
from serving.fork_server_process import BEGINS, FORK, GO, HERE, MOST_BYTES, READY, ROOM, SETTLED, ForkOrder
from serving.logs import handed_down

log = logging.getLogger(__name__)

MODULE = "serving.fork_server_process"
PART = "forks"  # as it logs
READY_SECONDS = 60.0  # to import everything on a busy machine
FORK_SECONDS = 10.0
LOOK_SECONDS = 0.05  # between looks whether the fork server lives, while an answer is awaited
UNKNOWN_SECONDS = 1.0  # for what an ended fork server has forked and not told of to end as well
MOST_TRIES = 3  # to start one that somebody ends
# Settings that nothing reads before a forked process does its work. Of any other a library or the interpreter may have
# read what the fork server has: where a process is to have another value it is not forked.
READ_LATER = frozenset({"CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "CXX"})
READ_LATER_PREFIX = "MILLRACE_"
LOST_STATUS = 255  # of a process that somebody else has waited for, as asyncio has it
LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37


class ForkUnavailable(Exception):
    """The process was not forked, and will not be: start an interpreter."""


class ForkRefused(ForkUnavailable):
    """This one process was not forked; nothing of it is left, and the fork server goes on."""


class ForkServerEnded(ForkUnavailable):
    """Its process has."""


def read_later(name: str) -> bool:
    """True for a setting in which a forked process may differ from its fork server."""
    return name in READ_LATER or name.startswith(READ_LATER_PREFIX)


class ForkedProcess:
    """A forked child of ours, with what `subprocess.Popen` has for one. Safe for threads."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        """Raises ForkUnavailable where it cannot be watched, or is no child of this process."""
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
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    pid, status = self.pid, LOST_STATUS << 8
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
            with self._reaping:
                if self.returncode is not None:  # another thread has waited for it
                    continue
                try:
                    watched = os.dup(self._pidfd)  # which that thread may close
                except OSError:  # there is no descriptor left
                    watched = -1
            if watched < 0:
                time.sleep(LOOK_SECONDS if left is None else min(left, LOOK_SECONDS))
                continue
            try:
                _readable(watched, left)
            finally:
                os.close(watched)
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
        self._tries = 0  # to start one that was ended by somebody

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

        It has our working directory, cores, niceness, limits and blocked signals, and writes to the descriptor
        `output`, or where we do.
        """
        if (name := self._differs(environ)) is not None:
            raise ForkUnavailable(f"a library may have read another {name}")
        outputs = (1, 2) if output is None else (output, output)
        try:
            if not all(map(os.get_inheritable, (1, 2) if output is None else ())):
                raise ForkUnavailable("standard output or error is none that children have")
            order = ForkOrder(
                module=module,
                arguments=list(arguments),
                environ=dict(environ),
                cores=sorted(os.sched_getaffinity(0)),
                niceness=os.getpriority(os.PRIO_PROCESS, 0),
                umask=_umask(),
                blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                limits={name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
                files=(1, 2, *files),
            )
            word = order.packed()
            with self._starting, _here() as folder:
                return self._started(order, word, [folder, *outputs, *files])
        except (OSError, OverflowError, ValueError) as error:
            raise ForkUnavailable(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """It forks no more; what it has forked goes on."""
        self.failure = "the fork server has been closed"  # who waits until it is ready sees that
        with self._starting:
            self._end()

    def _differs(self, environ: Mapping[str, str]) -> str | None:
        """A setting that may have been read already, and not as it is here."""
        differing = {name for name, _ in environ.items() ^ self.environ.items()}
        return min((name for name in differing if not read_later(name)), default=None)

    # ---- with `_starting` ------------------------------------------------------------------------------------------

    def _started(self, order: ForkOrder, word: bytes, files: Sequence[int]) -> ForkedProcess:
        """Raises ForkUnavailable, OSError."""
        if self.failure is not None:
            raise ForkUnavailable(self.failure)
        server = self._running()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                try:
                    socket.send_fds(server, [word], [theirs.fileno(), *files])
                except OSError as error:  # a datagram is sent whole or not at all; a server that is gone is seen next
                    raise ForkRefused(f"it cannot be told: {error}") from error
                told = self._answer(server)
                if "pid" not in told:
                    raise ForkRefused(f"the fork server could not fork: {told['error']}")
                theirs.close()
                return self._begun(told["pid"], [*module_command(order.module), *order.arguments], ours)
            except ForkRefused:
                raise
            except BaseException:  # what it says next would be taken for the answer to something else
                ours.close()  # what it has forked ends
                theirs.close()
                self._end()
                raise

    def _answer(self, server: socket.socket) -> dict[str, Any]:
        """What came of an order that it has. Raises ForkUnavailable, OSError, ValueError."""
        if self._heard(FORK_SECONDS) != HERE:
            raise ForkUnavailable("the fork server has said something else")
        with _adopting():
            server.send(FORK)
            told: dict[str, Any] = json.loads(self._heard(FORK_SECONDS))
        return told

    def _begun(self, pid: int, command: Sequence[str], way: socket.socket) -> ForkedProcess:
        """The forked process once it is all that it is to be, and knows that we know it. Raises ForkRefused."""
        try:
            process = ForkedProcess(pid, command)
        except ForkUnavailable as error:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it is ours, and its number too
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise ForkRefused(str(error)) from error
        try:
            word = self._word(way, FORK_SECONDS)
            if word == SETTLED:
                way.send(GO)
                word = self._word(way, FORK_SECONDS)
            if word == BEGINS:
                return process
            raise ForkRefused(f"the process could not begin: {word.decode(errors='replace')}")
        except BaseException as error:
            process.kill()
            process.wait()
            if isinstance(error, ForkServerEnded | OSError):  # of this process here
                raise ForkRefused(f"the process has ended before it began: {error}") from error
            raise

    def _running(self) -> socket.socket:
        """The way to a server that lives. Raises ForkUnavailable."""
        process, way = self._process, self._socket
        if way is not None and process is not None and process.poll() is None:
            return way
        self._end()
        way, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = way
        try:
            with theirs:
                way.settimeout(FORK_SECONDS)
                way.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
                self._process = subprocess.Popen(  # noqa: S603 - our own module
                    [*module_command(MODULE), str(theirs.fileno()), ROOM],
                    pass_fds=(theirs.fileno(),),
                    env=self.environ | handed_down(PART),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for us
                )
            way.send(json.dumps(self.preload).encode())
            if self._heard(READY_SECONDS) != READY:
                raise ForkUnavailable("the fork server has said something else")
        except ForkUnavailable as error:
            self._give_up(error)
            raise
        except BaseException:
            self._end()
            raise
        self._tries = 0
        return way

    def _give_up(self, error: ForkUnavailable) -> None:
        """It would fail likewise again, and take as long, unless somebody has ended it."""
        process, ended_by = self._process, None
        if process is not None and isinstance(error, ForkServerEnded):
            with suppress(subprocess.TimeoutExpired):
                ended_by = process.wait(UNKNOWN_SECONDS)
        self._end()
        self._tries += 1
        if self.failure is None and (ended_by not in ENDED_FROM_OUTSIDE or self._tries == MOST_TRIES):
            self.failure = f"no fork server: {error}"
            log.warning("%s; processes start without, and import everything themselves", self.failure)

    def _heard(self, seconds: float) -> bytes:
        """The server's next word. Raises ForkUnavailable."""
        assert self._socket is not None
        return self._word(self._socket, seconds)

    def _word(self, way: socket.socket, seconds: float) -> bytes:
        """The next one that comes by this way. Raises ForkServerEnded where it is closed, ForkUnavailable."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.failure is None:
            if _readable(way.fileno(), LOOK_SECONDS):
                with suppress(ConnectionError):
                    if word := way.recv(MOST_BYTES):
                        return word
                raise ForkServerEnded("it has ended")
        raise ForkUnavailable(self.failure or f"no answer within {seconds:g} s")

    def _end(self) -> None:
        process, way = self._process, self._socket
        self._process = self._socket = None
        if way is not None:
            way.close()
        if process is not None:
            process.kill()
            process.wait()
            _wait_for_unknown(process.pid)


def _supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(ctypes.CDLL(None), "prctl")


def _umask() -> int | None:
    """Without a change of it, which would be that of other threads too; None where the system does not tell."""
    told = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return None if told is None else int(told[1], 8)


def _readable(descriptor: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if seconds is None else max(1, round(seconds * 1e3))))


def _wait_for_unknown(group: int) -> None:
    """For processes that the fork server of this number had forked, and had not told of.

    They are in its process group until they are told to go on, and end since they are not.
    """
    until = time.monotonic() + UNKNOWN_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-group, os.WNOHANG) == (0, 0):
                time.sleep(LOOK_SECONDS / 10)


@contextmanager
def _here() -> Iterator[int]:
    """A descriptor of the working directory, which may have no name any more. Raises OSError."""
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
