"""Whoever stops waiting for a command leaves none of its processes behind."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from bench import own_simulator


async def test_a_command_that_is_given_up_ends_with_all_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, program = tmp_path / "alive", tmp_path / "program"
    os.mkfifo(alive)  # read to its end once nobody is left that writes there
    program.write_text(f"#!/bin/sh\nexec 3>{alive}\necho begun >&3\nsleep 600 &\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    running = asyncio.create_task(own_simulator.command("simulate"))
    with await asyncio.to_thread(alive.open) as written:
        assert await asyncio.to_thread(written.readline) == "begun\n"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.wait_for(asyncio.to_thread(written.read), 60) == ""
