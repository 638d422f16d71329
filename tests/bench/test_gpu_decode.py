"""The decode benchmark goes through its motions on a CPU, counts what a step reads, and says what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench import gpu_decode
from bench.gpu_decode import DecodeReport, fill_randomly, graph_sizes, main, measure, parse
from bench.random_model import SHAPES, llama, random_model, step_weight_bytes, weight_bytes
from serving.model.moe_spec import MoeSpec

ROOT = Path(__file__).resolve().parents[2]
TINY = llama(**SHAPES["tiny"])
HIDDEN, INNER, VOCAB, LAYERS = 32, 64, 100, 2
HEADS = 2 * 16
ROWS = (HEADS + 2 * 16) + HIDDEN + 2 * INNER + HIDDEN  # of a layer's four matrices
INPUTS = (HEADS + 2 * 16) * HIDDEN + HIDDEN * HEADS + 2 * INNER * HIDDEN + HIDDEN * INNER


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
@pytest.mark.thorough
def test_the_way_of_a_measurement(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = ["--shape", "tiny", "--batches", "2", "--contexts", "20", "--steps", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_decode", *command, str(out)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["weights"], row["batch"], row["context"]) for row in rows] == [("int8", 2, 20), ("bfloat16", 2, 20)]
    kv = LAYERS * 2 * 2 * 16 * 2 * 20  # layers, k and v, bytes of a number, dimensions, sequences, tokens
    norms = 2 * HIDDEN * (2 * LAYERS + 1)
    assert rows[0]["step_bytes"] == LAYERS * (INPUTS + 4 * ROWS) + 2 * VOCAB * HIDDEN + norms + kv
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["step_ms"])
        least = row["step_bytes"] / row["copy_bytes_per_second"] * 1e3
        assert row["roofline_share"] == pytest.approx(least / row["step_ms"])


def test_a_step_reads_the_experts_that_its_rows_meet() -> None:
    moe = MoeSpec(experts=4, top_k=1, intermediate=16, sparse=(False, True))
    model = random_model(replace(TINY, moe=moe), "bfloat16", torch.bfloat16, torch.device("cpu"))
    each = 2 * 3 * HIDDEN * 16
    others = weight_bytes(model) - 4 * each
    assert step_weight_bytes(model, 1) == others + each
    assert step_weight_bytes(model, 2) == others + 4 * each - round(4 * each * 0.75**2)
    assert step_weight_bytes(model, 1000) == weight_bytes(model)


def test_a_tied_head_reads_the_embedding() -> None:
    model = random_model(TINY, "bfloat16", torch.bfloat16, torch.device("cpu"))
    plain = weight_bytes(model)
    assert plain == 2 * (LAYERS * INPUTS + VOCAB * HIDDEN + HIDDEN * (2 * LAYERS + 1))
    tied = random_model(replace(TINY, tied_embeddings=True), "bfloat16", torch.bfloat16, torch.device("cpu"))
    assert weight_bytes(tied) == plain


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs" in capsys.readouterr().err


def test_contexts_that_the_steps_do_not_fit_into_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--contexts", "16", "--steps", "64"])
    assert "contexts longer than half the steps" in capsys.readouterr().err


def test_nothing_of_the_first_model_is_left_when_the_second_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        """Refers to itself, as a forward and its graphs do."""

        def __init__(self) -> None:
            self.own = self

    made: list[weakref.ref[Held]] = []

    def measured(options: Namespace, device: torch.device, weights: str, rate: float, report: DecodeReport) -> None:
        assert [one for one in made if one() is not None] == []
        made.append(weakref.ref(Held()))

    monkeypatch.setattr(gpu_decode, "measure_weights", measured)
    monkeypatch.setattr(gpu_decode, "COPIED_BYTES", 1 << 12)
    measure(parse(["--shape", "tiny"]), torch.device("cpu"), DecodeReport(device="", shape="tiny"))
    assert len(made) == 2


def test_kv_and_what_is_copied_are_no_zeros() -> None:
    planes = [torch.zeros(3, 4, 2, 8, dtype=torch.int8), torch.zeros(3, 4, 2), torch.zeros(3, 4, 2, 8).bfloat16()]
    fill_randomly([planes])
    assert all(plane.unique().numel() > 10 for plane in planes)
    assert float(planes[1].min()) > 0


def test_graphs_are_those_a_worker_replays() -> None:
    plain = graph_sizes(parse(["--batches", "1", "64", "128", "--contexts", "1024", "4096"]))
    assert plain.sequences == (1, 64, 128)
    assert plain.contexts == (1024, 4096, 4096 + 32 + 2)
    assert plain.fit(64, 1025) == (64, 4096)  # a little beyond a captured context the next one is replayed
    long = graph_sizes(parse(["--batches", "100", "--contexts", "1024", "--max-model-len", "131072"]))
    assert long.sequences == (100,)
    assert long.contexts == (1024, 4096, 131072)
    assert graph_sizes(parse(["--contexts", "1024", "--graph-contexts", "131072"])).contexts == (131072,)


def test_graphs_that_end_before_the_context_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--contexts", "1024", "--graph-contexts", "1024"])
    assert "graphs end before" in capsys.readouterr().err
