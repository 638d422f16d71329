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
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from serving.child_process import module_command
from serving.logs import setup_helper

MOST_BYTES = 160 << 10  # of a word: it is one datagram, and sockets buffer 208 KiB
MOST_FILES = 64
ROOM = " " * 8192  # bytes: a worker is told some sixty flags
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ARG_START, ARG_END = 45, 46  # places in /proc/PID/stat after the command's name


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """What to run, and what it is to find. `files` are the numbers that descriptors sent along have for it."""

    module: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    cores: Sequence[int]
    niceness: int
    files: Sequence[int]

    def packed(self) -> bytes:
        """Raises OverflowError where it is too long."""
        word = json.dumps(asdict(self)).encode()
        if len(word) > MOST_BYTES or len(self.files) >= MOST_FILES:
            raise OverflowError(f"an order of {len(word)} bytes and {len(self.files)} files is too long")
        return word


def fork_away() -> int | None:
    """The number of a new process that is not our child any more; None in that process. Raises OSError.

    It is the child of a child that ends at once: so it becomes that of the process we are told by, which adopts.
    """
    known, tell = os.pipe()
    try:
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
        pid = os.fork()
        word = str(pid)
    except OSError as error:
        pid, word = -1, f"fork: {error}"
    if not pid:
        return True
    os.write(tell, word.encode()[:256])
    os._exit(0)


def settle(order: ForkOrder, folder: int, files: Sequence[int]) -> None:
    """Have what a process has that is started by the one we are told by. Raises OSError."""
    os.setsid()
    os.fchdir(folder)
    os.close(folder)
    above = 1 + max(order.files)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]  # to where none of them is to be
    for file in files:
        os.close(file)
    for file, number in zip(moved, order.files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.sched_setaffinity(0, order.cores)
    if order.niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, order.niceness)
    os.environ.clear()
    os.environ.update(order.environ)
    sys.argv[:] = [order.module, *order.arguments]
    show_command([*module_command(order.module), *order.arguments])


def show_command(command: Sequence[str]) -> None:
    """Have the system show this process with this command line, as far as there is room (proc(5), cmdline)."""
    with suppress(OSError, ValueError, IndexError):
        places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(places[ARG_START]), int(places[ARG_END])
        if end > start > 0:
            shown = b"\0".join(os.fsencode(word) for word in command)[: end - start - 1]
            ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def serve(ours: socket.socket) -> ForkOrder | None:
    """Fork until the socket closes; in a new process, once it is known and has settled, what it is to do."""
    while True:
        word, files, *_ = socket.recv_fds(ours, MOST_BYTES, MOST_FILES)
        if not word:
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
    order, (go, folder, *given) = ForkOrder(**json.loads(word)), files
    if not os.read(go, 1):
        os._exit(1)  # nobody knows of it: who asked has left, or does not wait any more
    os.close(go)
    settle(order, folder, given)
    return order


def main() -> int:
    """Serve, or be what a forked process is to be."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}  # it ends with who started it
    setup_helper(os.environ)
    ours = socket.socket(fileno=int(sys.argv[1]))
    show_command(sys.orig_argv[: sys.orig_argv.index(ROOM)])
    gc.disable()
    for module in json.loads(ours.recv(MOST_BYTES)):
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to all of it, and each process have a copy of its own
    ours.send(b"ready")
    order = serve(ours)
    if order is None:
        return 0
    gc.enable()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    code: int = import_module(order.module).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
