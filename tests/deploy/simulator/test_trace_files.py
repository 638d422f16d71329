"""Traces from files: both forms give the same, and a mistake is told by file, line and field."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulator.trace_files import TracedRequest, TraceFile, as_arrivals, made_up, natural_rate, read_trace
from serving.messages import Slo

HEAD = "arrival_s,prompt_tokens,output_tokens\n"
MORE = "arrival_s,prompt_tokens,output_tokens,ttft_slo_ms,service_class,prefix,prefix_tokens\n"


@given(rows=st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9999), st.integers(1, 9999)), min_size=1, max_size=20))
def test_both_forms_give_the_same(rows: list[tuple[float, int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("traces")
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    (folder / "a.csv").write_text(HEAD + "".join(f"{at!r},{prompt},{output}\n" for at, prompt, output in rows))
    (folder / "a.jsonl").write_bytes(b"\n".join(orjson.dumps(dict(zip(names, row, strict=True))) for row in rows))
    found = read_trace(folder / "a.csv")
    key = repr  # measured times are not-a-numbers, which equal nothing
    assert [key(each) for each in found] == [key(each) for each in read_trace(folder / "a.jsonl")]
    assert [each.arrival_s for each in found] == sorted(at for at, _, _ in rows)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_long_trace_stays_in_its_file(name: str, tmp_path: Path) -> None:
    """However long it is, going through it holds a few of its lines."""
    rows = [{"arrival_s": number / 10, "prompt_tokens": 5 + number % 7, "output_tokens": 2} for number in range(4_000)]
    text = HEAD + "".join(f"{','.join(map(str, row.values()))}\n" for row in rows)
    (tmp_path / name).write_bytes(text.encode() if name == "a.csv" else b"\n".join(map(orjson.dumps, rows)))
    tracemalloc.start()
    try:
        traced = TraceFile.checked(tmp_path / name)
        arrivals = sum(1 for _ in made_up(traced, Slo()))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 300_000, "bytes, for what would take millions"
    assert (traced.requests, traced.counted, arrivals, traced.ordered) == (4_000, 4_000, 4_000, True)
    assert natural_rate(traced) == natural_rate(read_trace(tmp_path / name)) == pytest.approx(10.0)


def test_a_trace_out_of_order_is_gone_through_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEAD.strip() + ",counted\n3,5,2,true\n1,6,3,false\n2,7,4,true\n")
    traced = TraceFile.checked(tmp_path / "a.csv")
    assert [each.prompt_tokens for each in traced] == [6, 7, 5] and not traced.ordered
    assert (traced.first_s, traced.last_s, traced.counted, len(traced)) == (1.0, 3.0, 2, 3)
    assert (traced.prompt_tokens, traced.output_tokens) == (18, 9)
    assert [each.counted for each in as_arrivals(traced, Slo())] == [False, True, True]


def test_what_was_measured_comes_along(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,ttft_ms,tpot_ms\n0,5,2,31.5,\n")
    (found,) = read_trace(file)
    assert found.ttft_ms == 31.5 and math.isnan(found.tpot_ms)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", HEAD + "0,5,2\n1,0,2\n", "line 3, prompt_tokens: '0'"),
        ("a.csv", HEAD + "x,5,2\n", "line 2, arrival_s: 'x'"),
        ("a.csv", HEAD + "-1,5,2\n", "line 2, arrival_s: '-1'"),
        ("a.csv", HEAD + "nan,5,2\n", "line 2, arrival_s: 'nan'"),
        ("a.csv", HEAD + "0,5\n", "line 2, output_tokens: None"),
        ("a.csv", HEAD + "0,5,2,7\n", "line 2: more fields"),
        ("a.csv", "arrival_s,prompt_tokens\n0,5\n", "line 1: there is no column output_tokens"),
        ("a.csv", HEAD, "no request"),
        ("a.jsonl", '{"arrival_s": 0, "prompt_tokens": 2.5, "output_tokens": 1}\n', "line 1, prompt_tokens: 2.5"),
        ("a.jsonl", '\n{"arrival_s": 0, "prompt_tokens": 2}\n', "line 2, output_tokens: None"),
        ("a.jsonl", '{"arrival_s": true, "prompt_tokens": 2, "output_tokens": 1}', "line 1, arrival_s: True"),
        ("a.jsonl", "{}\n[]\n", "line 1, arrival_s: None"),
        ("a.jsonl", "[]\n", "line 1: not an object"),
        ("a.jsonl", "{\n", "line 1: not JSON"),
        ("a.csv", HEAD + "0," + "1" * 200_000 + ",2\n", "line 2: field larger than"),
        ("a.csv", HEAD + "0,1000000000,2\n", "line 2, prompt_tokens: '1000000000'"),
        ("a.csv", HEAD.strip() + ",counted\n0,5,2,no\n", "line 2, counted: 'no'"),
        ("a.csv", HEAD.strip() + ",counted\n0,5,2,false\n", "no request in it is counted"),
        ("a.csv", MORE + "0,5,2,-1,,,\n", "line 2, ttft_slo_ms: '-1'"),
        ("a.csv", MORE + "0,5,2,,best,,\n", "line 2, service_class: there are interactive"),
        ("a.csv", MORE + "0,5,2,,,a,6\n", "line 2, prefix_tokens: 6 are more than the prompt's 5"),
        ("a.csv", MORE + "0,5,2,,,a,x\n", "line 2, prefix_tokens: 'x'"),
    ],
)
def test_a_mistake_is_told_by_line_and_field(name: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name) as error:
        read_trace(tmp_path / name)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_marks_and_line_ends_of_other_systems_are_no_part_of_a_trace(name: str, tmp_path: Path) -> None:
    lines = [HEAD.strip(), "1,5,2", "", "0,6,3"]
    if name == "a.jsonl":
        lines = [
            '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 2}',
            "",
            '{"arrival_s": 0, "prompt_tokens": 6, "output_tokens": 3}',
        ]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [each.prompt_tokens for each in read_trace(tmp_path / name)] == [6, 5]


def test_a_trace_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(HEAD.encode() + b"0,\xe9,2\n")
    with pytest.raises(ValueError, match=r"a\.csv: .*can't decode byte"):
        read_trace(tmp_path / "a.csv")


def test_arrivals_next_to_each_other_come_at_once() -> None:
    traced = [TracedRequest(arrival_s=at, prompt_tokens=4, output_tokens=2) for at in (0.0, 5e-324)]
    assert natural_rate(traced) == 1.0
    assert all(math.isfinite(each.at) for each in as_arrivals(traced, Slo()))


def test_a_trace_keeps_its_times_at_its_own_rate() -> None:
    traced = [TracedRequest(arrival_s=3 + at, prompt_tokens=4, output_tokens=2) for at in (0.0, 0.5, 4.0)]
    rate, arrivals = natural_rate(traced), as_arrivals(traced, Slo())
    assert rate == pytest.approx(0.5)
    assert [each.at / rate for each in arrivals] == pytest.approx([0.0, 0.5, 4.0])
    assert [(len(each.request.prompt), each.output_tokens) for each in arrivals] == [(4, 2)] * 3
    assert as_arrivals(traced, Slo()) == arrivals != as_arrivals(traced, Slo(), seed=1)


def test_a_request_keeps_its_objectives_its_class_and_its_prefix(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(MORE + "0,9,2,70,interactive,hello,6\n1,9,2,,,hello,4\n2,9,2,,batch,bye,6\n")
    arrivals = as_arrivals(read_trace(tmp_path / "a.csv"), Slo(ttft_ms=500.0, tpot_ms=30.0))
    one, two, three = (each.request for each in arrivals)
    assert (one.slo, two.slo) == (Slo(ttft_ms=70.0, tpot_ms=30.0), Slo(ttft_ms=500.0, tpot_ms=30.0))
    assert [each.service_class for each in (one, two, three)] == ["interactive", "standard", "batch"]
    assert one.priority < two.priority < three.priority
    assert one.prompt[:4] == two.prompt[:4] and one.prompt[4:] != two.prompt[4:]
    assert one.prompt[:6] != three.prompt[:6] and {len(each.prompt) for each in (one, two, three)} == {9}
