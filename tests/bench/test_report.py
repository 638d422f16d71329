"""Tables, JSON, plots and the progress line: what readers see of results."""

from __future__ import annotations

import io
import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.endpoint import Target
from bench.goodput import SearchLimits
from bench.options import BenchOptions, Point
from bench.plot import plot_html, plot_svg, ticks
from bench.progress import Progress
from bench.report import aligned, goodput_report, median_found, number, point_report, results_json, sweep_report
from bench.session import Found, Measurement, Results
from bench.sse import Outcome
from bench.summary import SloTargets, Summary

OPTIONS = BenchOptions(
    targets=(Target(name="base", url="http://a"), Target(name="other", url="http://b")),
    baseline="base",
    repeat=2,
    slo=SloTargets(ttft_ms=100.0, tpot_ms=20.0),
    headers={"Authorization": "Bearer secret"},
)
EIGHT = Point(concurrency=8)


def measured(target: str, round_: int, speed: float, point: Point = EIGHT, **changes: Any) -> Measurement:
    metrics = {
        "request_throughput": speed / 10, "output_throughput": speed, "total_token_throughput": speed * 3,
        "request_goodput": speed / 20, "slo_attainment": 0.5, "median_ttft_ms": 1e4 / speed, "p99_ttft_ms": 2e4 / speed,
        "mean_ttft_ms": 1e4 / speed, "p90_ttft_ms": 1.5e4 / speed, "median_tpot_ms": 1e3 / speed,
        "p90_tpot_ms": 2e3 / speed, "p99_tpot_ms": 3e3 / speed,
    }  # fmt: skip
    summary = Summary(**{"planned": 10, "completed": 10, "metrics": metrics, **changes})
    return Measurement(target=target, point=point, round=round_, summary=summary)


def row(text: str, name: str, table: int = 0) -> list[str]:
    """The cells of the `table`-th row that begins with `name`."""
    return [line.split() for line in text.splitlines() if line.strip().startswith(name)][table]


def test_columns_line_up() -> None:
    assert aligned([["", "a"], ["long", "1"], ["x", "234"]]) == "        a\nlong    1\nx     234"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "—"), (0.0, "0.00"), (3.14159, "3.14"), (123.456, "123.5"), (98765.4, "98,765")]
)
def test_numbers_keep_about_four_figures(value: float | None, text: str) -> None:
    assert number(value) == text


def test_medians_and_ratios_to_the_baseline() -> None:
    runs = [measured("base", 0, 90), measured("base", 1, 110), measured("other", 0, 250), measured("other", 1, 350)]
    text = point_report(Results(measurements=runs), OPTIONS, EIGHT)
    assert row(text, "base") == ["base", "10.00", "100.0", "300.0", "5.00", "50.0%", "20", "0"]
    assert row(text, "other") == ["other", "30.00", "300.0", "900.0", "15.00", "50.0%", "20", "0"]
    assert row(text, "vs base") == ["vs", "base", "3.00×", "3.00×", "3.00×", "3.00×", "1.00×"]
    ttft = row(text, "vs base", table=1)[3]
    assert float(ttft[:-1]) == pytest.approx((1e4 / 250 + 1e4 / 350) / (1e4 / 90 + 1e4 / 110), abs=0.01)
    assert "!" not in text
    assert "256 in / 128 out · concurrency 8 · 32 requests · median of 2 rounds · good: TTFT 100 ms" in text


def test_a_run_with_errors_is_marked_and_each_kind_named() -> None:
    bad: dict[str, Any] = {"errors": {"HTTP 500": 3}, "examples": {"HTTP 500": "oh no"}, "completed": 7}
    runs = [
        measured("base", 0, 100),
        measured("base", 1, 100),
        measured("other", 0, 200),
        measured("other", 1, 900, **bad),
    ]
    text = point_report(Results(measurements=runs), OPTIONS, EIGHT)
    assert row(text, "other")[1:3] == ["20.00", "200.0"]  # the clean round alone
    assert row(text, "other")[-2:] == ["17", "3"]
    assert "! other: 3 of 20 requests failed: HTTP 500: oh no" in text
    assert "! other: the medians are of the 1 of 2 rounds without errors" in text
    only_bad = point_report(Results(measurements=[runs[0], runs[3]]), OPTIONS, EIGHT)
    assert row(only_bad, "other!")[1] == "90.00"
    assert row(only_bad, "vs base!")
    assert "no round ended cleanly" in only_bad


def test_warnings_are_said_once() -> None:
    runs = [measured("base", round_, 100, warnings=("odd counts",)) for round_ in (0, 1)]
    assert point_report(Results(measurements=runs), OPTIONS, EIGHT).count("! base: odd counts") == 1


def sweep() -> Results:
    runs = []
    for rate in (4.0, 1.0):
        runs += [measured(name, 0, 100 * rate, point=Point(rate=rate)) for name in ("base", "other")]
    return Results(measurements=runs, models={"base": "m"})


def test_a_sweep_is_one_line_for_each_load_and_server() -> None:
    lines = sweep_report(sweep(), OPTIONS).splitlines()[3:]
    assert [line.split()[:3] for line in lines] == [
        ["1", "req/s", "base"], ["1", "req/s", "other"], ["4", "req/s", "base"], ["4", "req/s", "other"],
    ]  # fmt: skip
    given_up = Results(measurements=[measured("base", 0, 100, stopped="hopeless")])
    assert "missed" in sweep_report(given_up, OPTIONS)
    searching = BenchOptions(targets=OPTIONS.targets, baseline="base", slo=OPTIONS.slo, search=SearchLimits())
    assert "!" not in sweep_report(given_up, searching)  # giving up a rate too high is no error
    failed = Results(measurements=[measured("base", 0, 100, errors={"refused": 2}, examples={"refused": "why"})])
    assert "! base: 2 of 10 requests failed: refused: why" in sweep_report(failed, searching)


def found(target: str, rate: float | None, round_: int = 0, *, complete: bool = True) -> Found:
    return Found(target=target, round=round_, rate=rate, complete=complete)


def test_goodput_is_the_median_of_complete_searches() -> None:
    searches = [found("base", 2.0), found("base", 2.2, 1), found("base", 1.8, 2), found("base", 9.0, 3, complete=False)]
    searches += [found("other", 5.0), found("other", None, 1), found("other", 6.0, 2)]
    text = goodput_report(Results(found=searches), OPTIONS)
    assert row(text, "base")[:3] == ["base", "2", "req/s"]
    assert "none" in row(text, "other")[4]
    assert row(text, "other")[-1] == "2.50×"
    assert "highest rate at which 90% of requests meet TTFT 100 ms and TPOT 20 ms" in text
    assert median_found([found("x", None), found("x", None), found("x", 3.0)], "x") is None
    assert median_found([], "x") is None


def test_json_has_rounds_medians_and_ratios_and_no_secrets() -> None:
    results = sweep()
    content = results_json(results, OPTIONS, started_at="now")
    document = json.loads(content)
    assert [point["rate"] for point in document["points"]] == [1.0, 4.0]
    assert document["points"][0]["median"]["base"]["output_throughput"] == 100
    assert document["points"][0]["ratio"]["other"]["output_throughput"] == 1.0
    assert document["points"][0]["rounds"][0]["clean"] is True
    assert document["goodput"] is None
    assert b"secret" not in content
    searched = BenchOptions(targets=OPTIONS.targets, baseline="base", slo=OPTIONS.slo, search=SearchLimits())
    results.found = [found("base", 2.0)]
    goodput = json.loads(results_json(results, searched, started_at="now"))["goodput"]
    assert goodput["median_rate"] == {"base": 2.0, "other": None}


def test_details_hold_every_request() -> None:
    one = measured("base", 0, 100)
    answer = Outcome(prompt_tokens=1, max_tokens=2, text=["a", "b"], gaps=[0.5])
    detailed = Measurement(target="base", point=EIGHT, round=0, summary=one.summary, outcomes=(answer,))
    [round_] = json.loads(results_json(Results(measurements=[detailed]), OPTIONS, started_at=""))["points"][0]["rounds"]
    assert (round_["requests"][0]["text"], round_["requests"][0]["gaps"]) == ("ab", [0.5])


@pytest.mark.parametrize(
    "results", [sweep(), Results(measurements=[measured("base", 0, 100), measured("other", 0, 9)])]
)
def test_the_plot_is_well_formed_and_shows_every_server_in_every_panel(results: Results) -> None:
    root = ElementTree.fromstring(plot_svg(results, OPTIONS))
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    assert len(panels) >= 4
    assert all(len(panel.findall(f"{space}polyline")) == 2 for panel in panels)
    for circle in root.iter(f"{space}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 520
        assert 0 <= float(circle.attrib["cy"]) <= 300
    assert plot_html(results, OPTIONS).startswith("<!doctype html>")


def test_names_cannot_break_the_plot() -> None:
    targets = (Target(name="<b>&", url="http://a"),)
    options = BenchOptions(targets=targets, baseline="<b>&")
    ElementTree.fromstring(plot_svg(Results(measurements=[measured("<b>&", 0, 100)]), options))
    with pytest.raises(ValueError, match="nothing was measured"):
        plot_svg(Results(), options)


@pytest.mark.parametrize(
    ("highest", "expected"),
    [(0, [0, 1]), (10, [0, 2, 4, 6, 8, 10]), (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1]), (37, [0, 10, 20, 30, 40])],
)
def test_ticks_are_round(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == pytest.approx(expected)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ended(tokens: int = 5, error: str | None = None) -> Outcome:
    return Outcome(prompt_tokens=1, max_tokens=tokens, reported=tokens, error=error)


def test_progress_draws_over_itself_on_a_terminal_only() -> None:
    now = [0.0]
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        progress = Progress(stream, clock=lambda: now[0])
        progress.start("label", 4)
        now[0] += 1.0
        progress.step(ended())
        progress.step(ended())  # too soon to draw again
        now[0] += 1.0
        progress.step(ended(error="refused"))
        progress.step(ended(error="interrupted"))  # is no end
        progress.clear()
    assert pipe.getvalue() == ""
    drawn = [re.sub(r"\x1b\[K", "", line) for line in terminal.getvalue().split("\r")]
    assert drawn[1].endswith("0/4  0 tok/s")
    assert drawn[2].endswith("1/4  5 tok/s")
    assert drawn[3].endswith("3/4  8 tok/s  1 failed")
    assert drawn[-1] == ""
