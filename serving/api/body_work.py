"""Where a body is read: on the event loop, in a thread, or in a process of its own that may be ended.

Reading a long body holds the interpreter's lock for hundreds of milliseconds in a row, in a thread as well, and takes
the cores from the engine. So bodies of more than a few KiB are read by other processes of a lower priority, one at a
time and clients in turn: those of some length in one lane, the largest in another, so that nobody waits long who sends
little. Whoever runs the app starts the lanes and closes them; until then, threads do their work.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.types import Scope

from serving.addresses import network_of
from serving.api.body_process import BUDGET_SECONDS, BodyProcess
from serving.api.fair_queue import FairQueue
from serving.api.in_flight import RETRY_AFTER
from serving.api.objectives import with_read_headers
from serving.api.plan import RequestHead
from serving.api.readers import Readers, ReaderSettings
from serving.errors import InternalError, MillraceError, Unavailable

log = logging.getLogger(__name__)

SMALL_BODY = 2 * 1024  # bytes: longer ones are for the lanes, where there are any,
LONG_BODY = 64 * 1024  # and still longer ones for the second
LARGE_BODY = 8 * 1024  # without lanes, longer ones are for a thread
# Those with such a word may bring a grammar, which is written out: they are for a thread too.
MAKES_GRAMMAR = (b"_format", b'"format', b"guided_", b"structured_outputs", b'"tools', b"\\u")
MOST_WAITING = 256
MOST_WAITING_BYTES = 256 << 20

T = TypeVar("T")


def client_of(scope: Scope) -> str:
    """Who takes turns: the API key, or where none is required the address, as connections are counted."""
    key: str = scope.get("state", {}).get("key") or ""
    host, _ = scope.get("client") or ("", 0)
    return key or network_of(host)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    frame: bytes
    answer: asyncio.Future[Any]


class _Lane:
    """Bodies that wait for one process, and the task that has them read: another one where that breaks."""

    def __init__(self, settings: bytes, budget_seconds: int):
        self._process = BodyProcess(settings, budget_seconds)
        self._queue: FairQueue[_Job] = FairQueue(MOST_WAITING, MOST_WAITING_BYTES)
        self._arrived = asyncio.Event()
        self._closed = False
        self._begin()

    async def warm(self) -> None:
        """Have the process ready before the first body comes; else it is started by that.

        Raises Unavailable where it cannot begin.
        """
        await self._process.start()

    async def close(self) -> None:
        """End the process. Whoever waits gets a 503."""
        self._closed = True
        self._reading.cancel()
        while len(self._queue):
            _fail(self._queue.pop(), _draining())
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._process.close()

    def put(self, client: str, size: int, frame: bytes) -> asyncio.Future[Any]:
        """What the job of this frame will give; it leaves the queue with its client. Raises Overloaded, Unavailable."""
        if self._closed:
            raise _draining()
        job = _Job(frame, asyncio.get_running_loop().create_future())
        self._queue.put(client, size, job)
        job.answer.add_done_callback(lambda _: self._queue.discard(client, job))
        self._arrived.set()
        return job.answer

    def _begin(self) -> None:
        self._reading = asyncio.create_task(self._read_in_turn(), name="bodies")
        self._reading.add_done_callback(self._end)

    def _end(self, reading: asyncio.Task[None]) -> None:
        """Only closing ends it on purpose."""
        if not reading.cancelled() and not self._closed:
            log.error("a task that has bodies read broke, and begins anew", exc_info=reading.exception())
            self._begin()

    async def _read_in_turn(self) -> None:
        while True:
            await self._arrived.wait()
            if not len(self._queue):
                self._arrived.clear()
                continue
            job = self._queue.pop()
            if job.answer.done():  # its client has left, just now
                continue
            try:
                answer, error = await self._process.ask(job.frame)
                if error is not None:
                    _fail(job, error)
                elif not job.answer.done():
                    job.answer.set_result(answer)
            finally:
                _fail(job, _draining() if self._closed else InternalError("the server failed on this request"))


def _fail(job: _Job, error: MillraceError) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)


def _draining() -> Unavailable:
    return Unavailable("the server is shutting down", code="draining", retry_after=RETRY_AFTER)


class BodyWork:
    """For one app; used from its event loop only. `readers` are those of this process.

    A body that takes a lane more than `budget_seconds` of CPU time is refused.
    """

    def __init__(self, settings: ReaderSettings, budget_seconds: int = BUDGET_SECONDS):
        self._budget = budget_seconds
        self.readers = Readers(settings)
        config = replace(settings.config, api_key=None)  # no secret leaves this process
        self._settings = replace(settings, classes=dict(settings.classes), config=config)
        self._lanes: list[_Lane] = []  # for bodies up to LONG_BODY, and for longer ones

    async def start(self) -> None:
        """Start the lanes: the first one's process now, which takes a second or two; the other's when it is needed.

        Raises Unavailable where it cannot begin.
        """
        settings = pickle.dumps(self._settings)
        self._lanes = [_Lane(settings, self._budget), _Lane(settings, self._budget)]
        await self._lanes[0].warm()

    async def close(self) -> None:
        """End them. Whoever waits for a body, or comes with a long one from now on, gets a 503."""
        await asyncio.gather(*(lane.close() for lane in self._lanes))

    async def run(self, work: Callable[..., T], body: bytes, *arguments: object, client: str = "") -> T:
        """`work(body, …)`, wherever it harms nobody else. `client` tells those apart who take turns.

        Raises what it raises, Overloaded while too many bodies wait, InvalidRequest for one that takes too long,
        InternalError where reading it ended the process, and Unavailable where that stood still or ends for good.
        """
        if len(body) > SMALL_BODY and self._lanes and (name := self.readers.name_of(work)):
            lane = self._lanes[len(body) > LONG_BODY]
            frame = pickle.dumps((name, body, [_bare(argument) for argument in arguments]))
            answer: T = await lane.put(client, len(body), frame)
            return answer
        if len(body) > LARGE_BODY or any(word in body for word in MAKES_GRAMMAR):
            return await asyncio.to_thread(work, body, *arguments)
        return work(body, *arguments)


def _bare(argument: object) -> object:
    """As it may leave this process: of a request's headers those that are read, and no key among them."""
    return with_read_headers(argument) if isinstance(argument, RequestHead) else argument
