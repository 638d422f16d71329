"""A plan for recorded traffic: its lengths, its bursts and its objectives, and what is wrong with it by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deploy.planner.asking import read_question
from deploy.planner.attainment import offered
from deploy.planner.recorded_traffic import MOST_BURSTINESS, MOST_PAIRS, RecordedTraffic
from deploy.simulator.traffic import arrival_times
from tests.deploy.planner.test_written import parsed

NAMES = "arrival_s,prompt_tokens,output_tokens,ttft_slo_ms,tpot_slo_ms,counted"


def written(folder: Path, rows: list[str]) -> Path:
    path = folder / "requests.csv"
    path.write_text("\n".join([NAMES, *rows]) + "\n")
    return path


def test_a_question_has_the_lengths_and_the_bursts_of_the_trace(tmp_path: Path) -> None:
    at = arrival_times(3000, 3.0, 5)
    path = written(tmp_path, [f"{second},{100 + number % 7},{10 + number % 3},,," for number, second in enumerate(at)])
    load = read_question(parsed("--trace", str(path), "--ttft-ms", "300", "--tpot-ms", "50")).load
    assert load.pairs == tuple((100 + number % 7, 10 + number % 3) for number in range(3000))
    assert load.traffic.burstiness == pytest.approx(3.0, rel=0.1) and load.traffic.name == "requests.csv"
    made = offered(load, 1.0, 0)
    assert made.prompt[:9] == [100 + number % 7 for number in range(9)] and made.output[:4] == [10, 11, 12, 10]
    assert set(made.ttft) == {0.3} and set(made.tpot) == {0.05}
    gaps = np.diff(made.at)
    assert gaps.std() / gaps.mean() > 1.5, "requests of a plan come as burstily as they did"
    asked = parsed("--trace", str(path), "--burstiness", "1")
    assert read_question(asked).load.traffic.burstiness == 1.0, "what is asked for goes before"


def test_objectives_are_those_of_the_requests_unless_others_are_given(tmp_path: Path) -> None:
    path = written(tmp_path, [f"{number},50,5,900,," for number in range(30)])
    (kind,) = read_question(parsed("--trace", str(path))).load.traffic.classes
    assert (kind.ttft_ms, kind.tpot_ms) == (900, None)
    (kind,) = read_question(parsed("--trace", str(path), "--ttft-ms", "100")).load.traffic.classes
    assert kind.ttft_ms == 100
    different = written(tmp_path, ["0,50,5,900,,", "1,50,5,100,,"])
    with pytest.raises(ValueError, match="differ in ttft_slo_ms, and a plan is for one objective: give --ttft-ms"):
        read_question(parsed("--trace", str(different)))
    given = parsed("--trace", str(different), "--ttft-ms", "100", "--tpot-ms", "50")
    assert len(read_question(given).load.pairs) == 2


def test_requests_that_are_not_counted_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, ["0,1900,5,,,false", "1,50,5,,,true"])
    assert RecordedTraffic.read(path, objectives=True).pairs == ((50, 5),)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([float(number) for number in range(40)], 0.1),  # regular
        ([0.0] * 40, 1.0),  # all at once: it says nothing
        ([0.0] * 39 + [1000.0], pytest.approx(6.2, abs=0.3)),
        ([0.0] * 2000 + [1.0], MOST_BURSTINESS),
        ([0.0, 5.0, 5.0], 1.0),  # three say nothing
    ],
)
def test_few_or_odd_arrivals_have_a_burstiness_too(tmp_path: Path, seconds: list[float], expected: float) -> None:
    path = written(tmp_path, [f"{second},50,5,,," for second in seconds])
    assert RecordedTraffic.read(path, objectives=True).traffic.burstiness == expected


def test_of_a_long_trace_every_part_is_kept(tmp_path: Path) -> None:
    count = 2 * MOST_PAIRS + 10
    path = written(tmp_path, [f"{number},{1 + number // 100},5,,," for number in range(count)])
    pairs = RecordedTraffic.read(path, objectives=True).pairs
    assert MOST_PAIRS / 2 < len(pairs) <= MOST_PAIRS
    assert pairs[0][0] == 1 and pairs[-1][0] > count // 100 - 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "chat"], "trace goes without workload"),
        (["--lengths", "x.json"], "trace goes without lengths"),
    ],
)
def test_a_trace_says_all_of_lengths(tmp_path: Path, arguments: list[str], words: str) -> None:
    path = written(tmp_path, ["0,50,5,,,"])
    with pytest.raises(ValueError, match=words):
        read_question(parsed("--trace", str(path), *arguments))


@pytest.mark.parametrize(
    ("rows", "words"), [([], "no request in it"), (["0,x,5,,,"], "line 2, prompt_tokens"), (["0,9"], "output_tokens")]
)
def test_what_is_wrong_with_a_trace_is_named(tmp_path: Path, rows: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_question(parsed("--trace", str(written(tmp_path, rows))))
