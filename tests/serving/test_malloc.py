"""Freed memory is kept: buffers as large as a KV chunk, made and dropped again and again, fault no pages in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.source import ROOT

CHURN = """
import resource, sys
from serving.malloc import keep_freed_memory
if not keep_freed_memory():
    sys.exit(3)
def churn():
    kept = [bytes(1 << 20) for _ in range(8)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
before = faults()
for _ in range(20):
    churn()
print(faults() - before)
"""


def test_freed_buffers_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", CHURN], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("this C library has no such setting")
    assert done.returncode == 0, done.stderr
    pages_a_round = 8 * (1 << 20) // 4096
    assert int(done.stdout) < pages_a_round, "20 rounds cost less than one round's pages"
