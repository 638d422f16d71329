"""The supervisor over children that are tiny programs: started, started again when they die, and gone when it stops."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deploy.runtime import supervisor as supervisors
from deploy.runtime.supervisor import Child, ChildSpec, ForkedChild, Supervisor
from serving.child_process import ROOT
from serving.fork_server import ForkedProcess, ForkServer
from tests.fakes import supervised
from tests.fakes.forks import no_fork
from tests.fakes.stopping import stop

CHILD = Path(supervised.__file__).read_text()


class Children:
    """Runs `CHILD` where the supervisor would run millrace; `lives` are what each child has written down.

    They are `forked`, or each starts an interpreter, which takes no time to import anything.
    """

    def __init__(self, folder: Path, *, forked: bool):
        self.folder = folder
        self.forked = forked
        self.program = folder / "millrace"
        self.program.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -S -E {folder / "child.py"} "$@"\n')
        self.program.chmod(0o755)
        (folder / "child.py").write_text(CHILD)
        self.supervisor: Supervisor

    def start(self, **ways: str) -> None:
        specs = [
            ChildSpec(name=name, arguments=(name, str(self.folder), how), environ={"MILLRACE_OWN": name})
            for name, how in ways.items()
        ]
        module, forking = (supervised.__name__, tuple(ways)) if self.forked else (supervisors.CHILD_MODULE, ())
        self.supervisor = Supervisor(specs, {"MILLRACE_TOLD": "yes"}, module, forking=forking)
        self.supervisor.start()

    def there(self, *names: str) -> bool:
        """They live, and the supervisor has heard of it, which may be a moment later."""
        return all(self.lives(name) and name in self.supervisor.processes for name in names)

    def lives(self, name: str) -> list[list[str]]:
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(params=[False, True], ids=["interpreters", "forked"])
async def children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Children]:
    made = Children(tmp_path, forked=request.param)
    if not made.forked:
        monkeypatch.setattr(sys, "executable", str(made.program))
    monkeypatch.setattr(supervisors, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervisors, "LONGEST_PAUSE", 0.04)
    yield made
    await made.supervisor.stop(0.0)


async def test_children_start_in_sessions_of_their_own_and_leave_when_asked(children: Children) -> None:
    children.start(one="stays", two="stays")
    await until(lambda: children.there("one", "two"))
    (one,), (two,) = children.lives("one"), children.lives("two")
    assert one[1] == one[0] and two[1] == two[0], "Ctrl-C is for us alone"
    assert one[2] == two[2] == "yes"
    assert one[3] == "one" and two[3] == "two", "what is a child's alone"
    for process in children.supervisor.processes.values():
        assert isinstance(process, ForkedChild) == children.forked
    await children.supervisor.stop(10.0)
    assert not runs(one[0]) and not runs(two[0])
    codes = [process.returncode for process in children.supervisor.processes.values()]
    assert codes == [-signal.SIGTERM] * 2


async def test_signals_leave_exit_statuses_to_the_event_loop(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a child that died between SIGTERM and SIGCONT had ended with 255."""
    children.start(one="stays", two="stubborn")
    await until(lambda: children.there("one", "two"))

    def poll(process: subprocess.Popen[bytes]) -> None:
        raise AssertionError("whoever asks takes the exit status")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "poll", poll)
        patch.setattr(children.supervisor._forks, "close", lambda: None)  # that is another's exit status
        await children.supervisor.stop(2.0)
    codes = {name: process.returncode for name, process in children.supervisor.processes.items()}
    assert codes == {"one": -signal.SIGTERM, "two": -signal.SIGKILL}


async def test_a_child_that_dies_is_started_again(children: Children) -> None:
    children.start(one="stays")
    await until(lambda: children.there("one"))
    os.kill(int(children.lives("one")[0][0]), signal.SIGKILL)
    await until(lambda: len(children.lives("one")) == 2)
    assert children.lives("one")[0][0] != children.lives("one")[1][0]


async def test_a_child_that_keeps_dying_is_started_again_and_again(children: Children) -> None:
    children.start(one="dies", two="stays")
    await until(lambda: len(children.lives("one")) >= 3 and children.lives("two"))
    assert len(children.lives("two")) == 1, "the others are left alone"


async def test_a_child_that_does_not_leave_is_killed(children: Children) -> None:
    children.start(one="stubborn")
    await until(lambda: children.there("one"))
    await children.supervisor.stop(0.05)
    assert not runs(children.lives("one")[0][0])
    assert children.supervisor.processes["one"].returncode == -signal.SIGKILL


async def test_a_child_that_was_stopped_leaves_as_well(children: Children) -> None:
    children.start(one="obliging")
    await until(lambda: children.there("one"))
    stop(int(children.lives("one")[0][0]))
    async with asyncio.timeout(60):
        await children.supervisor.stop(600.0)
    assert children.supervisor.processes["one"].returncode == 0


async def test_a_fork_server_that_dies_takes_nobody_along(children: Children) -> None:
    children.start(one="stays", two="stays")
    await until(lambda: children.there("one", "two"))
    server = children.supervisor._forks._process
    assert (server is not None) == children.forked
    if server is not None:
        server.kill()
    os.kill(int(children.lives("one")[0][0]), signal.SIGKILL)
    await until(lambda: len(children.lives("one")) == 2)
    (two,) = children.lives("two")
    assert runs(two[0])


async def test_a_child_that_is_let_go_as_it_starts_is_gone(children: Children) -> None:
    children.start(one="stays")
    await asyncio.sleep(0)
    await children.supervisor.let_go("one", 5.0)
    assert not children.supervisor.processes
    await children.supervisor.stop(5.0)
    assert not [pid for pid, *_ in children.lives("one") if runs(pid)]


async def test_a_child_that_is_forked_as_it_is_let_go_is_ended(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not children.forked:  # an interpreter is started by the event loop itself
        children.start()
        return
    loop, pids, start = asyncio.get_running_loop(), list[int](), ForkServer.start
    going = threading.Event()

    def let_go_meanwhile(server: ForkServer, *given: Any, **named: Any) -> ForkedProcess:
        process = start(server, *given, **named)
        pids.append(process.pid)
        loop.call_soon_threadsafe(let_go)
        assert going.wait(60)
        return process

    def let_go() -> None:
        going_task.append(asyncio.create_task(children.supervisor.let_go("one", 5.0)))
        loop.call_soon(lambda: loop.call_soon(going.set))

    going_task: list[asyncio.Task[None]] = []
    monkeypatch.setattr(ForkServer, "start", let_go_meanwhile)
    children.start(one="stays")
    await until(lambda: going_task)
    await going_task[0]
    await until(lambda: not runs(str(pids[0])))


async def test_a_child_starts_where_no_thread_is_left_to_fork_it(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    children.start(one="stays")
    await until(lambda: children.there("one"))
    assert isinstance(children.supervisor.processes["one"], asyncio.subprocess.Process)


async def test_a_child_that_the_system_cannot_start_is_tried_again(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: nobody knew, and it was not started any more."""
    starting, refused = Supervisor._started, list[str]()

    async def refuse(supervisor: Supervisor, child: ChildSpec) -> Child:
        if len(refused) < 2:
            refused.append(child.name)
            raise BlockingIOError("no process is left")
        return await starting(supervisor, child)

    monkeypatch.setattr(Supervisor, "_started", refuse)
    children.start(one="stays")
    await until(lambda: children.there("one"))
    assert refused == ["one", "one"]


async def test_a_child_that_cannot_be_forked_starts_an_interpreter(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkServer, "start", no_fork)
    children.start(one="stays")
    await until(lambda: children.there("one"))
    assert isinstance(children.supervisor.processes["one"], asyncio.subprocess.Process)


async def test_nobody_is_started_again_once_it_stops(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "LONGEST_PAUSE", 600.0)
    monkeypatch.setattr(supervisors, "FIRST_PAUSE", 600.0)
    children.start(one="dies", two="stays")
    await until(lambda: children.there("one", "two"))
    await until(lambda: children.supervisor.processes["one"].returncode is not None)
    async with asyncio.timeout(60):  # it does not wait for the pause to be over
        await children.supervisor.stop(10.0)
    assert len(children.lives("one")) == 1 and not runs(children.lives("two")[0][0])


async def test_stopping_at_once_leaves_nobody_behind(children: Children) -> None:
    children.start(one="stays", two="stays")
    await asyncio.sleep(0)
    await children.supervisor.stop(5.0)
    assert not [pid for name in ("one", "two") for pid, *_ in children.lives(name) if runs(pid)]


def test_settings_of_the_front_alone_do_not_reach_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MILLRACE_GRPC_PORT=8100 the front listens there, and every child would try to."""
    for name in ("GRPC_PORT", "METRICS_PORT", "ADVERTISE", "API_KEY"):
        monkeypatch.setenv(f"MILLRACE_{name}", "x")
    environ = Supervisor([], {}).environ
    assert [name for name in environ if name.startswith("MILLRACE_")] == []


def test_children_import_what_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: whatever lay in the working directory came first."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", ".", "/elsewhere")))
    assert Supervisor([], {}).environ["PYTHONPATH"] == f"{ROOT}{os.pathsep}/elsewhere"


def test_endings_are_told_by_name_where_they_have_one() -> None:
    assert supervisors._ending(3) == "exit code 3"
    assert supervisors._ending(-signal.SIGKILL) == "signal SIGKILL"
    assert supervisors._ending(-int(signal.SIGRTMIN) - 3) == f"signal {int(signal.SIGRTMIN) + 3}"
