"""`millrace explain` and `millrace top` against a server that answers as written here, and their drawings."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import orjson
import pytest
from rich.console import Console

from deploy import top
from deploy.admin import Server
from deploy.cli import main
from deploy.explain import drawn, headline, off_by, plain_console, shown
from serving.errors import Unavailable

PREDICTED: dict[str, Any] = {
    "queue": 0.004, "prefill": 0.02, "transfer": 0.002, "step": 0.01, "token": 0.011, "ttft": 0.024, "tpot": 0.013,
    "usual_tpot": 0.011, "error": 0.1,
}  # fmt: skip
ATTEMPT: dict[str, Any] = {
    "prefill": "p-0",
    "decode": "d-0",
    "reason": "slo",
    "downgrade": "",
    "error": None,
    "predicted": PREDICTED,
    "actual": {"queue": 0.005, "prefill": 0.021, "transfer": 0.003, "ttft": 0.03, "tpot": 0.0099},
    "cached_tokens": {"expected": 64, "actual": 48, "device": 16, "pool": 32, "decode": 0},
    "output_tokens": 20,
    "considered": [
        {"prefill": "p-0", "decode": "d-0", "score": 0.98, "predicted": PREDICTED},
        {"prefill": "m-0", "decode": "m-0", "score": 0.5, "predicted": PREDICTED},
    ],
}
TOLD: dict[str, Any] = {
    "id": "chatcmpl-1",
    "outcome": "completed",
    "error": None,
    "service_class": "gold",
    "priority": -200,
    "objectives": {"ttft_ms": 300.0, "tpot_ms": None},
    "within_slo": True,
    "prompt_tokens": 100,
    "output_tokens": 20,
    "queued_seconds": 0.001,
    "ttft_seconds": 0.031,
    "tpot_seconds": 0.0099,
    "total_seconds": 1.25,
    "passed_over": [{"worker": "d-1", "error": "NoRoom"}],
    "attempts": [ATTEMPT],
}
CLASS: dict[str, Any] = {
    "waiting": 1,
    "within_slo": 9,
    "offered": 10,
    "completed": 9,
    "refused": 1,
    "failed": 0,
    "aborted": 0,
}
WORKER: dict[str, Any] = {
    "name": "m-0",
    "role": "mixed",
    "address": "h:1",
    "state": "live",
    "heard_seconds": 0.2,
    "running": 3,
    "leases": 4,
    "max_seqs": 128,
    "queued_tokens": 70,
    "queue_seconds": 0.25,
    "kv_usage": 0.5,
    "step_seconds": 0.012,
    "steps": 100.0,
    "steps_seconds": 1.0,
    "stalled_seconds": 0.0,
}
WORKERS: dict[str, Any] = {
    "at": 100.0,
    "policy": "goodput",
    "requests_running": 4,
    "requests_waiting": 1,
    "tokens": 1000,
    "classes": {"gold": CLASS, "batch": {**CLASS, "offered": 0, "within_slo": 0}},
    "workers": [WORKER],
}


class Answering(BaseHTTPRequestHandler):
    """Knows one request, shows what it was asked, and has a key."""

    asked: ClassVar[list[tuple[str, str | None, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["authorization"], self.headers["x-cache-salt"]))
        if self.headers["authorization"] != "Bearer right":
            self.answer(401, {"error": {"message": "a valid API key is required"}})
        elif self.path == "/v1/requests/a%2Fb/explain":
            self.answer(200, {"id": "a/b", "sequences": [TOLD]})
        elif self.path == "/v1/workers":
            self.answer(200, WORKERS)
        else:
            self.answer(404, {"error": {"message": "nothing is known (any more) of a request"}})

    def answer(self, status: int, body: Any) -> None:
        content = orjson.dumps(body)
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MILLRACE_API_KEY", "right,other")
    monkeypatch.setattr(Answering, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def text_of(drawing: Any, width: int = 100) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(drawing)
    return captured.get()


def row(text: str, name: str) -> list[str]:
    """The cells of the line that begins with this name."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(name))
    return [cell.strip() for cell in line.strip().removeprefix(name).split("  ") if cell.strip()]


def test_explain_prints_what_the_server_tells(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a/b", "--url", f"{url}/v1", "--cache-salt", "s"]) == 0
    out = capsys.readouterr().out
    assert "chatcmpl-1: completed, within its objectives" in out and "prefill on p-0, decode on d-0 (slo)" in out
    assert Answering.asked == [("/v1/requests/a%2Fb/explain", "Bearer right", "s")]


def test_explain_as_json_is_the_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a/b", "--url", url, "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out) == {"id": "a/b", "sequences": [TOLD]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "another"], "nothing is known"),
        (["explain", "a/b", "--api-key", "wrong"], "a valid API key"),
        (["top", "--once", "--interval", "0"], "--interval"),
        (["top", "--interval", "inf"], "--interval"),
        (["top", "--interval", "1e300"], "--interval"),
        (["top", "--interval", "nan"], "--interval"),
    ],
)
def test_what_goes_wrong_is_one_line(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([*arguments, "--url", url]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_server_that_is_not_there_or_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--url"):
        Server("localhost:8000", None)
    with pytest.raises(Unavailable, match="no answer from"):
        Server("http://127.0.0.1:9", None).get("v1", "workers")


def test_a_request_that_went_on_without_its_objectives_is_said_to_have() -> None:
    assert "without its objectives" in headline({**TOLD, "degraded": True})
    assert "without its objectives" not in headline({**TOLD, "degraded": False})


def test_an_attempt_shows_predicted_beside_actual() -> None:
    text = text_of(drawn(TOLD))
    assert row(text, "queue") == ["4.0 ms", "5.0 ms", "+25 %"]
    assert row(text, "each token after (usual)") == ["11.0 ms", "9.9 ms", "-10 %"]
    assert row(text, "cached tokens") == ["64", "48"]
    assert row(text, "- from the KV pool") == ["32"] and "held by decode" not in text
    assert row(text, "m-0") == ["m-0", "0.500", "24.0 ms", "13.0 ms"]
    assert "no room was given by d-1 (NoRoom)" in text


def test_an_earlier_server_told_a_mean_alone() -> None:
    earlier = {name: value for name, value in PREDICTED.items() if name != "usual_tpot"}
    text = text_of(drawn({**TOLD, "attempts": [{**ATTEMPT, "predicted": earlier}]}))
    assert row(text, "each token after") == ["13.0 ms", "9.9 ms", "-24 %"]
    assert "usual" not in text
    text = text_of(drawn({**TOLD, "attempts": [{**ATTEMPT, "predicted": {**PREDICTED, "usual_tpot": None}}]}))
    assert row(text, "each token after") == ["-", "9.9 ms"]


def test_an_attempt_without_predictions_shows_what_came() -> None:
    attempt = {**ATTEMPT, "predicted": None, "considered": [], "downgrade": "mixed", "error": "WorkerLost: gone"}
    nothing = {"actual": dict.fromkeys(ATTEMPT["actual"]), "cached_tokens": {"expected": 0, "actual": None}}
    attempts = [attempt, {**attempt, **nothing}]
    failed = {**TOLD, "outcome": "failed", "within_slo": False, "error": "Unavailable: x", "attempts": attempts}
    text = text_of(drawn(failed))
    assert row(text, "queue") == ["5.0 ms"] and "predicted" not in text and "usual" not in text
    assert "downgraded" in text and "ended by WorkerLost: gone" in text and "missed its objectives" in text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.0123, "12.3 ms"), (2.0, "2.00 s")])
def test_seconds(seconds: float | None, text: str) -> None:
    assert shown(seconds) == text
    assert off_by(None, seconds) == off_by(0.0, seconds) == ""


def test_top_prints_one_frame_into_a_pipe(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url]) == 0, "the test's output is no terminal"
    out = capsys.readouterr().out
    assert "goodput: - requests/s" in out and "1 waiting for room" in out
    assert "m-0" in out and "gold" in out and "~12.0 ms" in out


def test_rates_are_of_the_time_between_two_frames() -> None:
    gold = {**CLASS, "offered": 30, "within_slo": 19}
    later = {
        **WORKERS,
        "at": 110.0,
        "tokens": 1500,
        "classes": {**WORKERS["classes"], "gold": gold},
        "workers": [{**WORKER, "steps": 150.0, "steps_seconds": 1.5}],
    }
    text = text_of(top.frame(later, WORKERS, "here"))
    assert "2.0 requests/s, 50.0 tokens/s" in text
    assert row(text, "gold") == ["1", "2.0", "50.0 %", "63.3 %", "1", "0", "0"]
    assert row(text, "m-0")[:5] == ["mixed", "live", "███░░░", "50%", "4/128"] and "10.0 ms" in text
    assert row(text, "batch")[2:4] == ["-", "-"], "none was offered"


def test_a_roll_shows_its_generations() -> None:
    old, new = ({**WORKER, "name": name, "generation": name[:3]} for name in ("old-0", "new-0"))
    shares = [{"generation": "new", "prefill": 1, "decode": 0, "share": 0.0}]
    shares += [{"generation": "old", "prefill": 1, "decode": 2, "share": 1.0}]
    text = text_of(top.frame({**WORKERS, "workers": [old, new], "generations": shares}, None, "here"))
    assert row(text, "new ")[:3] == ["new-0", "1", "0"] and "none: a role is missing" in text
    assert row(text, "old ") == ["old-0", "1", "2", "100 %"]
    assert "of new requests" not in text_of(top.frame({**WORKERS, "generations": shares[1:]}, None, "here"))


def test_a_router_that_began_anew_has_no_rates() -> None:
    for at in (1.0, 200.0):
        text = text_of(top.frame({**WORKERS, "at": at, "tokens": 0, "classes": {}}, WORKERS, "here"))
        assert "- requests/s, - tokens/s" in text


def test_top_draws_until_q_and_leaves_the_terminal_as_it_was(url: str) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    command = [sys.executable, "-m", "deploy.cli", "top", "--url", url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm"})
    seen = b""
    while seen.count(b"goodput") < 2:
        seen += os.read(master, 65536)
    os.write(master, b"q")
    while process.poll() is None:
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 65536)
    assert process.returncode == 0
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.04, 0.5, 1.0, 2.0])
def test_a_bar_has_one_length(share: float) -> None:
    assert len(top.bar(share)) == top.BAR


def test_a_slow_worker_is_shown_as_such() -> None:
    for breaker, shown_as in (("closed", "slow"), ("open", "open")):
        slow = {**WORKERS, "workers": [{**WORKER, "breaker": breaker, "slow": True}]}
        assert shown_as in row(text_of(top.frame(slow, None, "here")), "m-0")


def test_a_breaker_is_shown_where_there_is_one() -> None:
    for breaker, shown_as in (("open", "open"), ("half-open", "half-open"), ("closed", "live")):
        broken = {**WORKERS, "workers": [{**WORKER, "breaker": breaker}]}
        assert shown_as in row(text_of(top.frame(broken, None, "here")), "m-0")


def test_names_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {**WORKERS, "workers": [{**WORKER, "name": "[red]:smile:"}]}
    plain_console().print(top.frame(odd, None, "here"))
    assert "[red]:smile:" in capsys.readouterr().out


def test_a_frame_fits_a_terminal_of_eighty_columns() -> None:
    """Nothing is cut short, even where rates and queues have many digits."""
    busy = {
        **WORKER,
        "name": "prefill-10",
        "role": "prefill",
        "leases": 128,
        "queue_seconds": 0.0,
        "queued_tokens": 99_999,
    }
    earlier = {**WORKERS, "workers": [WORKER, busy]}
    later = {
        **earlier,
        "at": 101.0,
        "tokens": 99_999,
        "classes": {"interactive": {**CLASS, "offered": 999, "refused": 999}},
    }
    assert "…" not in text_of(top.frame(later, earlier, "http://localhost:8000"), width=80)
