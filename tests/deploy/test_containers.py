"""The script that kills containers kills nothing else. What it does to real ones is seen by running it."""

from __future__ import annotations

import os

import pytest

from scripts.containers import Deployment


def test_a_container_without_a_process_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is 0 then, which to the kernel means the group of whoever asks."""
    site, killed = Deployment(["compose"], "engine", "http://127.0.0.1:1"), list[int]()
    monkeypatch.setattr(os, "kill", lambda process, signal: killed.append(process))
    monkeypatch.setattr(site, "process", lambda service: 0)
    with pytest.raises(SystemExit, match="prefill"):
        site.kill("prefill")
    monkeypatch.setattr(site, "process", lambda service: 7)
    assert site.kill("prefill") == 7 and killed == [7]
