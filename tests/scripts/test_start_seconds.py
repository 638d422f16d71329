"""Starts are timed until a server answers that it is ready, and what ends before is told of."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.own_server import ROOT
from scripts.start_seconds import seconds_to_ready
from tests.tiny import tiny_llama


@pytest.mark.slow
def test_a_start_is_timed_until_the_server_is_ready(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny")
    assert 0.5 < seconds_to_ready(ROOT, [str(model), "--kv-cache-memory", "16MiB", "--log-level", "error"]) < 120.0


def test_a_server_that_ends_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 2"):
        seconds_to_ready(ROOT, [str(tmp_path / "nothing")])
