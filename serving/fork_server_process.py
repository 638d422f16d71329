"""The fork server's own process: `python -m serving.fork_server_process DESCRIPTOR ROOM`.

It imports the modules that it is told on the socket of that descriptor, and forks whenever it is told to, until the
socket closes. ROOM is where the command lines of forked processes are written, which the system shows.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from serving.child_process import module_command
from serving.logs import setup_helper

MOST_BYTES = 160 << 10  # of a word: it is one datagram, and sockets buffer 208 KiB
MOST_FILES = 64
ROOM = " " * 4096  # bytes: a worker is told some sixty flags, two kilobytes
READY = b"ready"
HERE, FORK = b"here", b"fork"  # said between an order and its answer
SETTLED, GO, BEGINS = b".", b"!", b"+"  # said by a forked process, to it, and by it
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ARG_START, ARG_END = 45, 46  # places in /proc/PID/stat after the command's name
PR_SET_MM, PR_SET_MM_ARG_END = 35, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """What to run, and what it is to find. `files` are the numbers that descriptors sent along have for it."""

    module: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    cores: Sequence[int]
    niceness: int
    umask: int | None  # where the system does not tell: the fork server's
    blocked: Sequence[int]  # signals
    limits: Mapping[str, Sequence[int]]  # soft and hard, by the name in `resource`
    files: Sequence[int]

    def packed(self) -> bytes:
        """Raises OverflowError where it is too long, UnicodeEncodeError for what no system has told."""
        word = json.dumps(asdict(self), ensure_ascii=False).encode(errors="surrogateescape")
        if len(word) > MOST_BYTES or len(self.files) > MOST_FILES - 2:
            raise OverflowError(f"an order of {len(word)} bytes and {len(self.files)} files is too long")
        return word

    @classmethod
    def unpacked(cls, word: bytes) -> ForkOrder:
        return cls(**json.loads(word.decode(errors="surrogateescape")))


def fork_away() -> int | None:
    """The number of a new process that is not our child any more; None in that process. Raises OSError.

    It is the child of a child that ends at once: so it becomes that of the process we are told by, which adopts.
    """
    known, tell = os.pipe()
    try:
        with warnings.catch_warnings(
            action="ignore", category=DeprecationWarning
        ):  # of threads that libraries end first
            middle = os.fork()
        if not middle and _forked_again(tell):
            return None
        os.close(tell)
        tell = -1
        os.waitpid(middle, 0)
        word = os.read(known, 256).decode(errors="replace")
    finally:
        for descriptor in {known, tell} - {-1}:
            os.close(descriptor)
    if not word.isdigit():
        raise OSError(word or "the process that was to fork has ended")
    return int(word)


def _forked_again(tell: int) -> bool:
    """True in the new process. The one between tells its number, or why there is none, and ends."""
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            pid = os.fork()
        word = str(pid)
    except OSError as error:
        pid, word = -1, f"fork: {error}"
    if not pid:
        return True
    os.write(tell, word.encode()[:256])
    os._exit(0)


def settle(order: ForkOrder, folder: int, files: Sequence[int]) -> None:
    """Have what a process has that is started by the one we are told by. Raises OSError, ValueError."""
    for name, limit in order.limits.items():
        number = getattr(resource, name)
        if resource.getrlimit(number) != tuple(limit):
            resource.setrlimit(number, (limit[0], limit[1]))
    os.fchdir(folder)
    os.close(folder)
    moved = [_moved(file, order.files) for file in files]
    for file, number in zip(moved, order.files, strict=True):
        os.dup2(file, number)
    for file in moved:
        os.close(file)
    os.sched_setaffinity(0, order.cores)
    if order.niceness != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, order.niceness)
    if order.umask is not None:
        os.umask(order.umask)
    os.environ.clear()
    os.environ.update(order.environ)
    command = [*module_command(order.module), *order.arguments]
    sys.orig_argv[:] = command
    show_command(command)


def _moved(file: int, taken: Collection[int]) -> int:
    """The same descriptor under a number that none of them is to have; the given one is closed."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD, 3)
    while moved in taken:
        higher = fcntl.fcntl(file, fcntl.F_DUPFD, moved + 1)
        os.close(moved)
        moved = higher
    os.close(file)
    return moved


def show_command(command: Sequence[str]) -> None:
    """Have the system show this process with this command line, as far as there is room (proc(5), cmdline).

    Where it may not be told how long that is, it shows what is left of the room as empty words.
    """
    with suppress(OSError, ValueError, IndexError):
        start, end = _room()
        if end > start > 0:
            shown = b"\0".join(os.fsencode(word) for word in command)[: end - start - 1] + b"\0"
            ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
            ctypes.CDLL(None).prctl(PR_SET_MM, PR_SET_MM_ARG_END, ctypes.c_ulong(start + len(shown)), 0, 0)


@cache
def _room() -> tuple[int, int]:
    """Where the command line is in memory, as this process or its fork server was started. Raises OSError and more."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(places[ARG_START]), int(places[ARG_END])


def serve(ours: socket.socket) -> ForkOrder | None:
    """Fork until the socket closes; in a new process, once it has settled and is told to go on, what it is to do."""
    while True:
        word, files, *_ = socket.recv_fds(ours, MOST_BYTES, MOST_FILES)
        if not word:
            return None
        ours.send(HERE)
        if ours.recv(MOST_BYTES) != FORK:
            return None
        try:
            answer: dict[str, object] = {"pid": fork_away()}
        except OSError as error:
            answer = {"error": str(error)}
        if answer.get("pid", -1) is None:
            break
        for file in files:
            os.close(file)
        ours.send(json.dumps(answer).encode())
    ours.close()
    return _settled(ForkOrder.unpacked(word), *files)


def _settled(order: ForkOrder, way: int, folder: int, *files: int) -> ForkOrder:
    """Ends the process where who asked for it does not want it any more."""
    with socket.socket(fileno=_moved(way, order.files)) as asker:
        try:
            settle(order, folder, files)
        except (OSError, ValueError) as error:
            asker.send(f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        asker.send(SETTLED)
        if asker.recv(1) != GO:
            os._exit(1)
        os.setsid()  # until now who ends the fork server can tell that it is one of its own
        asker.send(BEGINS)
    return order


def main() -> int:
    """Serve, or be what a forked process is to be."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # it ends with who started it; what it forks hears them later
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, nobody could be waited for
    setup_helper(os.environ)
    ours = socket.socket(fileno=int(sys.argv[1]))
    show_command(sys.orig_argv[: sys.orig_argv.index(ROOM)])
    collects = gc.isenabled()
    gc.disable()
    try:
        for module in json.loads(ours.recv(MOST_BYTES) or "[]"):
            import_module(module)
        gc.collect()
        gc.freeze()  # a collection would write to all of it, and each process have a copy of its own
        ours.send(READY)
        order = serve(ours)
    except ConnectionError:  # who asked is gone
        return 0
    if order is None:
        return 0
    if collects:
        gc.enable()
    signal.signal(signal.SIGCHLD, of_children)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked)
    module = import_module(order.module)
    sys.argv[:] = [module.__file__ or order.module, *order.arguments]
    code: int = module.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
