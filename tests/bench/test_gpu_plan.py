"""The plan of the GPU benchmark: limits, what steps need of each other, what is to be brought along; and its page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu_page import Recorded, cells, page, plan_text, rows
from bench.gpu_rows import BELOW, BEYOND, WITHIN, judged, kernel_rows, served_rows
from bench.gpu_run import FAILED, GRACE, PASSED, GpuRecord, argv
from bench.gpu_served import compared, total, waited_ms
from bench.gpu_served import parser as served_parser
from bench.gpu_stages import STAGE_SECONDS, STAGES, PlanPlaces, chosen_steps, cuda_plan, lacking, miniature_plan
from bench.own_server import ROOT
from bench.sse import Outcome

PLACES = PlanPlaces(models=Path("/models"), out=Path("/out"), sanitizer="/bin/compute-sanitizer")
PLANS = {"cuda": cuda_plan(PLACES), "miniature": miniature_plan(PLACES)}
FACTS = {"name": "a device", "driver": "1"}


@pytest.mark.parametrize("name", PLANS)
def test_every_stage_can_end_in_time_alone_with_what_it_needs(name: str) -> None:
    plan = PLANS[name]
    assert {step.stage for step in plan} == set(STAGES)
    for stage in STAGES:
        steps = chosen_steps(plan, [stage])
        assert sum(step.expected for step in steps) <= 0.7 * STAGE_SECONDS < 540 - GRACE
        others = [step.limit for step in steps if step.stage != stage]  # what it needs of another stage comes on top
        assert not others or sum(step.limit for step in steps) <= STAGE_SECONDS
        assert all(step.expected < step.limit for step in steps)


@pytest.mark.parametrize("name", PLANS)
def test_what_a_step_needs_comes_before_it(name: str) -> None:
    for stages in ([1], [4], [5], [3, 5], list(STAGES)):
        steps = chosen_steps(PLANS[name], stages)
        seen: set[str] = set()
        for step in steps:
            assert set(step.after) <= seen
            seen.add(step.name)
        assert len(seen) == len(steps)
        assert {step.name for step in PLANS[name] if step.stage in stages} <= seen


def test_correctness_comes_first_and_int8_products_last_of_it() -> None:
    names = [step.name for step in PLANS["cuda"] if step.stage == 1]
    assert names == ["test-kernels", "test-forward", "sanitizer", "test-experts", "test-int8"]
    assert [step.stage for step in PLANS["cuda"]] == sorted(step.stage for step in PLANS["cuda"])
    without = cuda_plan(PlanPlaces(models=Path("/models"), out=Path("/out")))
    assert "sanitizer" not in {step.name for step in without}


@pytest.mark.parametrize("name", PLANS)
def test_commands_are_understood(name: str) -> None:
    """Each benchmark's own parser takes what the plan tells it, and the file of its figures."""
    from bench import gpu_decode

    for step in PLANS[name]:
        command = argv(step, PLACES)
        own = command[command.index(step.command[0]) + 1 :]
        if step.command[0] == "bench.gpu_decode":
            assert gpu_decode.parse(own).json == PLACES.json(step.name)
        if step.command[0] == "bench.gpu_served":
            told = served_parser().parse_args(own)
            assert told.json == PLACES.json(step.name)
            assert told.serve[0].startswith("--")
            assert told.start_seconds <= step.limit
        if step.command[0] == "pytest":
            for path in (word for word in own if word.startswith("tests/")):
                assert (ROOT / path).exists()


def test_the_plan_is_printed_and_says_what_is_not_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "device_facts", lambda: {"name": "CPU"})
    monkeypatch.setattr(gpu, "import_error", lambda stages: "")
    assert gpu.main(["--plan", "--device", "cuda", "--stages", "3", "5", "--commit", "c", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "stage 3, whole decode steps: about 360 s, at most 525 s" in told
    assert "stage 4, a mixed worker: about 40 s" in told  # the folder that stage 5 needs
    assert "kernels-attention" not in told
    assert "FP8: not built" in told
    assert "python -m bench.gpu_decode" in told and str(ROOT) not in told.replace(str(tmp_path), "")
    assert list(tmp_path.iterdir()) == []


def test_what_has_passed_is_said_in_the_plan() -> None:
    steps = chosen_steps(PLANS["miniature"], [2])
    commands = dict.fromkeys((step.name for step in steps), "run it")
    assert "(passed before)" in plan_text(steps, {"kernels-tiny": True}, commands)
    assert "(passed before)" not in plan_text(steps, {}, commands)


def test_what_is_to_be_brought_along_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\ndependencies = ["torch>=2.11", "grpcio>=1.85.1", "uvloop>=0.21; platform_system != \'Windows\'",'
        ' "llguidance>=1.9,<2"]\n[project.optional-dependencies]\ngpu = ["triton>=3.4"]\n'
    )
    here = {"torch": "2.11.0+cu128", "grpcio": "1.80.0", "llguidance": "1.10", "triton": "3.6.0"}
    assert lacking(file, [2], here) == ["grpcio>=1.85.1 (here: 1.80.0)", "uvloop>=0.21"]
    assert "pytest-asyncio" in lacking(file, [1], here)


def test_nothing_runs_where_something_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "device_facts", lambda: {"name": "CPU"})
    monkeypatch.setattr(gpu, "SERVER_MODULES", ("no_such_module",))
    assert gpu.main(["--out", str(tmp_path), "--commit", "c", "--stages", "2"]) == gpu.UNUSABLE
    assert "No module named 'no_such_module'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_runs_where_something_is_lacking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "device_facts", lambda: {"name": "CPU"})
    monkeypatch.setattr(gpu, "lacking", lambda pyproject, stages: ["gguf>=0.17"])
    assert gpu.main(["--out", str(tmp_path), "--commit", "c"]) == gpu.UNUSABLE
    assert "gguf>=0.17" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_asked_for_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "device_facts", lambda: {"name": "CPU"})
    assert gpu.main(["--device", "cuda"]) == gpu.UNUSABLE
    assert "no CUDA device" in capsys.readouterr().err


def test_sources_that_differ_have_another_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    file = tmp_path / "bench" / "one.py"
    file.write_text("1")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "commit", lambda: "abc+")
    first = gpu.revision(None)
    file.write_text("2")
    second = gpu.revision(None)
    assert first != second and first.startswith("abc+") and second.startswith("abc+")
    monkeypatch.setattr(gpu, "commit", lambda: "")
    assert gpu.revision(None) == second.removeprefix("abc")
    assert gpu.revision("mine") == "mine"


@pytest.mark.parametrize(
    ("name", "share", "verdict"),
    [
        ("decode attention 64 x 4096, bfloat16", 0.74, BELOW),
        ("decode attention 64 x 4096, bfloat16", 0.75, WITHIN),
        ("decode attention 64 x 4096, bfloat16", 0.85, BEYOND),
        ("decode attention 64 x 4096, int8", 0.1, "—"),
        ("prompt attention 1 x 8192, bfloat16", 0.3, BELOW),
        ("int8 linear qkv, 4096 rows", 0.76, WITHIN),
        ("int8 linear 8192 x 8192 x 8192", 0.74, BELOW),
        ("int8 linear down, 64 rows", 0.6, WITHIN),
        ("step bfloat16, 1 x 1024", 0.76, WITHIN),
        ("step bfloat16, 64 x 1024", 0.1, "—"),
    ],
)
def test_what_the_review_expected(name: str, share: float, verdict: str) -> None:
    assert judged(name, share)[1] == verdict


def test_names_of_expectations_are_names_of_rows() -> None:
    """A kernel that is called something else would never be judged."""
    from bench.kernel_bench import KernelSizes

    sizes = KernelSizes()
    assert (64, 4096) in sizes.decodes and sizes.many == 4096 and sizes.square == 8192
    assert sizes.few == (1, 8, 16, 32, 64) and sizes.sampled == 256


KERNEL = {"name": "int8 linear qkv, 4096 rows", "seconds": 1e-4, "rate": 900.0, "ceiling": 1000.0, "unit": "TOP/s"}
SERVED: dict[str, Any] = {
    "ready_s": 29.0,
    "first_answer_s": 29.5,
    "long_prompts": {"tokens": 4096, "ttft_ms": 150.0},
    "concurrency_8": {"itl_ms": 10.0, "tpot_ms": 11.0},
    "handoff": {"bytes_each": 2**29, "exposed_bytes_per_second": 6e9},
    "during_handoffs": {"sustained_bytes_per_second": 2e9, "streams": 8, "itl_ms": 20.0, "tpot_ms": 25.0},
    "same_tokens": {"equal": 3, "of": 4, "differs": "text 2 from token 7 on"},
}
STEP_ROW = {
    "weights": "bfloat16",
    "batch": 8,
    "context": 1024,
    "step_ms": 8.0,
    "tokens_per_second": 1000.0,
    "roofline_share": 0.7,
    "graph_context": 4096,
    "step_bytes": 16e9,
    "copy_bytes_per_second": 4e12,
}


def test_served_figures_stand_beside_the_bare_steps_and_the_link() -> None:
    figures = {
        "split-bfloat16": SERVED,
        "link": {"copies": {"to_host": 20e9, "to_device": 20e9}},
        "steps-bfloat16": {"rows": [STEP_ROW]},
    }
    by_name = {row.name.removeprefix("split-bfloat16: "): row for row in served_rows("split-bfloat16", figures)}
    assert by_name["TPOT at 8"].share == pytest.approx(0.8)
    handoff = by_name["handoff of 512.0 MiB, by what second tokens wait"]
    assert handoff.share == pytest.approx(0.6) and handoff.verdict == WITHIN
    assert by_name["TPOT of 8 streams during handoffs"].share == pytest.approx(0.5)
    assert by_name["tokens as mixed gives"].verdict == "differ"
    second = {row.name: row for row in served_rows("mixed-bfloat16", {"mixed-bfloat16": SERVED})}
    assert second["mixed-bfloat16: start to ready"].verdict == WITHIN
    assert second["mixed-bfloat16: TPOT at 8"].share is None  # no stage 3, no share


def test_the_page_has_every_figure_and_every_failure() -> None:
    by_name = {step.name: step for step in PLANS["cuda"]}
    kernels = GpuRecord(
        status=FAILED,
        seconds=3.0,
        command="python -m bench.kernels",
        why="exit status 1",
        tail="out of memory",
        figures={"rows": [{**KERNEL, "share": 0.9, "note": ""}]},
        watched={"memory_mib": [1.0, 7000.0], "watts": [90.0, 650.0]},
    )
    tests = GpuRecord(status=PASSED, seconds=60.0, tail="....\n130 passed, 2 skipped in 60 s")
    recorded: Recorded = [
        (by_name["test-kernels"], tests),
        (by_name["kernels-linear"], kernels),
        (by_name["steps-int8"], None),
    ]
    text = page(FACTS, "abc", "now", "python -m bench.gpu", recorded, miniature=False)
    assert "| int8 linear qkv, 4096 rows | 100 µs, 900 TOP/s | 1,000 TOP/s | 90% | 850–1,100 TOP/s" in text
    assert "| test-kernels | 130 passed, 2 skipped in 60 s |" in text
    assert "| kernels-linear | failed in 3 s |" in text and "    out of memory" in text
    assert "7,000 device MiB, 90–650 W" in text
    assert re.search(r"steps-int8 \| .* \| not run", text)
    assert "FP8: not built" in text and "driver 1" in text and "commit abc" in text
    assert "No figure" not in text


def test_in_miniature_nothing_is_judged() -> None:
    row = kernel_rows({"rows": [{**KERNEL, "share": 0.9, "note": ""}]})[0]
    assert cells(row, miniature=False)[-1] == WITHIN
    assert cells(row, miniature=True)[-1] == "means nothing"
    assert "No figure here means anything" in page(FACTS, "abc", "now", "", [], miniature=True)
    assert rows([]) == []


def test_a_library_beside_a_kernel_is_on_the_page() -> None:
    row = kernel_rows({"rows": [{**KERNEL, "share": 0.9, "note": "1.30x FlashInfer's"}]})[0]
    assert cells(row, miniature=False)[1].endswith(" TOP/s, 1.30x FlashInfer's")


def test_texts_are_compared_token_by_token() -> None:
    assert compared([[1, 2], [3]], [[1, 2], [3]]) == {"equal": 2, "of": 2, "differs": ""}
    assert compared([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == {"equal": 1, "of": 2, "differs": "text 1 from token 1 on"}
    assert compared([[1]], [[1, 2]])["differs"] == "text 0 from token 1 on"


def test_series_of_a_metric_are_summed_and_others_left_out() -> None:
    text = '# HELP a_total x\na_total{transport="shm"} 3.0\na_total{transport="grpc"} 4.5\na_total_more 9\n'
    assert total(text, "a_total") == 7.5


def test_a_handoff_is_what_second_tokens_wait_longer() -> None:
    outcomes = [
        Outcome(prompt_tokens=1, max_tokens=4, gaps=[0.050, 0.010]),
        Outcome(prompt_tokens=1, max_tokens=4, gaps=[0.070, 0.020]),
    ]
    assert waited_ms(outcomes) == pytest.approx(60.0 - 15.0)
