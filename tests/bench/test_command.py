"""The whole command against scripted servers: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from bench.command import add_arguments, run
from tests.fakes.openai_server import ServerScript, threaded_server

pytestmark = pytest.mark.thorough


def bench(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(flags))


def test_two_servers_in_alternating_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def noting(name: str) -> ServerScript:
        def note(number: int) -> None:
            order.append(name)

        return ServerScript(fail=note)

    with threaded_server(noting("a")) as first, threaded_server(noting("b")) as second:
        status = bench(
            "--url", f"a={first.url}", "--url", f"b={second.url}", "--repeat", "3", "--num-requests", "4",
            "--concurrency", "2", "--input-len", "16", "--output-len", "6", "--warmups", "1",
            "--json", str(tmp_path / "out" / "r.json"), "--plot", str(tmp_path / "r.html"),
        )  # fmt: skip
    assert status == 0
    assert order == ["a", "b"] + (["a"] * 5 + ["b"] * 5) * 3  # a probe each, then a warm-up and four in turn
    document = json.loads((tmp_path / "out" / "r.json").read_text())
    [point] = document["points"]
    assert [(r["target"], r["round"]) for r in point["rounds"]] == [(name, n) for name in "ab" for n in range(3)]
    assert all(round_["metrics"]["total_output_tokens"] == 24 for round_ in point["rounds"])
    assert all(round_["metrics"]["total_input_tokens"] == 64 for round_ in point["rounds"])
    assert set(point["ratio"]) == {"b"}
    assert document["models"] == {"a": "scripted", "b": "scripted"}
    assert "<svg" in (tmp_path / "r.html").read_text()
    output = capsys.readouterr()
    assert "16 in / 6 out · concurrency 2 · 4 requests · median of 3 rounds" in output.out
    assert "vs a" in output.out
    assert "!" not in output.out


def test_rounds_bring_fresh_prompts_and_servers_the_same() -> None:
    with threaded_server() as first, threaded_server() as second:
        flags = ("--repeat", "2", "--num-requests", "3", "--output-len", "2", "--warmups", "2")
        assert bench("--url", f"a={first.url}", "--url", f"b={second.url}", *flags) == 0
    asked = [
        [tuple(request.body["prompt"]) for request in server.received if request.path == "/v1/completions"]
        for server in (first, second)
    ]
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == len(asked[0]) == 1 + 2 * (2 + 3)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
def test_chat_through_a_rate_and_objectives(
    capsys: pytest.CaptureFixture[str], tokens_per_chunk: int, tmp_path: Path
) -> None:
    script = ServerScript(tokens_per_chunk=tokens_per_chunk, template_tokens=9)
    with threaded_server(script) as server:
        status = bench(
            "--url", server.url, "--endpoint", "chat", "--rates", "400,800", "--num-requests", "6", "--output-len", "6",
            "--ttft-slo-ms", "60000", "--tpot-slo-ms", "60000", "--json", str(tmp_path / "r.json"), "--details",
        )  # fmt: skip
    assert status == 0
    document = json.loads((tmp_path / "r.json").read_text())
    for point in document["points"]:
        [round_] = point["rounds"]
        assert round_["metrics"]["slo_attainment"] == 1.0
        assert [request["prompt_tokens"] for request in round_["requests"]] == [256] * 6
        assert [request["reported"] for request in round_["requests"]] == [6] * 6
    output = capsys.readouterr().out
    assert ("a chunk carries 3.00 tokens" in output) == (tokens_per_chunk == 3)
    assert "400 req/s" in output and "800 req/s" in output


def test_errors_are_counted_shown_and_end_in_status_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = ServerScript(fail={4: (503, "full")}.get, die_after={6: 1}.get)
    with threaded_server(script) as server:
        status = bench("--url", f"it={server.url}", "--num-requests", "6", "--json", str(tmp_path / "r.json"))
    assert status == 1
    output = capsys.readouterr().out
    assert "! it: 1 of 6 requests failed: HTTP 503: full" in output
    assert "! it: 1 of 6 requests failed: connection lost" in output
    [round_] = json.loads((tmp_path / "r.json").read_text())["points"][0]["rounds"]
    assert (round_["errors"], round_["completed"], round_["clean"]) == ({"HTTP 503": 1, "connection lost": 1}, 4, False)


def test_counts_that_the_text_belies_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with threaded_server(ServerScript(claimed=400)) as server:
        assert bench("--url", f"it={server.url}", "--num-requests", "2", "--output-len", "4") == 0
    assert "re-tokenizes to 8 tokens where 800 were counted" in capsys.readouterr().out


def test_the_goodput_is_searched_and_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing meets 1e-6 ms and everything meets a minute: the search must end on both."""
    with threaded_server() as server:
        flags = ("--url", f"it={server.url}", "--find-goodput", "--num-requests", "3", "--output-len", "2")
        assert bench(*flags, "--ttft-slo-ms", "0.000001", "--rate", "500") == 0
        output = capsys.readouterr().out
        assert "none attains" in output
        assert "requests miss the objectives even one at a time" in output
    with threaded_server() as server:  # of its own: what the first search gave up may still be on its way
        flags = ("--url", f"it={server.url}", "--find-goodput", "--num-requests", "3", "--output-len", "2")
        assert bench(*flags, "--ttft-slo-ms", "60000", "--rate", "50000", "--json", str(tmp_path / "r.json")) == 0
    prompts = [tuple(request.body["prompt"]) for request in server.received if request.path == "/v1/completions"]
    assert len(set(prompts)) == len(prompts) == 1 + 3 * 4  # no probe of the search repeats another's prompts
    assert json.loads((tmp_path / "r.json").read_text())["goodput"]["median_rate"] == {"it": 1e5}
    assert "1e+05 req/s" in capsys.readouterr().out


def test_nobody_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert bench("--url", url) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"millrace bench: nothing listens at {url}; start the server or correct --url\n"


@pytest.mark.parametrize(
    ("flags", "complaint"), [(["--url", "ftp://x"], "http://HOST:PORT"), (["--rate", "x"], "--rate x")]
)
def test_bad_flags_are_one_clear_line(capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str) -> None:
    assert bench(*flags) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_a_server_that_dies_later_leaves_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    # Before it dies: a probe, a warm-up, four requests, a warm-up.
    script = ServerScript(fail=lambda number: (500, "dead") if number > 6 else None)
    with threaded_server(script) as server:
        assert bench("--url", f"it={server.url}", "--repeat", "2", "--num-requests", "5", "--output-len", "2") == 130
    output = capsys.readouterr()
    assert "every warm-up request failed: HTTP 500: dead" in output.err
    assert "── 256 in / 2 out" in output.out


def test_ctrl_c_shows_what_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The signal comes while the eighth request hangs; the answers before it are reported."""
    hung = threading.Event()

    async def hang(number: int, chunk: int) -> None:
        if number == 7:
            hung.set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()  # until cancelled

    with threaded_server(ServerScript(before_chunk=hang)) as server:
        status = bench("--url", f"it={server.url}", "--num-requests", "20", "--json", str(tmp_path / "r.json"))
    assert hung.is_set()
    assert status == 130
    output = capsys.readouterr()
    assert "interrupted: this is what was measured so far" in output.err
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["interrupted"] is True
    [round_] = document["points"][0]["rounds"]
    assert (round_["completed"], round_["failed"], round_["stopped"]) == (5, 0, "interrupted")
    assert "no round ended cleanly" in output.out
