"""What paced workers wrote of their steps is read by time, and a run on an overloaded machine is seen as one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench import step_lags
from bench.step_lags import BUSY, LATE, WORST, StepLags, StrainWatch, cpu_seconds, lags_between, strain
from scripts.paced import LagLog


def test_steps_are_told_of_by_the_second_and_read_by_time(tmp_path: Path) -> None:
    now = 100.0
    first, second = (LagLog(tmp_path / f"{number}.jsonl", lambda: now) for number in (1, 2))
    for number in range(40):  # ten seconds of steps of a quarter of a second
        now += 0.25
        first.add(0.25, 0.01)
        second.add(0.25, 0.05 if number == 20 else 0.0)
    found = lags_between(tmp_path, 100.0, 110.0)
    assert found.steps == 80 and found.worst == 0.05
    assert (found.paced, found.late) == pytest.approx((20.0, 0.45))
    assert found.share == pytest.approx(0.45 / 20)
    half = lags_between(tmp_path, 100.5, 105.0)
    assert half.steps == 40 and half.late == pytest.approx(0.2)
    assert lags_between(tmp_path, 200.0, 300.0) == StepLags() and StepLags().share == 0.0


def test_a_line_that_is_half_written_is_left_for_later(tmp_path: Path) -> None:
    log = LagLog(tmp_path / "1.jsonl", iter([0.0, 2.0, 4.0]).__next__)
    log.add(0.5, 0.1)
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"at": 3.0, "ste')
    assert lags_between(tmp_path, 0.0, 9.0).steps == 1


@pytest.mark.parametrize(
    ("late", "busy", "believed"), [(0.0, 0.0, True), (0.03, 0.75, True), (0.031, 0.1, False), (0.0, 0.76, False)]
)
def test_late_steps_or_busy_cores_are_a_strain(late: float, busy: float, believed: bool) -> None:
    told = strain({LATE: late, BUSY: busy})
    assert (told == "") == believed
    assert believed or "overloaded" in told
    assert strain({"duration": 3.0}) == ""  # of a run with real steps nothing is known


def test_cpu_time_is_read_without_what_is_idle_or_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 5 20 100 40 1 2 3 7 7\ncpu0 1 1 1 1\n")
    for own, busy in ((0, 36.0), (-5, 36.0), (10, 41.0)):
        monkeypatch.setattr(step_lags.os, "nice", lambda _, own=own: own)
        assert cpu_seconds(stat) == (busy, 181.0)
    assert cpu_seconds(tmp_path / "none") == (0.0, 0.0)
    stat.write_text("")
    assert cpu_seconds(stat) == (0.0, 0.0)


def test_a_run_is_told_what_happened_since_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = 50.0, iter([(10.0, 100.0), (40.0, 200.0)])
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(step_lags, "cpu_seconds", lambda: next(used))
    log = LagLog(tmp_path / "1.jsonl", lambda: now)
    now = 51.0
    log.add(1.0, 0.5)
    now = 52.0
    watch = StrainWatch(tmp_path)
    now = 54.0
    log.add(2.0, 0.1)
    assert watch.metrics() == {BUSY: 0.3, LATE: 0.05, WORST: 100.0}
