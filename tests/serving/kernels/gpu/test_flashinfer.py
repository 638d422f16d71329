"""Prompts attended by a stand-in for FlashInfer, over our pages as they lie; and when it is chosen, tried and left."""

from __future__ import annotations

import ast
import inspect
import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench import kernels
from bench.kernel_bench import TINY, Ceilings, KernelBench
from serving.kernels import gpu
from serving.kernels.gpu import prompt_choice
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.prompt_choice import PromptWork, choose_prompts
from serving.kernels.gpu.prompts import PromptShape, TritonPrompts, TritonStep
from tests.fakes.paged_prefill import VERSION, BatchPrefillWithPagedKVCacheWrapper, flashinfer_installed
from tests.serving.kernels.gpu.conftest import GPU, INTERPRETED
from tests.serving.kernels.gpu.formulas import CLOSE, Pages, error

DEVICE = torch.device("cuda" if GPU and not INTERPRETED else "cpu")
SCALE = 0.11
SHAPE = PromptShape(heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
WORK = PromptWork(shape=SHAPE, windows=(None, 24), most_tokens=20, longest=50)


@pytest.fixture
def flashinfer() -> Iterator[ModuleType]:
    with flashinfer_installed() as library:
        yield library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("serving.kernels.tuned_tiles.cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3)])
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_steps_of_any_sequences(
    data: st.DataObject, heads: tuple[int, int], window: int | None, flashinfer: ModuleType
) -> None:
    """Every sequence's rows, those with one query among the prompts too; where no token lies there is NaN."""
    from serving.kernels.gpu.flashinfer_prompts import FlashInferPrompts

    counts = data.draw(st.lists(st.sampled_from([1, 1, 2, 7, 20]), min_size=1, max_size=5))
    contexts = [count + data.draw(st.sampled_from([0, 1, 13, 16, 40])) for count in counts]
    pages = Pages(contexts, 16, heads[1], 16, torch.bfloat16, DEVICE)
    batch = pages.batch([n - count for n, count in zip(contexts, counts, strict=True)], counts)
    q = torch.randn(sum(counts), heads[0], 16).bfloat16().to(DEVICE)
    shape = PromptShape(heads=heads[0], kv_heads=heads[1], head_dim=16, block_size=16, dtype=torch.bfloat16)
    prompts = FlashInferPrompts(shape, DEVICE).step(batch)
    for _ in ("a layer", "the next"):
        out = gpu.paged_attention(q, *pages.planes, batch, SCALE, window, prompts=prompts)
        assert error(out, pages.expected(q, counts, SCALE, window)) < CLOSE[torch.bfloat16]


def test_a_step_is_planned_once_for_each_window(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.kernels.gpu.flashinfer_prompts import FlashInferPrompts

    planned: list[int] = []
    plan = BatchPrefillWithPagedKVCacheWrapper.plan

    def counting(self: Any, **arguments: Any) -> None:
        planned.append(arguments["window_left"])
        plan(self, **arguments)

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", counting)
    prompts = FlashInferPrompts(SHAPE, DEVICE)
    sample = prompt_choice.PromptSample.of(SHAPE, 5, 30, DEVICE)
    for _ in range(2):
        sample.attended(prompts, [None, 24, None, 24])
    assert planned == [-1, 23] * 2


def test_pages_are_not_copied(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.kernels.gpu.flashinfer_prompts import FlashInferPrompts

    given_pages: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(
        BatchPrefillWithPagedKVCacheWrapper, "run", lambda self, q, kv, *, out: given_pages.append(kv) or out
    )
    pages = Pages([30], 16, 2, 16, torch.bfloat16, DEVICE)
    batch = pages.batch([10], [20])
    paged = Paged(*pages.planes, None, None)
    q = torch.randn(20, 4, 16).bfloat16().to(DEVICE)
    FlashInferPrompts(SHAPE, DEVICE).step(batch).attend(q, paged, SCALE, None, torch.empty_like(q))
    assert [k.data_ptr() for k, _ in given_pages] == [pages.planes[0].data_ptr()]
    assert [v.data_ptr() for _, v in given_pages] == [pages.planes[1].data_ptr()]


class Timed:
    """A clock that a layer's attention moves: by so many seconds of Triton's kernel, and of FlashInfer."""

    def __init__(self, patch: pytest.MonkeyPatch, own: float, theirs: float) -> None:
        self.now, self.read = 0.0, 0
        for kind, method, seconds in (
            (TritonStep, "attend", own),
            (BatchPrefillWithPagedKVCacheWrapper, "run", theirs),
        ):
            patch.setattr(kind, method, self.taking(seconds, getattr(kind, method)))

    def taking(self, seconds: float, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return call(*args, **kwargs)

        return timed

    def __call__(self) -> float:
        self.read += 1
        return self.now


@pytest.mark.parametrize(("theirs", "chosen"), [(0.5, "FlashInferPrompts"), (0.95, "TritonPrompts")])
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
    (kept,) = cache.iterdir()
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
    assert len(list(cache.iterdir())) == 1


def test_it_can_be_forbidden_and_demanded(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Timed(monkeypatch, 1.0, 2.0)
    assert isinstance(choose_prompts("triton", WORK, DEVICE, clock), TritonPrompts)
    assert type(choose_prompts("flashinfer", WORK, DEVICE, clock)).__name__ == "FlashInferPrompts"
    assert not clock.read


def refused(work: PromptWork, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Triton's kernel is taken, with one line; who demands FlashInfer hears the same."""
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_prompts("auto", work, DEVICE), TritonPrompts)
    assert [why in record.getMessage() for record in caplog.records] == [True], caplog.text
    with pytest.raises(ValueError, match="--attention-backend flashinfer: ") as told:
        choose_prompts("flashinfer", work, DEVICE)
    assert why in str(told.value)


def test_what_cannot_be_built_is_left(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(self: Any, **_: Any) -> None:
        raise RuntimeError("Could not find nvcc\nand much more")

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    refused(WORK, caplog, "does not run here: RuntimeError: Could not find nvcc")


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


@pytest.mark.skipif(not INTERPRETED, reason="the stand-in reads lengths where a graph is captured")
def test_the_benchmark_names_it_beside_our_own(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = KernelBench(DEVICE, TINY, repeats=1)
    bench.ceilings = Ceilings(bandwidth=1e9, int8=1e9, bf16=1e9)
    kernels.bench_prompts(bench)
    notes = {row["name"]: row["note"] for row in bench.rows}
    assert ["x FlashInfer's" in note for note in notes.values()] == [True, False], "INT8 KV is not its"
    monkeypatch.delattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper")
    kernels.bench_prompts(bench)
    assert bench.rows[-2]["note"] == "FlashInfer does not run: AttributeError"


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed (the extra `flashinfer`)")
def test_the_stand_in_has_the_signatures_of_the_library() -> None:
    spec = find_spec("flashinfer")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    assert next(folder.parent.glob(f"flashinfer_python-{VERSION}.dist-info"), None) is not None, "another version"
    (real,) = (
        node
        for node in ast.parse((folder / "prefill.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == BatchPrefillWithPagedKVCacheWrapper.__name__
    )
    methods = {node.name: node for node in real.body if isinstance(node, ast.FunctionDef)}  # of overloads the last
    for name in ("__init__", "plan", "run"):
        mine = inspect.signature(getattr(BatchPrefillWithPagedKVCacheWrapper, name)).parameters.values()
        theirs, defaults = (
            methods[name].args,
            [one.default for one in mine if one.default is not inspect.Parameter.empty],
        )
        assert [one.name for one in mine] == [
            one.arg for one in (*theirs.args, *([theirs.vararg] if theirs.vararg else []), *theirs.kwonlyargs)
        ]
        assert defaults == [ast.literal_eval(one) for one in (*theirs.defaults, *theirs.kw_defaults) if one is not None]
