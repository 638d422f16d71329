"""Benches that start servers refuse what cannot be before they start any, naming the flag; and say how far they are."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from bench import overload, prediction
from bench.sse import Outcome

NUMBERS = ("0", "-1", "nan", "inf")


@pytest.mark.parametrize(
    ("bench", "flag", "value"),
    [
        *((prediction, flag, number) for flag in ("--seconds", "--warm-up", "--capacity") for number in NUMBERS),
        *((overload, flag, number) for flag in ("--surge", "--warm-up", "--capacity") for number in NUMBERS),
        *((bench, "--fleet", "nobody=2") for bench in (prediction, overload)),
        *((prediction, flag, text) for flag in ("--chats", "--long") for text in ("", "1", "1,x", "1,-1", "1,nan")),
        *((overload, flag, text) for flag in ("--batch", "--interactive") for text in ("", "1,1", "1,1,inf")),
        (overload, "--seeds", "0"),
    ],
)
def test_what_cannot_be_is_refused(
    bench: ModuleType, flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def started(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(bench, "open_server", started)
    monkeypatch.setattr(sys, "argv", [bench.__name__, f"{flag}={value}"])
    assert bench.main() == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("bench", [prediction, overload])
def test_one_may_leave(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "open_server", interrupted)
    monkeypatch.setattr(sys, "argv", [bench.__name__])
    assert bench.main() == 130
    assert "interrupted" in capsys.readouterr().err


def outcome(error: str | None) -> Outcome:
    return Outcome(prompt_tokens=1, max_tokens=1, error=error)


def test_a_line_tells_of_every_tenth_of_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    finished = prediction.progress(25)
    for number in range(25):
        finished(outcome("refused" if number == 3 else None))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "2/25 requests have ended" and lines[1] == "4/25 requests have ended, 1 failed"
    assert lines[-1] == "25/25 requests have ended, 1 failed" and len(lines) == 13
