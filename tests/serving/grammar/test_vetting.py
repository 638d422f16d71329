"""A grammar is tried in a process that it cannot outlive, outgrow or hold on to."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from serving.errors import Unavailable
from serving.grammar import vetting, vetting_child
from serving.grammar.forms import choice_grammar, json_grammar, written_grammar
from serving.grammar.grammars import GrammarError
from serving.grammar.vetting import GrammarTooCostly, GrammarVetter
from serving.grammar.vocabulary import Vocabulary
from serving.text.tokenizer import Tokenizer
from tests.fakes.stopping import stop

# 55 bytes, within every limit of the library: four seconds.
LONG = "start: A\nA: /(.*a.{15})/ & /(.*b.{14})/ & ~/(.*c.{13})/"
LONGER = "start: A\nA: /(.*a.{45})/ & /(.*b.{44})/ & ~/(.*c.{43})/"  # more than anybody waits for


@pytest.fixture(scope="module")
def vetter(tokenizer: Tokenizer) -> Iterator[GrammarVetter]:
    made = GrammarVetter(lambda: Vocabulary.of(tokenizer), seconds=0.3)
    yield made
    made.close()


def child_of(vetter: GrammarVetter) -> int:
    vetter.vet(choice_grammar(["a"]))
    assert vetter._child is not None and is_child(vetter._child.pid)
    return vetter._child.pid


def is_child(pid: int) -> bool:
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent == os.getpid() and vetting_child.__name__ in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def of_children_that_ended() -> float:
    """Seconds of CPU time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_compile_is_broken_off(vetter: GrammarVetter) -> None:
    before = of_children_that_ended() + cpu_seconds(child_of(vetter))
    with pytest.raises(GrammarTooCostly, match=r"more than 0\.3 s"):
        vetter.vet(written_grammar(LONG))
    assert 0.2 < of_children_that_ended() - before < 1.0
    vetter.vet(choice_grammar(["b"]))  # in another process


def test_one_that_is_slow_to_end_was_broken_off_all_the_same(
    vetter: GrammarVetter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a machine that stood still for a second between the end of its socket and its own made it a 503."""
    wait = subprocess.Popen.wait

    def late(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None and timeout < 5.0:
            raise subprocess.TimeoutExpired(child.args, timeout)
        return wait(child, timeout)

    child_of(vetter)
    monkeypatch.setattr(subprocess.Popen, "wait", late)
    with pytest.raises(GrammarTooCostly):
        vetter.vet(written_grammar(LONG))


def test_the_first_mask_is_part_of_it(vetter: GrammarVetter) -> None:
    """It compiles, but nothing may come first."""
    with pytest.raises(GrammarError, match=r"^no text follows it$"):
        vetter.vet(json_grammar({"$ref": "#"}))


def test_a_process_that_dies_is_replaced(vetter: GrammarVetter) -> None:
    """Before, one that died while idle was the next grammar's 503."""
    os.kill(child_of(vetter), signal.SIGKILL)
    assert vetter._child is not None
    vetter._child.wait(60.0)
    vetter.vet(choice_grammar(["c"]))


def test_one_that_is_ended_over_a_grammar_is_not_its_fault(vetter: GrammarVetter) -> None:
    pid = child_of(vetter)
    stop(pid)
    killing = Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killing.start()
    with pytest.raises(Unavailable):
        vetter.vet(choice_grammar(["c"]))
    vetter.vet(choice_grammar(["c"]))


def test_no_secret_goes_to_the_process(vetter: GrammarVetter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the key of the API and that of the cluster did."""
    vetter.close()
    monkeypatch.setenv("MILLRACE_CLUSTER_KEY", "sk-secret")
    pid = child_of(vetter)
    assert b"sk-secret" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_stopping_ends_a_wait(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a server that left waited for twenty seconds."""
    monkeypatch.setattr(vetting, "PATIENCE", 60.0)
    other = GrammarVetter(lambda: Vocabulary.of(tokenizer))
    pid = child_of(other)
    stop(pid)
    stopping = Timer(0.2, other.stop)
    stopping.start()
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            other.vet(choice_grammar(["c"]))
        assert caught.value.code == "draining"
    stopping.join()
    assert not is_child(pid)


def test_stopping_ends_the_wait_for_one_that_has_let_go_of_its_socket(tokenizer: Tokenizer) -> None:
    """Before: a server that left waited twenty seconds for a process that hung at its end."""
    other = GrammarVetter(lambda: Vocabulary.of(tokenizer))
    pid = child_of(other)
    stop(pid)
    assert other._connection is not None
    other._connection.close()  # as though the other end had gone
    stopping = Timer(0.2, other.stop)
    stopping.start()
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        other.vet(choice_grammar(["c"]))
    assert caught.value.code == "draining" and time.monotonic() - began < vetting.ENDING_SECONDS / 2
    stopping.join()
    assert not is_child(pid)


def test_one_that_takes_no_grammar_is_given_up(vetter: GrammarVetter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: where it was more than a socket holds, forty seconds."""
    stop(child_of(vetter))
    assert vetter._connection is not None
    monkeypatch.setattr(vetting, "PATIENCE", 0.1)
    vetting._bound_sends(vetter._connection)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="in time"):
        vetter.vet("x" * (4 << 20))
    assert time.monotonic() - began < vetting.ENDING_SECONDS / 2
    monkeypatch.undo()
    vetter.vet(choice_grammar(["c"]))


def test_one_that_gets_no_time_is_nobodys_fault(vetter: GrammarVetter, monkeypatch: pytest.MonkeyPatch) -> None:
    stop(child_of(vetter))
    monkeypatch.setattr(vetting, "PATIENCE", 0.1)
    with pytest.raises(Unavailable):
        vetter.vet(choice_grammar(["d"]))
    monkeypatch.undo()
    vetter.vet(choice_grammar(["d"]))


def test_one_that_takes_no_vocabulary_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: whoever sent a grammar waited for ever."""
    start, started = subprocess.Popen.__init__, list[subprocess.Popen[bytes]]()

    def stopped(child: subprocess.Popen[bytes], *given: Any, **options: Any) -> None:
        start(child, *given, **options)
        stop(child.pid)
        started.append(child)

    monkeypatch.setattr(vetting, "PATIENCE", 0.1)
    monkeypatch.setattr(subprocess.Popen, "__init__", stopped)
    large: Any = bytes(4 << 20)  # more than a socket holds
    with pytest.raises(Unavailable, match="cannot begin"):
        GrammarVetter(lambda: large).vet(choice_grammar(["a"]))
    assert [child.poll() for child in started] == [-signal.SIGKILL]


def test_a_vocabulary_that_cannot_be_made_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: pytest.fail("a process was started"))

    def missing() -> Vocabulary:
        raise ValueError("no vocabulary")

    with pytest.raises(ValueError, match="no vocabulary"):
        GrammarVetter(missing).vet(choice_grammar(["a"]))


def test_a_host_without_room_for_a_process_is_nobodys_fault(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a 500."""

    def no_room(*given: object, **options: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    other = GrammarVetter(lambda: Vocabulary.of(tokenizer))
    monkeypatch.setattr(vetting.subprocess, "Popen", no_room)
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            other.vet(choice_grammar(["a"]))
        assert caught.value.retry_after
    monkeypatch.undo()
    other.vet(choice_grammar(["a"]))
    other.close()


def test_a_costly_grammar_is_told_so_although_no_other_process_can_begin(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = GrammarVetter(lambda: Vocabulary.of(tokenizer), seconds=0.1)
    child = child_of(other)

    def silent(*given: object) -> None:
        raise Unavailable("grammars are not compiled in time")

    monkeypatch.setattr(other, "_vocabulary", silent)
    with pytest.raises(GrammarTooCostly):
        other.vet(written_grammar(LONG))
    assert other._child is None and not is_child(child)
    monkeypatch.undo()
    other.vet(choice_grammar(["a"]))
    other.close()


def test_it_leaves_with_its_owner(tokenizer: Tokenizer, vetter: GrammarVetter) -> None:
    vetter.close()
    other = GrammarVetter(lambda: Vocabulary.of(tokenizer))
    pid = child_of(other)
    del other
    gc.collect()
    assert not is_child(pid)
