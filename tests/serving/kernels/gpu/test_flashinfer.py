"""Prompts attended by a stand-in for FlashInfer, over our pages as they lie."""

from __future__ import annotations

import ast
import inspect
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
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.prompt_trial import PromptSample
from serving.kernels.gpu.prompts import PromptShape
from tests.fakes.paged_prefill import VERSION, BatchPrefillWithPagedKVCacheWrapper, flashinfer_installed
from tests.serving.kernels.gpu.conftest import GPU, INTERPRETED
from tests.serving.kernels.gpu.formulas import CLOSE, Pages, error

DEVICE = torch.device("cuda" if GPU and not INTERPRETED else "cpu")
SCALE = 0.11
SHAPE = PromptShape(heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)


@pytest.fixture
def flashinfer() -> Iterator[ModuleType]:
    with flashinfer_installed() as library:
        yield library


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
    sample = PromptSample.of(SHAPE, 5, 30, DEVICE)
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
