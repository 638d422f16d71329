"""The fork server when something goes wrong: who dies, is refused or stands still, and that nothing is left of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import fork_server
from serving.fork_server import ForkedProcess, ForkServer, ForkUnavailable
from tests.fakes.stopping import harm, stop
from tests.serving.forked_processes import ENVIRON, LONG, MODULE, Started, children, lives, starting, until


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer((MODULE,), ENVIRON)
    yield made
    made.close()


def test_the_fork_server_may_die(server: ForkServer) -> None:
    before = Started(server, "wait").begun()
    assert server._process is not None
    first = server._process.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: not lives(first))
    assert lives(before.process.pid)
    assert Started(server, "0").begun().end() == 0, "another is started"
    assert server._process.pid != first
    assert before.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_a_whole_service_leaves_it_to_us_to_end_the_fork_server(
    server: ForkServer, number: signal.Signals
) -> None:
    Started(server, "0").begun().end()
    assert server._process is not None
    harm(server._process.pid, number)
    assert Started(server, "0").begun().end() == 0
    assert server._process.poll() is None


def test_one_that_cannot_import_what_it_is_to_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    server = ForkServer(("tests.fakes.there_is_none",), ENVIRON)
    for _ in range(2):
        with pytest.raises(ForkUnavailable, match="has ended"):
            Started(server, "0")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert server._process is None


def test_one_that_stands_still_is_ended(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    Started(server, "0").begun().end()
    assert server._process is not None
    pid = server._process.pid
    stop(pid)
    monkeypatch.setattr(fork_server, "FORK_SECONDS", 0.1)
    with pytest.raises(ForkUnavailable, match=r"no answer within 0\.1 s"):
        Started(server, "0")
    assert not lives(pid)
    monkeypatch.setattr(fork_server, "FORK_SECONDS", LONG)
    assert Started(server, "0").begun().end() == 0


@pytest.mark.parametrize("moment", [1, 2])
def test_an_answer_that_was_not_waited_for_is_no_answer_to_others(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """To either word. Before: each start after that was told of the process of the one before."""
    Started(server, "0").begun().end()
    below, looks = children(), iter(range(1, moment))

    def interrupted(descriptor: int, seconds: float | None) -> bool:
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return readable(descriptor, seconds)

    readable = fork_server._readable
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "_readable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Started(server, "wait")
    for code in (3, 4):
        started = Started(server, str(code)).begun()
        assert started.end() == code
    server.close()
    assert len(children()) == len(below) - 1, "the fork server is gone, and nothing of what it has forked is left"


def test_what_a_dying_fork_server_has_forked_is_not_left(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed once it has been told to fork, at moments that differ."""
    below = children()
    for _ in range(10):
        Started(server, "0").begun().end()
        assert server._process is not None
        pid, heard = server._process.pid, server._heard

        def killed(seconds: float, *, pid: int = pid, heard: Any = heard) -> bytes:
            word: bytes = heard(seconds)
            threading.Timer(random.uniform(0, 0.002), os.kill, (pid, signal.SIGKILL)).start()
            return word

        with monkeypatch.context() as patch:
            patch.setattr(server, "_heard", killed)
            try:
                Started(server, "0").begun().end()
            except ForkUnavailable:
                continue
    server.close()
    until(lambda: children() <= below)


def test_it_may_be_ended_twice_as_it_starts_and_no_more(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody, or a host for want of memory, did that; what it imports did not."""
    heard = server._heard

    def killed(seconds: float) -> bytes:
        if seconds == fork_server.READY_SECONDS and server._process is not None:
            server._process.send_signal(signal.SIGKILL)
        return heard(seconds)

    for tries in (2, fork_server.MOST_TRIES):
        monkeypatch.setattr(server, "_heard", killed)
        for _ in range(tries):
            assert server.failure is None
            with pytest.raises(ForkUnavailable, match="has ended"):
                Started(server, "0")
        monkeypatch.setattr(server, "_heard", heard)
        if tries == 2:
            assert not caplog.records
            assert Started(server, "0").begun().end() == 0
            server._end()  # from now on it counts anew
    with pytest.raises(ForkUnavailable, match="no fork server: it has ended"):
        Started(server, "0")
    assert len(caplog.records) == 1


def test_what_the_system_refuses_is_left_to_an_interpreter(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that we may not search, and descriptors that are used up: before, the caller had an OSError of ours."""

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(ForkUnavailable, match="Permission denied"):
            Started(server, "0")
    Started(server, "0").begun().end()
    below = children()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", denied)
        with pytest.raises(ForkUnavailable, match="cannot be watched"):
            Started(server, "0")
    assert children() == below
    assert Started(server, "0").begun().end() == 0


def test_a_descriptor_that_is_none_costs_one_start_and_not_the_fork_server(server: ForkServer) -> None:
    Started(server, "0").begun().end()
    before = server._process
    with pytest.raises(ForkUnavailable, match="cannot be told"):
        server.start(MODULE, ["0"], ENVIRON, [987])
    assert Started(server, "0").begun().end() == 0
    assert server._process is before


def test_a_process_that_cannot_be_what_it_is_to_be_is_none(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is found out in the process itself; one that an interpreter runs would tell who looks."""
    Started(server, "0").begun().end()
    below = children()
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {4000})
        with pytest.raises(ForkUnavailable, match="could not begin: OSError"):
            Started(server, "0")
    assert children() == below, "the fork server goes on"
    assert Started(server, "0").begun().end() == 0
    assert "Traceback" not in capfd.readouterr().err


def test_who_is_interrupted_while_it_starts_can_start_it_again(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the next start took its word that it is ready for an answer."""
    below = children()

    def interrupted(descriptor: int, seconds: float | None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "_readable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Started(server, "0")
    assert children() == below
    assert Started(server, "5").begun().end() == 5


def test_closing_does_not_wait_for_one_that_stands_still(server: ForkServer) -> None:
    """Before: ten seconds for its answer."""
    Started(server, "0").begun().end()
    assert server._process is not None
    stop(server._process.pid)
    thread, refused = starting(server)
    until(server._starting.locked)
    server.close()
    thread.join(LONG)
    assert refused == ["the fork server has been closed"]


def test_where_children_are_not_waited_for_they_are_all_the_same(tmp_path: Path) -> None:
    """Who ignores SIGCHLD hands that down: the fork server could wait for nobody."""
    script = tmp_path / "ignoring.py"
    script.write_text(f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{STARTER.format(root=ROOT)}")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = starter.stdout.readline().split()
        starter.kill()
    assert len(pids) == 2


def test_a_process_that_nobody_knows_of_ends(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    Started(server, "0").begun().end()
    pids: list[int] = []

    def lost(pid: int, command: object) -> ForkedProcess:
        pids.append(pid)
        raise ForkUnavailable("lost")

    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "ForkedProcess", lost)
        with pytest.raises(ForkUnavailable, match="lost"):
            Started(server, "wait")
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], 0)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_closing_does_not_wait_until_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer(("tests.fakes.slow_import",), ENVIRON)
    thread, refused = starting(server)
    until(lambda: server._process is not None)
    server.close()
    thread.join(LONG)
    assert refused == ["the fork server has been closed"]
    assert server._process is None


ROOT = str(Path(__file__).parents[2])
STARTER = """
import os, sys
sys.path.insert(0, {root!r})
from tests.serving.forked_processes import ENVIRON, MODULE, ForkServer, Started
server = ForkServer((MODULE,), ENVIRON)
started = Started(server, "wait").begun()
print(server._process.pid, started.process.pid, flush=True)
started.way.recv(1)
"""


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    """What it has forked goes on, and looks after that itself: this one sees its way close."""
    script = tmp_path / "starter.py"
    script.write_text(STARTER.format(root=ROOT))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = list(map(int, starter.stdout.readline().split()))
        assert all(map(lives, pids))
        starter.kill()
    until(lambda: not any(map(lives, pids)))


def test_it_says_nothing_when_who_started_it_dies_meanwhile(tmp_path: Path) -> None:
    script = tmp_path / "starter.py"
    lines = STARTER.format(root=ROOT).replace("(MODULE,)", '("tests.fakes.orphan_import",)')
    script.write_text(lines)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None and starter.stderr is not None
        assert starter.stdout.readline() == "importing\n"
        starter.kill()
        assert starter.stderr.read() == "", "it has ended, and said nothing"
