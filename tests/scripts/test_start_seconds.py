"""Starts are timed until a server answers that it is ready, and what ends before is told of."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.own_server import ROOT
from scripts.start_seconds import started
from tests.tiny import tiny_llama

SMALL = ("--kv-cache-memory", "16MiB")


@pytest.mark.slow
def test_a_start_is_timed_until_the_server_is_ready_and_a_killed_worker_is_back(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny")
    start = started(ROOT, [str(model), *SMALL, "--mixed", "2"], "mixed-1")
    assert 0.5 < start.ready < 120.0
    assert start.back is not None and 0.5 < start.back < 120.0
    assert 1.0 < start.cpu < 120.0
    assert 200.0 < start.held < 3000.0


def test_a_server_that_ends_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 2\n.*nothing"):
        started(ROOT, [str(tmp_path / "nothing")])
