"""Tries a grammar in a process of its own before any worker sees it: bounded in CPU time and memory, whatever it is.

The library's own limits do not bound a compile (55 bytes of intersected expressions take four seconds under any of
them), and a thread cannot be broken off.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import subprocess
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from serving.child_process import ENDED_FROM_OUTSIDE, helper_environ, module_command
from serving.errors import Unavailable
from serving.grammar.grammars import GrammarError
from serving.grammar.vocabulary import Vocabulary

SECONDS = 1.0  # of CPU time that a grammar and its first mask may take; a schema of 1,000 properties takes 0.1
ENDING_SECONDS = 20.0  # from the end of its socket to its own, which takes long where a machine stands still
PATIENCE = 20.0  # seconds until the process, which had its CPU time or never got it, is given up


class GrammarTooCostly(GrammarError):
    """A grammar that did not compile within its budget."""


class GrammarVetter:
    """One child process, made when it is needed first and again after it was ended. Used by one thread at a time."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float = SECONDS):
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._connection: Connection | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._end: Callable[[], object] = lambda: None

    def vet(self, grammar: str) -> None:
        """Raises GrammarError for a grammar that no output can follow, and for one that takes too much.

        Unavailable where the child gets no CPU time, or cannot begin.
        """
        try:
            if self._child is not None and self._child.poll() is not None:
                self.close()  # it ended while idle, which is nobody's fault
            connection = self._connection or self._begin()
            connection.send_bytes(grammar.encode())
            mistake = _answer(connection).decode()
        except BlockingIOError as error:  # it has taken no bytes for as long as anybody waits, and has not ended
            self.close()
            raise self._unavailable("grammars are not compiled in time", 5.0) from error
        except (EOFError, OSError) as error:
            if self._ended_by() in ENDED_FROM_OUTSIDE:
                raise self._unavailable("the process that compiles grammars was ended", 1.0) from error
            with suppress(Unavailable):
                self._begin()  # now, so that the next grammar does not wait for what this one did
            raise GrammarTooCostly(f"takes more than {self._seconds:g} s to compile, or too much memory") from error
        except Unavailable:
            self.close()
            raise
        if mistake:
            raise GrammarError(mistake)

    def close(self) -> None:
        """End the child. It is made again if need be."""
        self._connection = self._child = None
        self._end()

    def stop(self) -> None:
        """End the child for good, from any thread: whoever waits for it, or needs another, gets Unavailable."""
        self._stopped = True
        child = self._child
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()

    def _ended_by(self) -> int:
        """The child's exit status, once it has ended; minus a signal's number. Meanwhile `stop` may kill it."""
        child = self._child
        assert child is not None
        try:
            return child.wait(ENDING_SECONDS)  # before it is killed
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            self.close()

    def _unavailable(self, why: str, retry_after: float) -> Unavailable:
        if self._stopped:
            return Unavailable("the server is shutting down", code="draining", retry_after=5.0)
        return Unavailable(why, retry_after=retry_after)

    def _begin(self) -> Connection:
        """Raises Unavailable, and leaves no child then."""
        if self._stopped:
            raise self._unavailable("", 5.0)
        settings = (self._vocabulary(), self._seconds)
        try:
            connection, child = self._spawn()
            if self._stopped:  # it may not have seen this child
                child.kill()
            connection.send(settings)
            _answer(connection)
            self._connection = connection
        except (EOFError, OSError) as error:
            raise self._unavailable("the process that compiles grammars cannot begin", 5.0) from error
        finally:
            if self._connection is None:
                self.close()
        return connection

    def _spawn(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """Raises OSError where the host has no room for another process."""
        ours, theirs = Pipe()
        _bound_sends(ours)
        try:
            child = subprocess.Popen(  # noqa: S603
                [*module_command("serving.grammar.vetting_child"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what ends it may say so, with a client's grammar in its words
                env={**helper_environ(os.environ), "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._child = child
        self._end = weakref.finalize(self, _end, ours, child)
        return ours, child


def _bound_sends(connection: Connection) -> None:
    """What a child that stands still does not take raises OSError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", math.ceil(PATIENCE), 0))


def _answer(connection: Connection) -> bytes:
    if not connection.poll(PATIENCE):
        raise Unavailable("grammars are not compiled in time", retry_after=5.0)
    return connection.recv_bytes()


def _end(connection: Connection, child: subprocess.Popen[bytes]) -> None:
    connection.close()
    child.kill()
    child.wait()
