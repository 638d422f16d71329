"""Kernels and served stages of the GPU benchmark go through their motions on a CPU: the figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_rows import kernel_rows, served_rows
from bench.gpu_stages import INTERPRETED, GpuStep, PlanPlaces, miniature_plan
from bench.own_server import ROOT
from bench.random_folder import write_folder


def run(name: str, places: PlanPlaces) -> dict[str, Any]:
    """A step of the miniature, by its command in the plan; the figures it leaves."""
    (step,) = (one for one in miniature_plan(places) if one.name == name)
    places.out.mkdir(exist_ok=True)
    done = subprocess.run(command(step, places), cwd=ROOT, env=os.environ | dict(step.environment), check=False)
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(places.json(name).read_text())
    return found


def command(step: GpuStep, places: PlanPlaces) -> list[str]:
    module, *rest = step.command
    return [sys.executable, "-m", module, "--json", str(places.json(step.name)), *rest]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
@pytest.mark.thorough
def test_every_kernel_is_timed(tmp_path: Path) -> None:
    assert INTERPRETED["TRITON_INTERPRET"] == "1"
    figures = run("kernels-tiny", PlanPlaces(models=tmp_path, out=tmp_path / "out"))
    assert all(row["seconds"] > 0 and row["share"] > 0 for row in figures["rows"])
    names = "\n".join(row.name for row in kernel_rows(figures))
    for kernel in (
        "int8 linear qkv, 32",
        "int8 linear down, 1",
        "decode",
        "prompt",
        "RMSNorm",
        "SiLU",
        "4 experts, int8, 1",
        "top-p",
    ):
        assert kernel in names


@pytest.mark.slow
@pytest.mark.thorough
def test_a_handoff_is_measured_and_tokens_are_compared(tmp_path: Path) -> None:
    places = PlanPlaces(models=tmp_path, out=tmp_path / "out")
    write_folder(tmp_path / "mini-bfloat16", "mini", "bfloat16", torch.device("cpu"))
    figures = run("split-bfloat16", places)
    assert figures["handoff"]["handoffs"] == 2 and figures["handoff"]["bytes_each"] > 0
    assert figures["during_handoffs"]["handoffs"] == 2 + 4  # of the streams, and of the prompts beside them
    assert [len(tokens) for tokens in figures["tokens"]] == [48] * 4
    assert len(served_rows("split-bfloat16", {"split-bfloat16": figures})) == 7
