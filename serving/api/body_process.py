"""A process that reads one body after the other: `python -m serving.api.body_process`, and our end of it.

Frames are pickles behind their length, over its standard input and output: first the settings of its readers, answered
by an empty one, then jobs, each answered by what it gave or by its error. It ends with its input. The kernel ends it
when one body takes too much CPU time, which no thread could be.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import pickle
import resource
import signal
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any, BinaryIO

from serving.api.readers import Readers, ReaderSettings
from serving.child_process import ENDED_FROM_OUTSIDE, helper_environ, module_command
from serving.errors import InternalError, InvalidRequest, MillraceError, Unavailable
from serving.logs import handed_down, setup_helper
from serving.malloc import give_back_memory

log = logging.getLogger(__name__)

BUDGET_SECONDS = 10  # of CPU time for one body
NICENESS = 5  # about a quarter of a core where all are busy
TIDY_BYTES = 1 << 20  # after a longer body, memory is given back
STOP_SECONDS = 2.0
ENDING_SECONDS = 20.0  # from the end of its pipes to its own, which takes long where a machine stands still
START_SECONDS = 60.0
PATIENCE = 6  # seconds by the clock for each of the budget, until a process that stands still is given up
RETRY_AFTER = 5.0  # seconds
# What writing to a child that has ended raises, and reading from it: uvloop has a RuntimeError where asyncio has an
# OSError, and half an answer does not unpickle.
BROKEN = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)
_LENGTH = struct.Struct("<Q")

Outcome = tuple[Any, MillraceError | None]  # what a body gave, or its error


class BodyProcess:
    """Our end of it. One job at a time; a process that has ended is started again for the next one.

    `settings` are pickled ReaderSettings; `budget_seconds` is the CPU time of a job, and `patience` how many seconds a
    job may take by the clock, the whole budget on a busy host by default.
    """

    def __init__(self, settings: bytes, budget_seconds: int = BUDGET_SECONDS, patience: float | None = None):
        self._settings = settings
        self._budget = budget_seconds
        self._patience = PATIENCE * budget_seconds if patience is None else patience
        self._process: Process | None = None  # one that is ready for a job

    async def start(self) -> None:
        """Have it ready for a job, which takes a second or two. Raises Unavailable where it cannot begin."""
        if self._process is None:
            self._process = await self._begin()

    async def ask(self, frame: bytes) -> Outcome:
        """Have it do the job of this frame. Whatever goes wrong there is the job's error, and ends the process.

        One that somebody else ends is replaced, and asked once more: to read a body changes nothing.
        """
        outcome = await self._ask(frame)
        if outcome is None:
            outcome = await self._ask(frame)
        return outcome or (None, Unavailable("the process that reads bodies was ended", retry_after=RETRY_AFTER))

    async def _ask(self, frame: bytes) -> Outcome | None:
        """None where it was ended from outside."""
        self._leave_if_ended()
        try:
            await self.start()
        except Unavailable as error:
            return None, error
        process, self._process = self._process, None  # it is ours again when the job is done
        assert process is not None
        try:
            async with asyncio.timeout(self._patience):
                await _send(process, frame)
                outcome: Outcome = pickle.loads(await _read(process))  # noqa: S301 - our own child
        except TimeoutError:
            log.error("the process that reads bodies did not read one in %g s and is ended", self._patience)
            return None, Unavailable("the body was not read in time", code="body_unread", retry_after=RETRY_AFTER)
        except BROKEN:
            _end_input(process)
            code = await _ended(process, ENDING_SECONDS)
            return None if code in ENDED_FROM_OUTSIDE else (None, self._error(code))
        else:
            self._process = process
            return outcome
        finally:
            if self._process is not process:
                await _kill(process)

    async def close(self) -> None:
        """It leaves when its input ends, or is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        _end_input(process)
        await _ended(process, STOP_SECONDS)
        await _kill(process)

    async def _begin(self) -> Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command("serving.api.body_process"),
                str(self._budget),
                stdin=PIPE,
                stdout=PIPE,
                env=helper_environ(os.environ) | handed_down("bodies"),
                start_new_session=True,
            )
        except OSError as error:
            raise _cannot_begin(str(error)) from error
        begun = False
        try:
            async with asyncio.timeout(START_SECONDS):
                await _send(process, self._settings)
                await _read(process)
            begun = True
        except TimeoutError as error:
            raise _cannot_begin(f"it was not ready in {START_SECONDS:g} s") from error
        except BROKEN as error:
            _end_input(process)
            raise _cannot_begin(f"it ended with {await _ended(process, ENDING_SECONDS)}") from error
        finally:
            if not begun:
                await _kill(process)
        return process

    def _leave_if_ended(self) -> None:
        """One that ended while nobody asked anything of it is nobody's error."""
        process = self._process
        if process is None:
            return
        assert process.stdout is not None
        if process.returncode is not None or process.stdout.at_eof():
            self._process = None
            log.warning("the process that reads bodies ended with %s while idle", process.returncode)

    def _error(self, code: int | None) -> MillraceError:
        """Of a job over which the process ended."""
        if code == -signal.SIGXCPU:
            return InvalidRequest(
                f"the body takes more than {self._budget} s to be read: send a simpler one", code="body_too_costly"
            )
        log.error("the process that reads bodies ended with %s over one; the next one starts another", code)
        return InternalError("the server failed on this request")


async def _send(process: Process, frame: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(_LENGTH.pack(len(frame)))
    process.stdin.write(frame)
    await process.stdin.drain()


async def _read(process: Process) -> bytes:
    assert process.stdout is not None
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(length)


def _end_input(process: Process) -> None:
    """One that lives leaves then."""
    assert process.stdin is not None
    process.stdin.close()


async def _ended(process: Process, seconds: float) -> int | None:
    """The exit status of one that is about to end; None if it stays for so long."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(process.wait(), seconds)
    return None


async def _kill(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _cannot_begin(why: str) -> Unavailable:
    log.error("the process that reads bodies cannot begin: %s", why)
    return Unavailable(f"the process that reads bodies cannot begin: {why}", retry_after=RETRY_AFTER)


def serve(source: BinaryIO, sink: BinaryIO, budget_seconds: int) -> None:
    """Do jobs until there are no more."""
    settings: ReaderSettings = pickle.loads(_receive(source))  # noqa: S301 - from our parent
    readers = Readers(settings)
    gc.collect()
    gc.freeze()
    gc.disable()  # one job makes millions of objects and no circles: they are looked at between jobs
    _answer(sink, b"")  # ready
    while frame := _receive(source):
        _limit_cpu(budget_seconds)
        reply = pickle.dumps(_outcome(readers, frame))
        _limit_cpu(None)  # once it is answered, no body is there to be blamed
        _answer(sink, reply)
        if len(frame) > TIDY_BYTES:
            del reply
            gc.collect()
            give_back_memory()


def _outcome(readers: Readers, frame: bytes) -> Outcome:
    (reader, method), body, arguments = pickle.loads(frame)  # noqa: S301 - from our parent
    try:
        return getattr(getattr(readers, reader), method)(body, *arguments), None
    except MillraceError as error:
        return None, error.with_traceback(None)


def _answer(sink: BinaryIO, reply: bytes) -> None:
    sink.write(_LENGTH.pack(len(reply)) + reply)
    sink.flush()


def _limit_cpu(seconds: int | None) -> None:
    """The kernel ends this process once it has used so much more; None: whenever its host says."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if seconds is None:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        return
    soft = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _receive(source: BinaryIO) -> bytes:
    """The next frame; empty at the end."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    return source.read(_LENGTH.unpack(head)[0])


def main() -> None:
    setup_helper(os.environ)
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sink, int(sys.argv[1]))


if __name__ == "__main__":
    main()
