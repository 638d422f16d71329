"""A process that stands still for a while is no slower for it by the clock of `Awake`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fakes.awake import SITTINGS, STANDSTILL, TICK, Awake, retaken
from tests.fakes.stopping import stop

ROOT = Path(__file__).parents[2]
STOOD_STILL = 1.0
MEASURED = """
import sys, time
from tests.fakes.awake import Awake
with Awake() as awake:
    began = time.monotonic()
    print("begun", flush=True)
    sys.stdin.readline()
    ended = time.monotonic()
    print(awake.seconds(began), awake.seconds(began, ended), ended - began)
"""


def test_seconds_in_which_a_process_is_stopped_do_not_count() -> None:
    command = [sys.executable, "-c", MEASURED]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        stop(process.pid)
        began = time.monotonic()
        while time.monotonic() - began < STOOD_STILL:
            time.sleep(STOOD_STILL)
        os.kill(process.pid, signal.SIGCONT)
        told, _ = process.communicate("go\n", timeout=60)
    awake, until_then, clock = map(float, told.split())
    assert clock >= STOOD_STILL
    assert awake <= clock - 0.9 * STOOD_STILL and until_then <= clock - 0.9 * STOOD_STILL


@pytest.mark.parametrize(("began", "ended", "counted"), [(101, 108, 4), (103, 104, 0), (106, 109, 3), (101, 115, 6)])
def test_all_others_do(began: float, ended: float, counted: float) -> None:
    awake = Awake()
    awake._gaps, awake._seen = [(102.0, 105.0)], 110.0 - TICK  # it has not looked since
    assert awake.seconds(began, ended) == pytest.approx(counted)


def test_all_seconds_count_after_the_watch_has_ended() -> None:
    awake = Awake()
    awake._gaps, awake._seen = [(102.0, 105.0)], 110.0 - TICK
    awake._ended.set()
    assert awake.seconds(101.0, 115.0) == pytest.approx(11.0)


class Sittings:
    """A test that fails so many times; `disturbed` says whether the machine stands still meanwhile."""

    def __init__(self, failures: int, *, disturbed: bool, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(Awake, "stood_still", lambda _: disturbed)
        self.failures, self.taken = failures, 0

    def sit(self) -> None:
        self.taken += 1
        assert self.taken > self.failures

    async def sit_in_a_loop(self) -> None:
        self.sit()


@pytest.mark.parametrize(
    ("failures", "disturbed", "taken", "passes"),
    [(0, True, 1, True), (2, True, 3, True), (1, False, 1, False), (SITTINGS, True, SITTINGS, False)],
)
async def test_what_fails_beside_a_standstill_is_taken_again(
    failures: int, disturbed: bool, taken: int, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for in_a_loop in (False, True):
        sittings = Sittings(failures, disturbed=disturbed, monkeypatch=monkeypatch)
        with nullcontext() if passes else pytest.raises(AssertionError):
            if in_a_loop:
                await retaken(sittings.sit_in_a_loop)()
            else:
                retaken(sittings.sit)()
        assert sittings.taken == taken


def test_a_gap_in_the_looks_is_a_standstill() -> None:
    awake = Awake()
    assert not awake.stood_still()
    awake._gaps = [(1.0, 1.0 + STANDSTILL)]
    assert awake.stood_still()
