"""What is kept of a FlashInfer, by a stand-in, that ends the processes which try it; what may pass is not kept."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import TimeoutExpired
from types import ModuleType

import pytest

from serving.kernels.gpu import prompt_choice
from serving.kernels.gpu.prompt_choice import choose_prompts
from serving.kernels.gpu.prompt_trial import PromptWork
from serving.kernels.gpu.prompt_verdicts import Verdicts
from serving.kernels.gpu.prompts import LargeSteps, TritonPrompts
from tests.fakes.paged_prefill import flashinfer_installed
from tests.serving.kernels.gpu.test_prompt_choice import DEVICE, SHAPE, WORK, Failing, Timed


@pytest.fixture
def flashinfer() -> Iterator[ModuleType]:
    with flashinfer_installed() as library:
        yield library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("serving.kernels.gpu.prompt_verdicts.cache_folder", lambda: tmp_path)
    return tmp_path


TRIES = """
import os, sys
from pathlib import Path
from serving.kernels.gpu import prompt_verdicts
from tests.fakes.paged_prefill import BatchPrefillWithPagedKVCacheWrapper, flashinfer_installed
from tests.serving.kernels.gpu import test_prompt_choice as tests
prompt_verdicts.cache_folder = lambda: Path(sys.argv[1])
from deploy.runtime.signals import leave_at_once_on_signals
leave_at_once_on_signals()
BatchPrefillWithPagedKVCacheWrapper.plan = lambda self, **_: os.kill(os.getpid(), int(sys.argv[2]))
with flashinfer_installed():
    tests.choose_prompts("auto", tests.WORK, tests.DEVICE)
print("left")
"""


def crashed(cache: Path, by: signal.Signals = signal.SIGABRT) -> bool:
    """Whether a process that starts with a library which ends it, or that is ended over it, does end."""
    command = [sys.executable, "-c", TRIES, str(cache), str(int(by))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGABRT), done.stderr
    return done.stdout != "left\n"


@pytest.mark.parametrize("before", ["never tried", "found to be worth it"])
def test_a_library_that_ends_the_process_is_left_after_two(
    before: str, flashinfer: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: a worker that it had ended was started again, tried it again, and so for ever."""
    clock = Timed(monkeypatch, 1.0, 0.5)
    if before != "never tried":
        choose_prompts("auto", WORK, DEVICE, clock)
    assert [crashed(cache) for _ in range(4)] == [True, True, False, False]
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_prompts("auto", WORK, DEVICE, clock), TritonPrompts)
    assert "2 times processes have ended while they tried it, when it was tried before" in caplog.text
    choose_prompts("flashinfer", WORK, DEVICE, clock)
    assert isinstance(choose_prompts("auto", WORK, DEVICE, clock), LargeSteps), "who demands it has it tried"


def test_crashes_count_that_follow_each_other(
    flashinfer: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one shape: somebody may have ended a process that just tried it. One that still tries has not crashed."""
    clock = Timed(monkeypatch, 1.0, 0.5)
    assert crashed(cache)
    assert isinstance(choose_prompts("auto", WORK, DEVICE, clock), LargeSteps)
    verdicts = Verdicts.of(prompt_choice._kind(DEVICE), cache)
    assert not verdicts.crashes(str(WORK.key)) and not list(cache.glob("*.trying"))
    with verdicts.trying(str(WORK.key)), verdicts.trying(str(WORK.key)):
        assert not verdicts.crashes(str(WORK.key))
        assert isinstance(choose_prompts("auto", WORK, DEVICE, clock), LargeSteps)
    assert crashed(cache) and crashed(cache)
    other = PromptWork(shape=SHAPE, windows=(None,), most_tokens=20, longest=50)
    assert isinstance(choose_prompts("auto", other, DEVICE, clock), LargeSteps), "of another shape"


def test_a_process_that_is_asked_to_leave_has_not_crashed(flashinfer: ModuleType, cache: Path) -> None:
    """As one whose start takes long often is."""
    assert crashed(cache, signal.SIGTERM)
    assert not list(cache.glob("*.trying"))


MARKS = """
import sys
from pathlib import Path
from serving.kernels.gpu.prompt_verdicts import Verdicts
with Verdicts.of({}, Path(sys.argv[1])).trying("work"):
    print("trying", flush=True)
    sys.stdin.read()
"""


def ended_together(cache: Path, count: int) -> None:
    """Processes that try at the same time are killed: ranks of a worker, or all workers of a host."""
    command = [sys.executable, "-c", MARKS, str(cache)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == b"trying\n"
    for process in running:
        process.kill()
        process.communicate()


def test_processes_that_end_together_are_one_crash(cache: Path) -> None:
    """One of them takes the others with it, or a host ends all; what tries after that may crash once more."""
    verdicts = Verdicts.of({}, cache)
    ended_together(cache, 2)
    assert verdicts.crashes("work") == 1
    ended_together(cache, 1)
    assert verdicts.crashes("work") == 2
    verdicts.forget_crashes("work")
    assert verdicts.crashes("work") == 0 and not list(cache.glob("*.trying"))


def test_a_mark_that_somebody_removes_stops_no_start(cache: Path) -> None:
    """Who empties the folder, or takes it for that of a process which has just let go of it."""
    with Verdicts.of({}, cache).trying("work"):
        [mark] = cache.glob("*.trying")
        mark.unlink()


@pytest.mark.parametrize(
    "failure",
    [
        TimeoutExpired("nvcc", 9),
        TimeoutError(),
        ConnectionResetError(),
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        OSError(28, "No space left on device"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_what_may_pass_is_not_kept(
    failure: Exception, flashinfer: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Failing(monkeypatch)
    monkeypatch.setattr(library, "fail", lambda: raised(failure))
    assert isinstance(choose_prompts("auto", WORK, DEVICE), TritonPrompts)
    assert not list(cache.glob("*.json"))
    library.mend()
    assert isinstance(choose_prompts("auto", WORK, DEVICE, Timed(monkeypatch, 1.0, 0.5)), LargeSteps)


def raised(failure: Exception) -> None:
    raise failure


def test_a_verdict_holds_for_all_sources_it_was_measured_with() -> None:
    """Every module of ours that the trial reaches and that attends, or says what it is tried with."""
    reached = set(prompt_choice.SOURCES)
    for name in ("prompt_trial.py", "prompts.py", "flashinfer_prompts.py"):
        text = (Path(prompt_choice.__file__).parent / name).read_text()
        found = re.findall(r"from serving\.kernels\.gpu\.(\w+) import", text)
        reached |= {f"{module}.py" for module in found}
    assert reached - {"launch.py"} == set(prompt_choice.SOURCES)
