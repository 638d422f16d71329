"""The benchmarks of parts of the way run from end to end, each transport that is here moving every byte."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvcache.transfer.choice import chosen
from tests.house.source import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "rows"),
    [
        ("bench.fetch", ["--tokens", "64"], ["memcpy", "grpc"]),
        ("bench.handoff", ["--tokens", "64", "--prefill-ms", "5", "--threads", "1"], ["memcpy", "local", "grpc"]),
    ],
    ids=["fetch", "handoff"],
)
def test_a_table_with_a_row_for_each_transport(module: str, arguments: list[str], rows: list[str]) -> None:
    command = [sys.executable, "-m", module, "--layers", "2", "--rounds", "1", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == [*rows, *chosen("auto")]
