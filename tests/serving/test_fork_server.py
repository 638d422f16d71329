"""The fork server with real processes: what a forked one finds, how it is waited for, and what goes wrong."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from serving import fork_server
from serving.child_process import helper_environ, module_command
from serving.fork_server import ForkedProcess, ForkServer, ForkUnavailable
from serving.fork_server_process import MOST_BYTES
from tests.fakes import forked
from tests.fakes.stopping import harm, stop

LONG = 60.0  # seconds
MODULE = forked.__name__
ENVIRON = helper_environ(os.environ) | {"COLOUR": "blue"}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer((MODULE,), ENVIRON)
    yield made
    made.close()


class Started:
    """A process that runs `tests.fakes.forked`, and the way to it; by an interpreter where there is no server."""

    def __init__(self, server: ForkServer | None, *words: str, environ: dict[str, str] | None = None):
        self.way, theirs = socket.socketpair()
        self.way.settimeout(LONG)
        arguments, told = [str(theirs.fileno()), *words], ENVIRON if environ is None else environ
        with theirs, ExitStack() as undone:
            undone.callback(self.way.close)
            if server is not None:
                self.process: Any = server.start(MODULE, arguments, told, [theirs.fileno()])
            else:
                self.process = subprocess.Popen(
                    [*module_command(MODULE), *arguments],
                    pass_fds=(theirs.fileno(),),
                    env=told,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            undone.pop_all()

    def report(self) -> dict[str, Any]:
        text = b""
        while part := self.way.recv(1 << 16):
            text += part
        self.way.close()
        found: dict[str, Any] = json.loads(text)
        return found

    def begun(self) -> Started:
        assert self.way.recv(1) == b"!"
        return self

    def end(self) -> int:
        self.way.close()
        code: int = self.process.wait(LONG)
        return code


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def lives(pid: int) -> bool:
    """False for one that has ended, also where nobody has asked for its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[int]:
    return {int(pid) for each in Path("/proc/self/task").iterdir() for pid in (each / "children").read_text().split()}


def adopts() -> bool:
    value = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(fork_server.PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


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
    assert found == interpreter


def test_two_forked_processes_draw_other_numbers(server: ForkServer) -> None:
    first, second = Started(server, "report"), Started(server, "report")
    assert first.report()["drawn"] != second.report()["drawn"]
    assert {first.end(), second.end()} == {0}


def test_it_has_our_folder_cores_and_niceness_of_now(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Started(server, "0").begun().end() == 0
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(tmp_path)
    cores, found = os.sched_getaffinity(0), dict[str, Any]()

    def start() -> None:  # of this thread alone, since niceness is not taken back
        os.sched_setaffinity(0, {max(cores)})
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)
        started = Started(server, "report")
        found.update(started.report())
        started.end()

    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=start)
    thread.start()
    thread.join(LONG)
    assert found["folder"] == str(tmp_path)
    assert found["cores"] == [max(cores)]
    assert found["niceness"] == niceness + 1
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
    files, below = len(os.listdir("/proc/self/fd")), children()  # noqa: PTH208
    for _ in range(5):
        assert Started(server, "0").begun().end() == 0
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    assert children() == below
    assert not adopts(), "what others leave is not ours to wait for"
    server.close()
    assert len(children()) == len(below) - 1
    with pytest.raises(ForkUnavailable, match="closed"):
        Started(server, "0")


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
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 1


def test_a_process_that_is_not_ours_is_told_of() -> None:
    with pytest.raises(ForkUnavailable, match="no child of ours"):
        ForkedProcess(os.getppid(), [])
    with pytest.raises(ForkUnavailable, match="cannot be watched"):
        ForkedProcess(2**22 + 1, [])


def test_settings_that_libraries_have_read_already_are_not_changed(server: ForkServer) -> None:
    for environ, name in (
        (ENVIRON | {"COLOUR": "red"}, "COLOUR"),
        (ENVIRON | {"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS"),
        ({name: value for name, value in ENVIRON.items() if name != "COLOUR"}, "COLOUR"),
    ):
        with pytest.raises(ForkUnavailable, match=name):
            Started(server, "0", environ=environ)
    assert server._process is None, "nothing was started for that"
    told = ENVIRON | {"MILLRACE_TOLD": "yes", "CUDA_VISIBLE_DEVICES": "1"}
    started = Started(server, "report", environ=told)
    assert started.report()["environ"] == told
    assert started.end() == 0


def test_what_is_too_long_is_refused_and_the_server_goes_on(server: ForkServer) -> None:
    with pytest.raises(ForkUnavailable, match="too long"):
        Started(server, "0", "x" * MOST_BYTES)
    long = "x" * (MOST_BYTES // 2)
    started = Started(server, "report", long)
    assert started.report()["arguments"][-1] == long
    assert started.end() == 0


def test_closing_does_not_wait_until_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer(("tests.fakes.slow_import",), ENVIRON)
    refused: list[str] = []

    def start() -> None:
        try:
            Started(server, "0")
        except ForkUnavailable as error:
            refused.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: server._process is not None)
    server.close()
    thread.join(LONG)
    assert refused == ["the fork server has been closed"]
    assert server._process is None


STARTER = """
import os, sys
sys.path.insert(0, {root!r})
from tests.serving.test_fork_server import ENVIRON, MODULE, ForkServer, Started
server = ForkServer((MODULE,), ENVIRON)
started = Started(server, "wait").begun()
print(server._process.pid, started.process.pid, flush=True)
started.way.recv(1)
"""


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    """What it has forked goes on, and looks after that itself: this one sees its way close."""
    script = tmp_path / "starter.py"
    script.write_text(STARTER.format(root=str(Path(__file__).parents[2])))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = list(map(int, starter.stdout.readline().split()))
        assert all(map(lives, pids))
        starter.kill()
    until(lambda: not any(map(lives, pids)))
