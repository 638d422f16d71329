"""Waits of tests outlast a machine that stands still: a bound that is only there against hanging is no measurement."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import files, lines, tree

LEAST_SECONDS = 30.0
OWN_TIME = ("tests/deploy/simulator/test_virtual_loop.py",)  # its seconds are the simulator's
BOUNDS = {"asyncio.timeout": 0, "asyncio.wait_for": 1}  # functions, and which argument is their time
CLIENTS = {f"httpx.{name}" for name in ("Client", "AsyncClient", "get", "post", "put", "delete", "request", "stream")}


def hurried(root: ast.AST) -> Iterator[ast.Call]:
    """Waits that are given up early, and clients that are, as all are after httpx's own five seconds."""
    for node in ast.walk(root):
        if not isinstance(node, ast.Call):
            continue
        function, named = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        seconds = named.get("timeout")
        if function in BOUNDS:
            given = [*node.args, seconds][BOUNDS[function]]
            if is_short(given):
                yield node
        elif function in CLIENTS and "transport" not in named and (seconds is None or is_short(seconds)):
            yield node  # a transport in this process has no time of its own


def unawaited(root: ast.AST) -> Iterator[ast.Call]:
    """Signals to others that may be SIGSTOP: who was stopped so may still answer what is asked next."""
    for node in ast.walk(root):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("os.kill", ".send_signal")):
            process, number = ast.unparse(node.args[0]), ast.unparse(node.args[-1])
            if process == "os.getpid()":
                continue
            if "SIGSTOP" in number or ("SIG" not in number and number != "0"):
                yield node


def is_short(seconds: ast.expr | None) -> bool:
    return (
        isinstance(seconds, ast.Constant) and isinstance(seconds.value, int | float) and seconds.value < LEAST_SECONDS
    )


def test_waits_are_longer_than_a_standstill() -> None:
    waiting = [
        path
        for path in files("tests")
        if any(f"{name}(" in line for line in lines(path) for name in (*BOUNDS, *CLIENTS))
        and path.as_posix() not in OWN_TIME
    ]
    assert len(waiting) > 50, "the rule has lost sight of the waits there are"
    assert [f"{path}:{call.lineno}" for path in waiting for call in hurried(tree(path))] == []


@pytest.mark.parametrize(
    "code",
    ["asyncio.timeout(5)", "asyncio.wait_for(x, 5.0)", "asyncio.wait_for(x, timeout=5)", "httpx.AsyncClient()"],
)
def test_the_rule_sees_a_hurried_wait(code: str) -> None:
    assert len(list(hurried(ast.parse(code)))) == 1


def test_what_is_stopped_stands_still_before_the_test_goes_on() -> None:
    """By `stop` and `harm` of tests/fakes/stopping.py."""
    signalling = [path for path in files("tests") if any("stop(" in line or "harm(" in line for line in lines(path))]
    assert len(signalling) > 10, "the rule has lost sight of the signals there are"
    found = [f"{path}:{call.lineno}" for path in files("tests") for call in unawaited(tree(path))]
    assert [place for place in found if not place.startswith("tests/fakes/stopping.py:")] == []


@pytest.mark.parametrize("code", ["os.kill(x, signal.SIGSTOP)", "os.kill(x, how)", "x.send_signal(how)"])
def test_the_rule_sees_a_stop_that_is_not_awaited(code: str) -> None:
    assert len(list(unawaited(ast.parse(code)))) == 1
    assert not list(unawaited(ast.parse("os.kill(x, signal.SIGKILL); os.kill(x, 0)")))
