"""A process that a fork server has forked: what it finds, and how it is waited for."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from serving import fork_server, logs
from serving.fork_server import ForkedProcess, ForkServer, ForkUnavailable
from serving.fork_server_process import MOST_BYTES
from tests.fakes.stopping import harm
from tests.serving.forked_processes import ENVIRON, LONG, MODULE, Started, adopts, children, descriptors


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer((MODULE,), ENVIRON)
    yield made
    made.close()


def test_a_forked_process_finds_what_one_finds_that_an_interpreter_has_started(server: ForkServer) -> None:
    other = Started(None, "report", "two words", "")
    interpreter = other.report()
    assert other.process.wait(LONG) == 0
    one = Started(server, "report", "two words", "")
    found = one.report()
    assert one.process.wait(LONG) == 0
    assert found["pid"] == one.process.pid
    assert found["parent"] == os.getpid(), "it is our child, and can see when we are gone"
    assert found["session"], "Ctrl-C is for us"
    for each in (found, interpreter):
        number = int(each["arguments"].pop(0))
        assert number in each["files"], "descriptors keep their numbers"
        each["command"] = [word for word in each["command"] if word != str(number)]
        each["files"] = len([other for other in each["files"] if other > 2])
        del each["pid"], each["drawn"]
    assert found.pop("frozen"), "what has been imported is shared"
    assert not interpreter.pop("frozen")
    assert found == interpreter


def test_two_forked_processes_draw_other_numbers(server: ForkServer) -> None:
    first, second = Started(server, "report"), Started(server, "report")
    assert first.report()["drawn"] != second.report()["drawn"]
    assert {first.end(), second.end()} == {0}


def test_it_has_what_we_have_now(server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Started(server, "0").begun().end() == 0
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(tmp_path)
    cores, found = os.sched_getaffinity(0), dict[str, Any]()

    def start() -> None:  # of this thread alone, since niceness is not taken back
        os.sched_setaffinity(0, {max(cores)})
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})
        started = Started(server, "report")
        found.update(started.report())
        started.end()

    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    umask = os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    thread = threading.Thread(target=start)
    thread.start()
    thread.join(LONG)
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found["folder"] == str(tmp_path)
    assert found["cores"] == [max(cores)]
    assert found["niceness"] == min(19, niceness + 1)
    assert found["umask"] == ["Umask:\t0027"]
    assert [soft - 1, hard] in found["limits"]
    assert found["blocked"] == [signal.SIGUSR1]
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert Started(server, "0").begun().end() == 0, "a folder that has been removed is one to be in"


def test_what_it_returns_is_the_exit_status(server: ForkServer) -> None:
    assert Started(server, "7").begun().end() == 7
    killed = Started(server, "wait").begun()
    assert killed.process.poll() is None
    killed.process.kill()
    assert killed.process.wait(LONG) == killed.process.poll() == -signal.SIGKILL
    killed.process.kill()  # nothing is told to another process that may have its number
    killed.way.close()
    left = Started(server, "wait").begun()
    left.process.terminate()
    assert left.process.wait(LONG) == -signal.SIGTERM
    left.way.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_at_once_is_not_lost(server: ForkServer, number: signal.Signals) -> None:
    """Before: the fork server's, which ignored it, until the process had begun: it was killed when its time was up."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("what is started here hears it as little as we do")
    Started(server, "0").begun().end()
    for _ in range(5):
        started = Started(server, "wait")
        harm(started.process.pid, number)
        assert started.process.wait(LONG) == -number
        started.way.close()


def test_it_has_its_session_once_it_is_told_of(server: ForkServer) -> None:
    """Before: it was in the fork server's for a moment, whose end then took its exit status along."""
    Started(server, "0").begun().end()
    for _ in range(5):
        started = Started(server, "wait")
        assert os.getsid(started.process.pid) == os.getpgid(started.process.pid) == started.process.pid
        started.process.kill()
        server._end()
        assert started.process.wait(LONG) == -signal.SIGKILL
        started.way.close()


def test_who_else_has_waited_for_it_has_the_exit_status(server: ForkServer) -> None:
    started = Started(server, "7").begun()
    os.waitpid(started.process.pid, 0)
    assert started.process.poll() == started.end() == fork_server.LOST_STATUS


def test_threads_may_wait_for_one_process(server: ForkServer) -> None:
    started = Started(server, "wait").begun()
    with pytest.raises(subprocess.TimeoutExpired):
        started.process.wait(0.01)
    codes: list[int] = []
    waiting = [threading.Thread(target=lambda: codes.append(started.process.wait(LONG))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    started.way.close()
    for thread in waiting:
        thread.join(LONG)
    assert codes == [0] * 4


def test_its_descriptor_tells_the_end(server: ForkServer) -> None:
    started = Started(server, "wait").begun()
    assert not select.select([started.process], [], [], 0)[0]
    started.way.close()
    assert select.select([started.process], [], [], LONG)[0]
    assert started.process.wait(0) == 0


def test_descriptors_may_have_any_numbers(server: ForkServer) -> None:
    """Also those that the fork server has for its own, and each other's."""
    Started(server, "0").begun().end()
    pairs = [socket.socketpair() for _ in range(20)]
    theirs = [other.fileno() for _, other in pairs]
    processes = []
    for number, (way, _) in zip(theirs, pairs, strict=True):
        order = [*theirs[theirs.index(number) :], *theirs[: theirs.index(number)]]
        processes.append(server.start(MODULE, [str(number), "0"], ENVIRON, order))
        assert way.recv(1) == b"!"
    assert [process.wait(LONG) for process in processes] == [0] * 20
    for way, other in pairs:
        way.close()
        other.close()


def test_nothing_is_left_of_what_has_ended(server: ForkServer) -> None:
    Started(server, "0").begun().end()
    files, below = descriptors(), children()
    for _ in range(5):
        assert Started(server, "0").begun().end() == 0
    assert descriptors() == files
    assert children() == below
    assert not adopts(), "what others leave is not ours to wait for"
    server.close()
    assert len(children()) == len(below) - 1
    with pytest.raises(ForkUnavailable, match="closed"):
        Started(server, "0")


def test_a_process_that_is_not_ours_is_told_of() -> None:
    with pytest.raises(ForkUnavailable, match="no child of ours"):
        ForkedProcess(os.getppid(), [])
    with pytest.raises(ForkUnavailable, match="cannot be watched"):
        ForkedProcess(2**22 + 1, [])


def test_settings_that_libraries_have_read_already_are_not_changed(server: ForkServer) -> None:
    for environ, name in (
        (ENVIRON | {"COLOUR": "red"}, "COLOUR"),
        (ENVIRON | {"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS"),
        (ENVIRON | {"CXXFLAGS": "-g"}, "CXXFLAGS"),
        ({name: value for name, value in ENVIRON.items() if name != "COLOUR"}, "COLOUR"),
    ):
        with pytest.raises(ForkUnavailable, match=name):
            Started(server, "0", environ=environ)
    assert server._process is None, "nothing was started for that"
    told = ENVIRON | {"MILLRACE_TOLD": "yes", "CUDA_VISIBLE_DEVICES": "1"}
    told["MILLRACE_ODD"] = os.fsdecode(b"\xff\n\xc3\xa9")
    started = Started(server, "report", environ=told)
    assert started.report()["environ"] == told
    assert started.end() == 0


def test_what_is_too_long_is_refused_and_the_server_goes_on(server: ForkServer) -> None:
    with pytest.raises(ForkUnavailable, match="too long"):
        Started(server, "0", "x" * MOST_BYTES)
    assert server._process is None, "nothing was started for that"
    long = "x" * (MOST_BYTES - 16_384)
    started = Started(server, "report", long)
    assert started.report()["arguments"][-1] == long
    assert started.end() == 0


def test_it_logs_as_we_do(server: ForkServer) -> None:
    """Before: as text, also where JSON was asked for."""
    Started(server, "0").begun().end()
    assert server._process is not None
    environ = Path(f"/proc/{server._process.pid}/environ").read_text().split("\0")
    (told,) = (line.partition("=")[2] for line in environ if line.startswith(f"{logs.HANDED_DOWN}="))
    setup = logs.current_setup()
    assert json.loads(told) == asdict(replace(setup, name=f"{setup.name}/forks"))


def test_output_that_children_do_not_have_is_not_handed_on(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where standard output was closed its number may be that of anything."""
    monkeypatch.setattr(os, "get_inheritable", lambda descriptor: descriptor != 2)
    with pytest.raises(ForkUnavailable, match="standard output or error"):
        Started(server, "0")
