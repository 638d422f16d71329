"""The goodput table: fleets of equal size, every row measured before any is measured well, and nothing twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from deploy.simulator import goodput_table
from deploy.simulator.crossing import Crossing
from deploy.simulator.goodput_table import GoodputTable, times, told
from deploy.simulator.profiles import PROFILES
from deploy.simulator.table_rows import FLEETS, POLICIES, WORKLOADS, fleets_for, table_rows
from deploy.simulator.traffic import Lengths, traffic_of
from serving.messages import Role

PROFILE = PROFILES["a100-opt13b"]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("workers", [3, 8, 64])
def test_fleets_are_of_one_size_and_each_can_serve(workload: str, workers: int) -> None:
    for fleet, roles in fleets_for(traffic_of(workload), PROFILE, workers).items():
        count = Counter(roles)
        assert len(roles) == workers
        assert (count[Role.MIXED] > 0) == (fleet in ("auto", "mixed"))
        assert (count[Role.PREFILL] > 0 and count[Role.DECODE] > 0) == (fleet in ("auto", "split"))


def test_the_longer_the_prompts_the_more_compute_them() -> None:
    chat = traffic_of("chat")
    longer = replace(chat, classes=(replace(chat.classes[0], prompt=Lengths(1500)),))
    split = [Counter(fleets_for(each, PROFILE, 64)["split"]) for each in (chat, longer)]
    assert split[0][Role.PREFILL] < split[1][Role.PREFILL]
    found = Counter(fleets_for(traffic_of("long-mixed"), PROFILE, 64)["split"])
    assert 42 <= found[Role.PREFILL] <= 45, "what a search by hand has found"


def test_too_few_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="--workers 2"):
        fleets_for(traffic_of("chat"), PROFILE, 2)


def test_each_row_changes_what_it_names() -> None:
    rows = {row.name: row.study.plan for row in table_rows(PROFILE, 8, WORKLOADS, 10, 1)}
    assert {f"{w} {f} {p}" for w in WORKLOADS for f in FLEETS for p in POLICIES} < set(rows)
    fixed, slack = rows["long-mixed mixed fixed 1024"], rows["long-mixed mixed goodput"]
    assert (fixed.engine.chunking, fixed.engine.max_num_batched_tokens) == ("fixed", 1024)
    assert slack.engine.chunking == "slack" and fixed.roles == slack.roles == (Role.MIXED,) * 8
    assert rows["chat split least_loaded"].router.policy == "least_loaded"
    assert rows["long-mixed auto no order"].engine.prefill_order == "fcfs"
    assert rows["long-mixed auto with drafts"].drafts is not None and rows["long-mixed auto goodput"].drafts is None


def test_what_is_known_worst_is_measured_next() -> None:
    rows = table_rows(PROFILE, 3, ("chat",), 10, 1)[:3]
    names = [row.name for row in rows]
    known = {names[0]: {"1": 1.0, "2": 0.5}, names[1]: {"1": 1.0}}
    table = GoodputTable(rows, known, 1.0)
    assert table.next_row(9.0) is rows[2], "never measured"
    table.found[names[2]].attained.update({1.0: 1.0, 1.5: 0.5})
    assert table.next_row(9.0) is rows[1], "nobody knows what it does not attain"
    table.found[names[1]].attained[1.02] = 0.5
    assert table.next_row(9.0) is rows[0], "the widest"
    table.took.update({names[0]: 10.0, names[2]: 1.0})
    assert table.next_row(9.0) is rows[2], "the widest of those there is time for"
    assert table.next_row(0.0) is None


def test_ratios_are_told_where_both_are_known() -> None:
    known, half, open_ = (
        Crossing(1.0, attained=each) for each in ({10.0: 0.9, 10.2: 0.8}, {5.0: 0.9, 5.5: 0.8}, {7.0: 1.0})
    )
    assert times(known, half) == "2.00" and times(half, known, half) == "0.50"
    assert times(known, open_) == times(known, half, open_) == times(open_, known) == "—"
    assert [told(each) for each in (known, half, open_)] == ["10", "5 ± 5 %", "> 7"]
    assert told(Crossing(1.0)) == "not run" and told(Crossing(1.0, attained={3.0: 0.1})) == "< 3"


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a larger fleet begins at as many times the rate."""
    file = tmp_path / "found.json"
    small = ["--workers", "3", "--workloads", "chat", "--requests", "4", "--seeds", "1", "--jobs", "1"]
    known = {row.name: {"1": 1.0, "1.02": 0.8} for row in table_rows(PROFILE, 3, ("chat",), 4, 1)[1:]}
    file.write_bytes(orjson.dumps({"workers": 3, "requests": 4, "attained": known}))
    assert goodput_table.main([*small, "--minutes", "0.02", "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert "chat auto goodput: " in printed.err and "round_robin" not in printed.err
    assert "chat" in printed.out and "auto / better of mixed and split" in printed.out
    kept = orjson.loads(file.read_bytes())
    assert (
        len(kept["attained"]["chat auto goodput"]) >= 1
        and kept["attained"]["chat mixed goodput"] == known["chat mixed goodput"]
    )
    wider = GoodputTable(table_rows(PROFILE, 6, ("chat",), 4, 1), *goodput_table.known_from(file, 6))
    assert wider.found["chat mixed goodput"].first == pytest.approx(2.02) and not wider.measured()


def test_what_was_measured_with_other_settings_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    kept = {"workers": 3, "profile": "a100-opt13b", "requests": 4, "seeds": 1, "attained": {"x": {"1": 1.0}}}
    file.write_bytes(orjson.dumps(kept))
    flags = ["--workers", "3", "--workloads", "chat", "--requests", "4", "--minutes", "0", "--json", str(file)]
    for others, named in (["--seeds", "2"], "--seeds 1"), (["--seeds", "1", "--requests", "5"], "--requests 4"):
        assert goodput_table.main([*flags, *others]) == 2
        assert named in capsys.readouterr().err
    settings = {"profile": "a100-opt13b", "requests": 9, "seeds": 2}
    assert goodput_table.known_from(file, 6, **settings) == (kept["attained"], 2.0), "it says where to begin"
    assert goodput_table.known_from(file, 3, **settings | {"requests": 4, "seeds": 1}) == (kept["attained"], 1.0)


@pytest.mark.parametrize(
    "given", [("--workers", "2"), ("--workloads", "chatter"), ("--seeds", "0"), ("--jobs", "0"), ("--requests", "1")]
)
def test_what_cannot_be_is_refused_by_its_flag(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = goodput_table.main([*given, "--minutes", "0"])
    except SystemExit as left:
        status = int(str(left.code))
    assert status == 2 and given[1] in capsys.readouterr().err
