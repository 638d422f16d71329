"""What a host makes once is made by one process at a time, and one that hangs stops nobody for ever."""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path

import pytest

from serving import cache_folder
from serving.cache_folder import one_at_a_time


def test_who_waits_says_so_and_goes_on_when_the_other_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: the wait had no end, said nothing, and went on through SIGTERM."""
    monkeypatch.setattr(cache_folder, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cache_folder, "LONGEST_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    file = tmp_path / "made" / "form.json"
    with one_at_a_time(file):
        assert not caplog.messages
        with one_at_a_time(file):
            waiting, going_on = caplog.messages
    assert waiting == f"waiting for another process, which makes {file}"
    assert going_on.startswith(f"another process has not made {file} within")
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it any more
