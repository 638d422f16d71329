"""Ports that tests give to the processes they start: nobody else gets one, neither by asking nor by chance."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.flow import ports
from tests.house.source import ROOT

ASKING = """
import sys
from tests.flow import ports
few = tuple(map(int, sys.argv[1:]))
ports.candidates = lambda: few
print(*(ports.free_port() for _ in range(5)), flush=True)
input()
"""


def test_a_port_is_none_that_the_kernel_would_give_to_anybody() -> None:
    low, high = map(int, ports.GIVEN_OUT.read_text().split())
    assert all(not low <= ports.free_port() <= high for _ in range(50))


def test_processes_beside_each_other_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody listens at any yet, and there are few to choose from."""
    few = ports.candidates()[:20]
    monkeypatch.setattr(ports, "candidates", lambda: few)
    mine = {ports.free_port() for _ in range(10)}
    command = [sys.executable, "-c", ASKING, *map(str, few)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        assert len(mine) == 10 and len(theirs) == 5 and not mine & theirs
        other.communicate("\n")
