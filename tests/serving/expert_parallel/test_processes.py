"""What the system says of processes that end, in every form that it may come in."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from serving.expert_parallel.processes import EXITING, is_ending, says_ending

FLAGS = st.integers(0, (1 << 32) - 1)


@given(st.binary(max_size=64), FLAGS)
def test_a_name_may_have_any_character(name: bytes, flags: int) -> None:
    told = b"7 (%b) Z 1 7 7 0 -1 %d 1975 0 0 0\n" % (name, flags)
    assert says_ending(told) == bool(flags & EXITING)


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
