"""Lines of several processes on one pipe: each whole, however long it is."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time

import pytest

from serving.shared_stderr import WholeLines

WRITERS, LINES, LONG = 3, 40, 50_000  # characters of a line: a pipe keeps 4096 together, and holds 65536
WRITER = f"""
import sys
from serving.shared_stderr import WholeLines
stream = WholeLines(sys.stderr, patience=60)
sys.stdin.readline()
for _ in range({LINES}):
    stream.write(sys.argv[1] * {LONG} + "\\n")
"""


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_long_lines_of_several_processes_do_not_mix(kind: str) -> None:
    ours, theirs = (end.detach() for end in socket.socketpair()) if kind == "socket" else os.pipe()
    letters = "abc"[:WRITERS]
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen([*command, letter], stderr=theirs, stdin=subprocess.PIPE) for letter in letters]
    os.close(theirs)
    for writer in writers:  # all at once, when each has started
        assert writer.stdin is not None
        writer.stdin.close()
    with os.fdopen(ours, "rb") as told:
        lines = told.read().decode().splitlines()
    assert [writer.wait(60) for writer in writers] == [0] * WRITERS
    assert sorted(lines) == sorted(letter * LONG for letter in letters for _ in range(LINES))


def test_a_stream_in_memory_has_no_lock() -> None:
    stream = io.StringIO()
    WholeLines(stream).write("a\n")
    assert stream.getvalue() == "a\n"


STOPPED = """
import fcntl, os, signal, sys
fcntl.lockf(sys.stderr.fileno(), fcntl.LOCK_EX)
os.write(sys.stdout.fileno(), b"held")
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_process_that_is_stopped_with_the_lock_delays_others_once() -> None:
    ours, theirs = os.pipe()
    holder = subprocess.Popen([sys.executable, "-c", STOPPED], stderr=theirs, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.read(4) == b"held"
        with os.fdopen(ours, "rb") as told, os.fdopen(theirs, "w") as stream:
            lines, began = WholeLines(stream, patience=0.3), time.monotonic()
            lines.write("a\n")
            waited, began = time.monotonic() - began, time.monotonic()
            for _ in range(20):
                lines.write("b\n")
            assert told.read(42) == b"a\n" + b"b\n" * 20
            assert waited >= 0.3 and time.monotonic() - began < 20 * 0.3
    finally:
        holder.kill()
        holder.communicate()
