"""What the system says of processes that end, in every form that it may come in."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from serving.expert_parallel.processes import EXITING, KILLED, is_ending, says_ending

FLAGS = st.integers(0, (1 << 32) - 1)


@given(st.binary(max_size=64), FLAGS)
def test_a_name_may_have_any_character(name: bytes, flags: int) -> None:
    told = b"7 (%b) Z 1 7 7 0 -1 %d 1975 0 0 0\n" % (name, flags)
    assert says_ending(told) == bool(flags & EXITING)


@given(st.binary(max_size=64), FLAGS)
def test_a_signal_that_is_pending_ends_it_if_it_is_the_one(name: bytes, pending: int) -> None:
    told = b"7 (%b) R 1 7 7 0 -1 0 %b %d 0 0\n" % (name, b"0 " * 20 + b"0", pending)
    assert says_ending(told) == bool(pending & KILLED)


def test_a_process_is_ending_from_the_moment_it_is_killed() -> None:
    """Before: once a core had run it. Here it has none, since this process keeps the only one it may use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        seen = []
        for _ in range(20):
            process = subprocess.Popen(["/bin/sleep", "60"])
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            process.kill()
            seen.append(is_ending(process.pid))
            process.wait()
    finally:
        os.sched_setaffinity(0, cores)
    assert all(seen)


@given(st.binary(max_size=64))
def test_what_a_system_tells_otherwise_says_nothing(told: bytes) -> None:
    says_ending(told)
    for odd in (b"", b"7", b"7 (x) Z 1 7 7 0 -1", b"7 (x) Z 1 7 7 0 -1 -"):
        assert not says_ending(odd)


def test_a_process_is_ending_until_it_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(process.pid)
    process.wait()
    assert not any(map(is_ending, (process.pid, os.getpid(), -1)))
