"""Inputs that cannot be, figures that are infinite, processes that are killed: what a plan says and leaves behind."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.placement.reader import read_placement
from deploy.planner.answer import PlannedPlacement
from deploy.planner.asking import read_question
from deploy.planner.attainment import Attainment, arriving, offered
from deploy.planner.drawn import ranking, verdict
from deploy.planner.machines import MACHINES, Machines
from deploy.planner.placements import InstanceShape, aggregated
from deploy.planner.probing import ProbeStore, RateProbe
from deploy.planner.rate_search import FoundGoodput
from deploy.planner.simulated import SimulatedModel
from deploy.planner.written import placement_file
from deploy.simulator.traffic import traffic_of
from tests.deploy.planner.questions import OPT, answered, load, question
from tests.deploy.planner.test_written import parsed

ONE = aggregated(InstanceShape(), 1, 512)
MODEL = 'name = "m"\nlayers = 32\nheads = 32\nkv_heads = 8\nhidden = 4096\nweights = 16e9\nkv_bytes = 131072\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[hardware]\nnodes = 1.5", "nodes of the hardware must be a whole number above 0, not 1.5"),
        ("[hardware]\nmemory_bandwidth = 0", "memory bandwidth of the hardware must be a number above 0"),
        ("[hardware]\nflops = nan", "flops of the hardware"),
        ("[hardware]\nmemory = 1" + "0" * 400, "memory of the hardware"),
        ("[hardware]\nname = [1]", "name [1] is no text"),
        ("[model]\n" + MODEL.replace("32", '"x"'), "layers of the model must be a whole number"),
        ("[model]\n" + MODEL + "bytes_per_weight = 0", "bytes per weight of the model"),
        ("[model]\n" + MODEL.replace("16e9", "nan"), "weights of the model"),
        ("[model]\n" + MODEL.replace('"m"', '"a\\nb = 1"'), "is no text of one line"),
        ('[model]\nname = "opt-13b"\nlayers = "x"', "layers of the model"),
        ("[traffic]\nlengths = 5", "lengths 5 is no text"),
        ("[traffic]\nworkload = [1]", "workload [1] is no text"),
        ("[traffic]\nprompt_mean = 0.1", "prompt-mean 0.1 is not a number from 1 on"),
        ("[traffic]\nprompt_mean = 1e9", "prompt-mean 1000000000.0 is not a number from 1 on, 2048 at most"),
        ("[traffic]\nprompt_mean = 2000\noutput_mean = 500", "more than the model's 2048"),
        ("[traffic]\nprompt_spread = 1e6\nprompt_mean = 5", "prompt-spread"),
        ("[search]\nseeds = 0.5", "seeds 0.5"),
        ("[search]\nestimates = 1.5", "estimates 1.5 is not a whole number"),
        ("[search]\ntp = []", "tp []: give whole numbers"),
        ("[search]\ntp = 8", "tp 8: give whole numbers"),
        ("[search]\ntp = [1.5]", "tp [1.5]: give whole numbers"),
        ("[search]\ntp = [true]", "tp [True]: give whole numbers"),
        ("[objectives]\nattainment = 2", "attainment 2 is not a number above 0, 1 at most"),
    ],
)
def test_figures_that_cannot_be_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "question.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_question(parsed(str(path)))
    assert words in str(error.value)


def test_a_byte_order_mark_is_no_part_of_a_question(tmp_path: Path) -> None:
    path = tmp_path / "question.toml"
    path.write_text("[hardware]\nnodes = 2\n", encoding="utf-8-sig")
    assert read_question(parsed(str(path))).machines.nodes == 2


def test_lengths_are_cut_by_the_model_alone(tmp_path: Path) -> None:
    path = tmp_path / "question.toml"
    path.write_text("[traffic]\nprompt_mean = 7000\noutput_mean = 10\n")
    asked = read_question(parsed(str(path), "--model", "llama-3-8b", "--ttft-ms", "5000"))
    assert set(offered(asked.load, 1.0, 0).prompt) == {7000}


def test_measured_steps_are_of_the_machines_they_were_measured_on() -> None:
    shape, table = InstanceShape(), OPT.measured[1]
    assert OPT.profile(Machines(nodes=2, cost=9.0), shape).steps is table.steps
    slow, fast = (
        OPT.profile(machines, shape) for machines in (replace(Machines(), memory_bandwidth=1e11), MACHINES["h100-80g"])
    )
    assert slow.decode_seconds(1, 500) > 5 * table.decode_seconds(1, 500)
    assert fast.prompt_seconds(512) < 0.6 * table.prompt_seconds(512)


@settings(max_examples=25)
@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1))
def test_a_models_name_is_read_as_it_was_given(name: str) -> None:
    path = f"/models/{name}"
    assert read_placement(placement_file(PlannedPlacement(ONE, FoundGoodput(), 1.0), path, Machines())).model == path


@pytest.mark.parametrize("name", ["chat", "long-mixed", "shared-prefix", "sharegpt"])
def test_requests_without_texts_are_those_of_the_trace(name: str) -> None:
    asked = load(traffic_of(name), requests=50)
    some, whole = offered(asked, 1.0, 3), arriving(asked, 50, 3)
    assert some.at == [each.at for each in whole]
    assert some.prompt == [len(each.request.prompt) for each in whole]
    assert some.output == [each.output_tokens for each in whole]
    assert some.ttft == [(each.request.slo.ttft_ms or 0) / 1e3 for each in whole]


def _probe() -> RateProbe:
    asked = question(2)
    return RateProbe(SimulatedModel((), 1.0), ONE, 2.0, asked.load, asked.goal, (0,))


def test_what_never_ended_is_kept_as_never(tmp_path: Path) -> None:
    endless = (0.1,) * 19 + (float("inf"),)
    found = Attainment(rate=2, offered=80, ttft=0.9, tpot=1, joint=0.9, ttft_seconds=endless, tpot_seconds=endless)
    with ProbeStore(tmp_path / "probes.jsonl") as store:
        store.put(_probe(), found)
    with ProbeStore(tmp_path / "probes.jsonl", resume=True) as store:
        assert store.get(_probe()) == found


def test_a_line_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    path, found = tmp_path / "probes.jsonl", Attainment(rate=2, offered=80, ttft=1, tpot=1, joint=1)
    path.write_bytes(b'{"key": "torn')
    with ProbeStore(path, resume=True) as store:
        store.put(_probe(), found)
    with ProbeStore(path, resume=True) as store:
        assert store.get(_probe()) == found


def test_two_plans_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with ProbeStore(tmp_path / "probes.jsonl") as store:
        store.put(_probe(), Attainment(rate=2, offered=80, ttft=1, tpot=1, joint=1))
        with pytest.raises(ValueError, match=r"another plan writes to .*: give --output another folder"):
            ProbeStore(tmp_path / "probes.jsonl")
    assert (tmp_path / "probes.jsonl").read_bytes()


@pytest.mark.parametrize("estimates", [1, 3])
def test_a_verdict_compares_both_kinds_however_few_are_measured(estimates: int) -> None:
    answer, _ = answered(question(8, estimates=estimates))
    assert {each.placement.split for each in answer.ranked} == {True, False}
    assert "so it is" not in verdict(answer)


def test_who_fails_in_the_simulator_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = set[str]()

    def attainment(model, placement, load, rate, seed, goal):  # type: ignore[no-untyped-def]
        if not placement.split and len(failed) < 2:
            failed.add(str(placement))
        share = 0.0 if str(placement) in failed or rate > 4 else 1.0
        values = () if not share else (0.01,) * 20
        return Attainment(
            rate=rate, offered=80, ttft=share, tpot=share, joint=share, ttft_seconds=values, tpot_seconds=values
        )

    monkeypatch.setattr(SimulatedModel, "attainment", attainment)
    answer, _ = answered(question(4, finalists=1, least_rate=2.0))
    best, mixed = answer.best(), answer.best(False)
    assert len(failed) == 2 and best is not None and mixed is not None
    assert mixed.source == "simulated" and mixed.goodput >= 2
    assert {each.what for each in answer.rejected if "(simulated)" in each.reason} == failed
    assert not failed & {str(each.placement) for each in answer.ranked}
    assert verdict(answer)


def test_too_many_placements_are_an_error_before_memory_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.planner.search.MOST", 50)
    with pytest.raises(ValueError, match="16 devices give over 50 placements: plan fewer"):
        answered(question(16))


def test_a_table_fits_a_terminal_of_80_columns() -> None:
    from rich.console import Console

    answer, _ = answered(question(4))
    written = io.StringIO()
    Console(file=written, width=80).print(ranking(answer, width=80))
    text = written.getvalue()
    assert "…" not in text and "TPOT p90" in text and max(map(len, text.splitlines())) <= 80


POOL = """
import os, sys
from deploy.planner.probing import ProbeStore, RateProber
from tests.deploy.planner.questions import question
if __name__ == "__main__":
    asked = question(2)
    with ProbeStore(None) as store, RateProber(asked.load, asked.goal, (0,), store, 1) as prober:
        print(prober._pool.submit(os.getpid).result(), flush=True)
        sys.stdin.read()
"""


def test_processes_end_with_the_plan_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(POOL)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as plan:
        assert plan.stdout is not None
        watched = os.pidfd_open(int(plan.stdout.readline()))
        plan.send_signal(signal.SIGKILL)
        plan.wait()
    assert select.select([watched], [], [], 60)[0], "a process that measures has outlived its plan"
    os.close(watched)
