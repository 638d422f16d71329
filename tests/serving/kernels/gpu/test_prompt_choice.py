"""When FlashInfer, by a stand-in, is chosen to attend prompts: what it was measured to be worth, how it fails, and what
of both is kept."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import TimeoutExpired
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serving.kernels.gpu import prompt_choice
from serving.kernels.gpu.prompt_choice import choose_prompts
from serving.kernels.gpu.prompt_trial import WORTH, PromptSample, PromptWork, least_worth
from serving.kernels.gpu.prompts import LargeSteps, PromptShape, TritonPrompts, TritonStep
from tests.fakes.paged_prefill import BatchPrefillWithPagedKVCacheWrapper, flashinfer_installed
from tests.serving.kernels.gpu.conftest import GPU, INTERPRETED

DEVICE = torch.device("cuda" if GPU and not INTERPRETED else "cpu")
SHAPE = PromptShape(heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
WORK = PromptWork(shape=SHAPE, windows=(None, 24), most_tokens=20, longest=50)
SMALL = PromptWork(shape=SHAPE, windows=(None,), most_tokens=6, longest=12)


@pytest.fixture
def flashinfer() -> Iterator[ModuleType]:
    with flashinfer_installed() as library:
        yield library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("serving.kernels.gpu.prompt_verdicts.cache_folder", lambda: tmp_path)
    return tmp_path


class Timed:
    """A clock that a layer's attention moves: by so many seconds of Triton's kernel, and of FlashInfer.

    Triton's kernel computes each window of a step once between two looks, and not in the rounds that follow: what comes
    of it is not used, and the interpreter takes seconds.
    """

    def __init__(self, patch: pytest.MonkeyPatch, own: float, theirs: float) -> None:
        self.now, self.read = 0.0, 0
        computed: set[object] = set()

        def own_attend(*args: Any) -> Any:
            _, q, _, _, window, *_ = args
            known = (q.data_ptr(), window) in computed
            computed.add((q.data_ptr(), window))
            return None if known and self.read % 2 else attend(*args)

        attend = TritonStep.attend
        for kind, method, seconds in (
            (TritonStep, "attend", own),
            (BatchPrefillWithPagedKVCacheWrapper, "run", theirs),
        ):
            call = own_attend if kind is TritonStep else getattr(kind, method)
            patch.setattr(kind, method, self.taking(seconds, call))

    def taking(self, seconds: float, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return call(*args, **kwargs)

        return timed

    def __call__(self) -> float:
        self.read += 1
        return self.now


@pytest.mark.parametrize(("theirs", "chosen"), [(0.5, "LargeSteps"), (0.95, "TritonPrompts")])
def test_the_quicker_one_is_chosen_and_kept(
    theirs: float,
    chosen: str,
    flashinfer: ModuleType,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Timed(monkeypatch, 1.0, theirs)
    with caplog.at_level(logging.INFO):
        assert type(choose_prompts("auto", WORK, DEVICE, clock)).__name__ == chosen
    assert f"{1 / theirs:.2f} times as quick" in caplog.text and len(caplog.records) == 1
    measured = clock.read
    assert measured
    assert type(choose_prompts("auto", WORK, DEVICE, clock)).__name__ == chosen
    assert clock.read == measured, "what was measured is not measured again"
    (kept,) = cache.glob("*.json")
    kind = json.loads(kept.read_bytes())["kind"]
    assert {"device", "triton", "flashinfer", "torch", "source"} <= kind.keys()


def test_another_shape_is_measured_for_itself_and_both_are_kept(
    flashinfer: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Timed(monkeypatch, 1.0, 0.5)
    other = PromptWork(shape=SHAPE, windows=(None,), most_tokens=20, longest=50)
    for work in (WORK, other):
        choose_prompts("auto", work, DEVICE, clock)
    measured = clock.read
    for work in (WORK, other):
        choose_prompts("auto", work, DEVICE, clock)
    assert clock.read == measured
    assert len(list(cache.glob("*.json"))) == 1


def test_it_can_be_forbidden_and_demanded(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Timed(monkeypatch, 1.0, 2.0)
    assert isinstance(choose_prompts("triton", WORK, DEVICE, clock), TritonPrompts)
    assert type(choose_prompts("flashinfer", WORK, DEVICE, clock)).__name__ == "FlashInferPrompts"
    assert not clock.read


def refused(work: PromptWork, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Triton's kernel is taken, with one line, also at the next start; who demands FlashInfer hears the same."""
    with caplog.at_level(logging.INFO):
        for _ in ("a start", "the next"):
            assert isinstance(choose_prompts("auto", work, DEVICE), TritonPrompts)
    assert [why in record.getMessage() for record in caplog.records] == [True, True], caplog.text
    with pytest.raises(ValueError, match="--attention-backend flashinfer: ") as told:
        choose_prompts("flashinfer", work, DEVICE)
    assert why in str(told.value)


class Failing:
    """A library whose plans fail, as often as they are tried."""

    def __init__(self, patch: pytest.MonkeyPatch, message: str = "Could not find nvcc\nand much more") -> None:
        self.patch, self.tries, self.message = patch, 0, message
        self._plan = BatchPrefillWithPagedKVCacheWrapper.plan
        patch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", lambda _, **__: self.fail())

    def fail(self) -> None:
        self.tries += 1
        raise RuntimeError(self.message)

    def mend(self) -> None:
        self.patch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", self._plan)


def test_what_cannot_be_built_is_left(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Failing(monkeypatch)
    refused(WORK, caplog, "does not run here: RuntimeError: Could not find nvcc")


def test_a_failure_is_kept_with_its_reason_and_tried_again_when_asked(
    flashinfer: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: a compiler was looked for, and kernels were built, at every start."""
    library = Failing(monkeypatch)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            choose_prompts("auto", WORK, DEVICE)
    assert library.tries == 1
    (kept,) = cache.glob("*.json")
    line = caplog.records[-1].getMessage()
    assert "Could not find nvcc, when it was tried before" in line and str(kept) in line
    assert "--attention-backend flashinfer tries it again" in line
    with pytest.raises(ValueError, match="Could not find nvcc"):
        choose_prompts("flashinfer", WORK, DEVICE)
    assert library.tries == 2, "who demands it has it tried"
    library.mend()
    clock = Timed(monkeypatch, 1.0, 0.5)
    assert isinstance(choose_prompts("auto", WORK, DEVICE, clock), TritonPrompts)
    choose_prompts("flashinfer", WORK, DEVICE)
    assert isinstance(choose_prompts("auto", WORK, DEVICE, clock), LargeSteps) and clock.read


def test_one_that_was_worth_it_and_fails_now_is_not_tried_at_every_start(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_prompts("auto", WORK, DEVICE, Timed(monkeypatch, 1.0, 0.5))
    for message, tries in (("CUDA error: out of memory", 3), ("Could not find nvcc", 1)):
        library = Failing(monkeypatch, message)
        for _ in range(3):
            assert isinstance(choose_prompts("auto", WORK, DEVICE), TritonPrompts)
        assert library.tries == tries
        library.mend()


CHANGES: tuple[dict[str, Any], ...] = (
    {"least": 0}, {"least": True}, {"least": "2"}, {"failed": True}, {"failed": 1}, {"reason": None}, {"more": 1},
)  # fmt: skip


def test_what_is_kept_is_believed_whole_or_not_at_all(
    flashinfer: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Timed(monkeypatch, 1.0, 0.5)
    choose_prompts("auto", SMALL, DEVICE, clock)
    (kept,) = cache.glob("*.json")
    content = json.loads(kept.read_bytes())
    ((key, entry),) = content["verdicts"].items()
    each = clock.read
    changed = (json.dumps(content | {"verdicts": {key: entry | change}}) for change in CHANGES)
    for number, text in enumerate([*changed, "{", "[]", json.dumps(content | {"verdicts": [1]})], 2):
        kept.write_text(text)
        choose_prompts("auto", SMALL, DEVICE, clock)
        assert clock.read == number * each, text


def test_of_workers_that_start_at_once_one_measures_and_all_do_what_it_found(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: each measured beside the other, and the last one's choice was kept."""
    clock = Timed(monkeypatch, 1.0, 0.5)
    measuring, second = threading.Event(), threading.Event()
    read = clock.__class__.__call__

    def slowly(self: Timed) -> float:
        if not measuring.is_set():
            measuring.set()
            second.wait(0.5)  # for as long as the other one does not get by
        return read(self)

    monkeypatch.setattr(Timed, "__call__", slowly)
    with ThreadPoolExecutor(2) as workers:
        first = workers.submit(choose_prompts, "auto", WORK, DEVICE, clock)
        assert measuring.wait(20)
        own = Timed(monkeypatch, 1.0, 2.0)
        other = workers.submit(choose_prompts, "auto", WORK, DEVICE, own)
        other.add_done_callback(lambda _: second.set())
        assert isinstance(first.result(), LargeSteps) and isinstance(other.result(), LargeSteps)
    assert not own.read


@given(most_tokens=st.integers(1, 40_000), longest=st.integers(1, 200_000))
def test_measured_steps_hold_what_they_are_made_of(most_tokens: int, longest: int) -> None:
    """Before: a worker of steps of two tokens compared sequences with fewer tokens than new ones, and found NaN."""
    work = PromptWork(shape=SHAPE, windows=(None,), most_tokens=most_tokens, longest=longest)
    assert all(3 <= tokens <= context <= 16_384 for tokens, context in work.cases)
    assert len(set(work.cases)) <= 6


@given(gains=st.dictionaries(st.integers(1, 9999), st.floats(0.5, 2.0) | st.just(float("nan")), min_size=1, max_size=6))
def test_it_attends_no_step_for_which_it_was_not_worth_it(gains: dict[int, float]) -> None:
    least = least_worth(gains)
    worth = {tokens for tokens, gain in gains.items() if gain >= WORTH}
    taken = {tokens for tokens in gains if least is not None and tokens >= least}
    assert taken <= worth and (least is None or least in gains)
    assert not {max(gains)} & worth or taken, "the largest alone would do"
    below = max((tokens for tokens in gains.keys() - taken), default=None)
    assert below is None or below not in worth, "nor is the next one left out without need"


def test_small_steps_are_measured_too_and_are_tritons_where_it_is_quicker(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: the largest step alone was measured, and the library took all."""
    clock = Timed(monkeypatch, 1.0, 0.5)
    attend = BatchPrefillWithPagedKVCacheWrapper.run

    def dear(self: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        clock.now += 3.0 * (len(q) < 32)  # what is short does not pay
        return attend(self, q, *args, **kwargs)

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "run", dear)
    work = PromptWork(shape=SHAPE, windows=(None,), most_tokens=128, longest=300)
    assert work.sizes == [128, 32, 8]
    assert work.cases == [(128, 128), (128, 300), (32, 32), (32, 300), (8, 8), (8, 300)]
    with caplog.at_level(logging.INFO):
        prompts = choose_prompts("auto", work, DEVICE, clock)
    assert "of 32 tokens and more" in caplog.text
    kinds = [type(prompts.step(PromptSample.of(SHAPE, tokens, 40, DEVICE).batch)).__name__ for tokens in (20, 26, 40)]
    assert kinds == ["TritonStep", "FlashInferStep", "FlashInferStep"], "of 26, 32 and 46 tokens in all"


class OfAnotherVersion(Exception):
    """A library's own kind of error."""


@pytest.mark.parametrize(
    "failure",
    [MemoryError("out of it"), SyntaxError("half a file"), OfAnotherVersion("sm_75"), TimeoutExpired("nvcc", 9)],
    ids=lambda failure: type(failure).__name__,
)
def test_whatever_a_library_ends_with_it_is_left(
    failure: Exception, flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(self: Any, **_: Any) -> None:
        raise failure

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    refused(WORK, caplog, f"does not run here: {type(failure).__name__}")


def test_a_library_that_fails_while_it_is_measured_is_left(
    flashinfer: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a worker on a device with little memory did not start."""
    run, calls = BatchPrefillWithPagedKVCacheWrapper.run, itertools.count()

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) > 5:
            raise RuntimeError("CUDA out of memory")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "run", failing)
    assert isinstance(choose_prompts("auto", WORK, DEVICE), TritonPrompts)
    assert next(calls) > 5 and not list(cache.glob("*.json")), "the device may have more to spare next time"


def test_a_library_that_reads_pages_in_another_order_is_left(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = BatchPrefillWithPagedKVCacheWrapper.plan

    def in_order(self: Any, **arguments: Any) -> None:
        pages = arguments["paged_kv_indices"]
        plan(self, **{**arguments, "paged_kv_indices": torch.arange(len(pages), dtype=pages.dtype)})

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", in_order)
    refused(WORK, caplog, "from those of Triton's kernel")


def test_another_version_is_left(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper")
    refused(WORK, caplog, "does not run here: AttributeError")


@pytest.mark.parametrize("wrong", [0.9, float("nan")])
def test_what_gives_other_numbers_is_left(
    wrong: float, flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = BatchPrefillWithPagedKVCacheWrapper.run
    monkeypatch.setattr(
        BatchPrefillWithPagedKVCacheWrapper, "run", lambda self, q, kv, *, out: run(self, q, kv, out=out).mul_(wrong)
    )
    refused(WORK, caplog, "from those of Triton's kernel")


def test_float32_and_a_missing_library_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wide = PromptShape(heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
    refused(PromptWork(shape=wide, windows=(None,), most_tokens=20, longest=50), caplog, "not float32")
    caplog.clear()
    monkeypatch.setattr(prompt_choice, "find_spec", lambda _: None)
    refused(WORK, caplog, "not installed (the extra `flashinfer`)")
