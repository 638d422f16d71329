"""Flags: what they mean together, and what is refused with the flag's name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.endpoint import Target
from bench.options import BenchOptions, Point, add_server_arguments, parse_options


def parse(*flags: str) -> BenchOptions:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return parse_options(parser.parse_args(flags))


def test_no_flags_measure_the_local_server_one_request_at_a_time() -> None:
    options = parse()
    assert options.targets == (Target(name="127.0.0.1:8000", url="http://127.0.0.1:8000"),)
    assert options.points == (Point(concurrency=1),)
    assert (options.workload.input_len, options.workload.output_len) == (256, 128)
    assert options.count(options.points[0]) == 8


def test_servers_have_names_and_a_baseline() -> None:
    flags = ("--url", "ours=http://a:1/v1", "--url", "http://b:2/v1/", "--url", "http://c:3/?x=1")
    options = parse(*flags)
    assert [target.name for target in options.targets] == ["ours", "b:2", "c:3/?x=1"]
    assert [target.url for target in options.targets] == ["http://a:1/v1", "http://b:2/v1/", "http://c:3/?x=1"]
    assert options.baseline == "ours"
    assert parse(*flags, "--baseline", "b:2").baseline == "b:2"
    assert parse(*flags, "--baseline", "http://b:2/v1/").baseline == "b:2"


def test_loads_are_lists() -> None:
    assert parse("--concurrency", "1,8,32").points == tuple(Point(concurrency=n) for n in (1, 8, 32))
    assert parse("--rates", "0.5,2").points == (Point(rate=0.5), Point(rate=2.0))
    assert [parse("--rate", "2").count(Point(rate=rate)) for rate in (0.1, 2.0)] == [20, 80]
    assert parse("--rate", "2", "--duration", "15").count(Point(rate=2.0)) == 30
    assert parse("--num-requests", "7").count(Point(concurrency=32)) == 7
    assert parse().count(Point(concurrency=32)) == 128


def test_goodput_search_starts_at_the_rate_given() -> None:
    options = parse("--find-goodput", "--rate", "4", "--ttft-slo-ms", "1000", "--attainment", "0.8", "--confirm", "2")
    assert options.search is not None
    assert (options.search.start, options.search.attainment, options.search.confirmations) == (4.0, 0.8, 2)
    assert (options.slo.ttft_ms, options.slo.tpot_ms, options.slo.attainment) == (1000.0, None, 0.8)


def test_a_trace_brings_its_own_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2}\n' * 5)
    options = parse("--trace", str(path))
    assert (options.workload.kind, options.points, options.count(Point())) == ("trace", (Point(),), 5)
    assert parse("--trace", str(path), "--rate", "3").points == (Point(rate=3.0),)


def test_lengths_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[[3, 4], [5, 6]]")
    assert parse("--lengths", str(path)).workload.pairs == ((3, 4), (5, 6))


def test_headers_and_keys_are_sent_but_never_shown() -> None:
    options = parse("--api-key", "secret", "--header", "X-Tenant: me", "--extra-body", '{"ignore_eos": null}')
    assert options.headers == {"Authorization": "Bearer secret", "X-Tenant": "me"}
    assert options.extra_body == {"ignore_eos": None}
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--concurrency", "0"], "--concurrency 0"),
        (["--concurrency", "1.5"], "whole"),
        (["--rate", "1,x"], "--rate 1,x"),
        (["--rate", "nan"], "--rate nan"),
        (["--rate", "1", "--concurrency", "1"], "closed loop"),
        (["--find-goodput"], "--ttft-slo-ms"),
        (["--find-goodput", "--ttft-slo-ms", "1", "--attainment", "1.5"], "--attainment"),
        (["--url", "a=http://x", "--url", "a=http://y"], "same name"),
        (["--baseline", "nobody"], "--baseline nobody"),
        (["--num-requests", "0"], "--num-requests"),
        (["--repeat", "0"], "--repeat"),
        (["--duration", "0"], "--duration"),
        (["--header", "nocolon"], "NAME:VALUE"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--extra-body", "{"], "--extra-body"),
        (["--endpoint", "chat", "--prompt-form", "ids"], "text only"),
        (["--plot", "x.png"], r"\.html or \.svg"),
        (["--trace", "/no/such/file"], "--trace /no/such/file"),
        (["--workload", "trace"], "--trace FILE"),
        (["--workload", "fixed", "--lengths", "x"], "--lengths goes with"),
        (["--workload", "sharegpt", "--trace", "x"], "--trace goes with"),
        (["--workload", "shared-prefix", "--prefix-share", "2"], "--prefix-share"),
    ],
)
def test_senseless_flags_are_named(flags: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(*flags)
