"""Steps of the GPU benchmark are run, kept, resumed, cut off and interrupted, with children that only pretend."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import gpu_device, gpu_run
from bench.gpu_run import FAILED, INTERRUPTED, PASSED, SKIPPED, TIMED_OUT, GpuRecord, RecordFile, StepRunner, shown
from bench.gpu_stages import GpuStep, PlanPlaces
from bench.own_server import ROOT

QUICK = "import json, sys; print('told'); json.dump({'rows': [1]}, open(sys.argv[1], 'w'))"
BROKEN = "import json, sys; json.dump({'rows': [2]}, open(sys.argv[1], 'w')); print('first'); sys.exit('it broke')"
# A child with a child of its own in another session, as a server is; it heeds no interrupt.
ENDLESS = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "open(sys.argv[1], 'w').write('{\"pid\": %d}' % below.pid)\n"
    "time.sleep(600)"
)
HALF = "import sys; open(sys.argv[1], 'w').write('{\"rows')"
MAKES = "import os, sys; os.makedirs(sys.argv[2]); json = open(sys.argv[1], 'w').write('{}')"


def step(name: str, program: str, **more: object) -> GpuStep:
    made = GpuStep(name=name, stage=1, what=name, command=(program,), expected=1.0, limit=60.0)
    return replace(made, **more)  # type: ignore[arg-type]


def child(step: GpuStep, places: PlanPlaces) -> list[str]:
    return [sys.executable, "-c", step.command[0], str(places.json(step.name)), str(step.makes)]


class Bench:
    """A runner in a folder of its own; `again` is one of a later call."""

    def __init__(self, folder: Path, revision: str = "abc", device: str = "gpu"):
        self.folder, self.lines = folder, list[str]()
        self.records = RecordFile(folder / "state.json", revision, device)
        self.runner = StepRunner(
            places=PlanPlaces(models=folder, out=folder / "out"),
            records=self.records,
            show=self.lines.append,
            sample=lambda: {"watts": 300.0},
            tick=0.05,
            grace=0.05,
            command_of=child,
        )

    def status(self, name: str) -> str:
        record = self.records.get(name)
        assert record is not None
        return record.status


def test_a_failure_is_recorded_with_its_figures_and_the_rest_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.runner.run([step("one", BROKEN), step("half", HALF), step("two", QUICK)])
    broken, passed = bench.records.get("one"), bench.records.get("two")
    assert broken is not None and passed is not None
    assert (broken.status, broken.why, broken.figures) == (FAILED, "exit status 1", {"rows": [2]})
    assert broken.tail == "first\nit broke"
    assert (passed.status, passed.figures, passed.tail) == (PASSED, {"rows": [1]}, "told")
    assert bench.records.get("half") == replace(bench.records.get("half") or passed, figures={}, status=PASSED)


def test_what_has_passed_is_not_run_again_unless_asked(tmp_path: Path) -> None:
    steps = [step("one", QUICK), step("two", BROKEN)]
    Bench(tmp_path).runner.run(steps)
    later = Bench(tmp_path)
    later.runner.run([step("one", BROKEN), step("two", QUICK)])
    assert (later.status("one"), later.status("two")) == (PASSED, PASSED)  # the first was not, the second was run
    assert any("one: passed before" in line for line in later.lines)
    later.runner.run([step("one", BROKEN)], again=True)
    assert later.status("one") == FAILED


@pytest.mark.parametrize("other", [{"revision": "def"}, {"device": "another"}])
def test_records_are_of_a_commit_and_a_device(other: dict[str, str], tmp_path: Path) -> None:
    Bench(tmp_path).runner.run([step("one", QUICK)])
    bench = Bench(tmp_path, **other)
    assert bench.records.get("one") is None
    bench.runner.run([step("one", BROKEN)])
    assert (bench.status("one"), Bench(tmp_path).status("one")) == (FAILED, PASSED)


def gone(pid: int) -> bool:
    """Also of one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_step_beyond_its_limit_is_ended_with_all_below_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    started = bench.folder / "out" / "one.json"
    bench.runner.run([step("one", ENDLESS, limit=3.0), step("two", QUICK)])
    record = bench.records.get("one")
    assert record is not None and record.status == TIMED_OUT and record.why == "after 3 s"
    assert record.watched["watts"] == [300.0, 300.0] and record.watched["host_mib"][1] > 0
    assert any("/3 s" in line for line in bench.lines)
    assert bench.status("two") == PASSED
    if started.exists():  # it may have had no time to start anything, on a busy machine
        assert gone(json.loads(started.read_text())["pid"])


def test_a_stage_has_so_much_time_and_each_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of an hour has passed at once when the first step is seen to run; the others are quick."""
    bench, passed = Bench(tmp_path), [0.0]

    def show(line: str) -> None:
        if re.search(r"long: \d+/", line):
            passed[0] = 1000.0

    own = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() + passed[0]})
    monkeypatch.setattr(gpu_run, "time", own)
    steps = [step("long", ENDLESS, limit=900.0), step("late", QUICK), step("other", QUICK, stage=2)]
    replace(bench.runner, stage_seconds=600.0, show=show).run([*steps, step("later", QUICK)])
    long, late = bench.records.get("long"), bench.records.get("late")
    assert long is not None and (long.status, long.why) == (TIMED_OUT, "after 600 s")
    assert late is not None and (late.status, late.why) == (SKIPPED, "stage 1 has no time left; call it again")
    assert (bench.status("other"), bench.status("later")) == (PASSED, SKIPPED)
    Bench(tmp_path).runner.run([step("late", QUICK)])
    assert Bench(tmp_path).status("late") == PASSED


def test_an_interrupt_keeps_what_there_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    started = bench.folder / "out" / "two.json"

    def show(line: str) -> None:
        if started.exists() and started.stat().st_size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.runner.run([step("one", QUICK)])
        replace(bench.runner, show=show).run([step("two", ENDLESS), step("three", QUICK)])
    assert (bench.status("one"), bench.status("two")) == (PASSED, INTERRUPTED)
    assert bench.records.get("three") is None
    assert gone(json.loads(started.read_text())["pid"])
    assert Bench(tmp_path).status("two") == INTERRUPTED  # on disk


def test_what_passed_before_outlives_an_interrupt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.runner.run([step("one", QUICK)])

    def show(line: str) -> None:
        if "/60 s" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(bench.runner, show=show).run([step("one", ENDLESS)], again=True)
    assert bench.status("one") == PASSED


def test_a_step_waits_for_what_it_needs(tmp_path: Path) -> None:
    bench, made = Bench(tmp_path), tmp_path / "model"
    bench.runner.run([step("folder", BROKEN, makes=made), step("served", QUICK, after=("folder",))])
    assert bench.status("served") == SKIPPED
    steps = [step("folder", MAKES, makes=made), step("served", QUICK, after=("folder",))]
    bench.runner.run(steps)
    assert (bench.status("folder"), bench.status("served")) == (PASSED, PASSED)
    (made / "part").touch()
    bench.runner.run(steps)
    assert (made / "part").exists()  # not made again
    (made / "part").unlink()
    made.rmdir()  # another machine, or a cleaned disk
    bench.runner.run(steps)
    assert made.is_dir()


def test_half_of_a_folder_is_taken_away_first(tmp_path: Path) -> None:
    bench, made = Bench(tmp_path), tmp_path / "model"
    made.mkdir()
    bench.runner.run([step("folder", MAKES, makes=made)])
    assert bench.status("folder") == PASSED


def test_the_state_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place of the old one once it is whole: who is killed while writing leaves the old one."""
    records, write = RecordFile(tmp_path / "state.json", "abc", "gpu"), Path.write_text

    def beside(self: Path, text: str) -> int:
        assert self != records.path
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", beside)
    for name in ("one", "two"):
        records.put(name, GpuRecord(status=PASSED))
    assert RecordFile(records.path, "abc", "gpu").get("one") == GpuRecord(status=PASSED)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_what_a_device_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "_told", lambda command: "70010, 1980, [N/A], 650.21, 61")
    assert gpu_device.sample() == {"memory_mib": 70010.0, "sm_mhz": 1980.0, "watts": 650.21, "celsius": 61.0}
    monkeypatch.setattr(gpu_device, "_told", lambda command: "")
    assert gpu_device.sample() == {}


def test_commands_are_shown_as_they_are_typed() -> None:
    command = [sys.executable, "-m", "bench.kernels", "--json", f"{ROOT}{os.sep}build/out.json"]
    assert shown(command) == "python -m bench.kernels --json build/out.json"
