"""The sending half of a `Push` stream, the transport between processes: chunks go with their bytes or beside them.

With a writer, bytes are written into buffers that the receiver lends, and the stream says which chunk lies where.
Should the writer fail, now or later, the bytes go over the stream as well.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future, Task
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvcache.handoff.chunk import Chunk, Commit
from kvcache.handoff.messages import PUSH, PushFrame, chunk_frame, framing
from kvcache.transfer.framing import Frame
from kvcache.transfer.payload import Room
from kvcache.transfer.remote_write import BufferSender, RemoteWriter
from serving.errors import MillraceError, WorkerLost
from serving.messages import LeaseId
from serving.proto import millrace_pb2 as pb
from serving.rpc import Caller, asking
from serving.wire import error_from_pb, to_pb

log = logging.getLogger(__name__)

WINDOW = 4  # messages that may wait to be written: bounds memory, keeps the wire busy
PARTING_SECONDS = 2.0  # how long the end of a handoff waits for the other end to see it


@dataclass(frozen=True, slots=True)
class _Written:
    """A chunk whose bytes are on their way to a buffer."""

    chunk: Chunk
    buffer: int
    written: Future[None]


class GrpcHandoff:
    """One handoff over a stream (serving.links.HandoffLink). After a refusal the next call here raises it.

    Without a `fence` the other end is not asked what it brings itself: all is handed over. `closed` is called once, at
    its end.
    """

    def __init__(
        self,
        caller: Caller,
        writer: RemoteWriter | None = None,
        fence: LeaseId | None = None,
        generation: str = "",
        *,
        closed: Callable[[], None] = lambda: None,
    ):
        self.caller = caller
        self.closed: Callable[[], None] | None = closed
        self.fence = fence
        self.generation = generation
        self._buffers = BufferSender(writer, caller.address)
        self._start = 0  # the first token to hand over
        self._outgoing: asyncio.Queue[PushFrame | _Written | None] = asyncio.Queue(WINDOW)
        loop = asyncio.get_running_loop()
        self._welcomed: Future[pb.PushWelcome] = loop.create_future()
        self._ready: Future[None] = loop.create_future()
        self._lacking: Future[range] = loop.create_future()  # what the last commit was answered with
        self._outcome: Future[None] = loop.create_future()  # the commit was accepted, or why all this is over
        push = caller.channel.stream_stream(PUSH, framing.encode, pb.PushReply.FromString)
        self._call = push(metadata=caller.metadata)
        self._reading = asyncio.create_task(self._read(), name=f"push-replies-{caller.address}")
        self._writing = asyncio.create_task(self._write(), name=f"push-{caller.address}")
        self._writing.add_done_callback(self._written)

    @property
    def room(self) -> Room | None:
        return self._buffers.room

    # ---- what the handoff calls --------------------------------------------------------------------------------

    async def begin(self) -> int:
        await self._unless_over(self._ready)
        return self._start

    async def push(self, chunk: Chunk) -> None:
        if not self._ready.done():
            await self._unless_over(self._ready)
        buffer = await self._buffer_for(chunk)
        if buffer is None:
            await self._put(chunk_frame(await _by_the_stream(chunk)))
        else:
            await self._put(_Written(chunk, buffer, self._buffers.write(buffer, chunk.payload)))

    async def commit(self, commit: Commit) -> range | None:
        self._lacking = asyncio.get_running_loop().create_future()
        await self._put(Frame(pb.PushMessage(commit=to_pb(commit, pb.Commit))))
        answers: list[Future[Any]] = [self._lacking, self._outcome]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        return self._outcome.result() if self._outcome.done() else self._lacking.result()

    async def close(self) -> None:
        """End the stream in order if its writes have settled or, without a writer, it was answered; else cancel it."""
        try:
            await self._end()
        finally:
            if self.closed is not None:
                closed, self.closed = self.closed, None
                closed()

    async def _end(self) -> None:
        if await self._buffers.settle() if self._buffers.kind else self._outcome.done():
            await self._part()
        self._call.cancel()
        for task in (self._writing, self._reading):
            task.cancel()
        await asyncio.gather(self._writing, self._reading, return_exceptions=True)
        self._over(WorkerLost("the handoff was closed"))
        self._outcome.exception()  # retrieved: every caller has been told

    # ---- waiting -----------------------------------------------------------------------------------------------

    async def _put(self, message: PushFrame | _Written) -> None:
        if self._outgoing.full() or self._outcome.done():
            await self._unless_over(asyncio.ensure_future(self._outgoing.put(message)))
        else:
            self._outgoing.put_nowait(message)

    async def _buffer_for(self, chunk: Chunk) -> int | None:
        if not self._buffers.takes(chunk.payload):
            return None
        buffer = self._buffers.free()
        if buffer is None:
            buffer = await self._unless_over(asyncio.ensure_future(self._buffers.buffer(chunk.payload)))
        return buffer

    async def _unless_over(self, wanted: Future[Any]) -> Any:
        """Its result, unless the handoff ends first. Raises the reason then."""
        try:
            await asyncio.wait([wanted, self._outcome], return_when=asyncio.FIRST_COMPLETED)
            if self._outcome.done():
                self._outcome.result()
            return wanted.result()
        finally:
            if isinstance(wanted, Task):
                wanted.cancel()  # does nothing to one that is done

    def _over(self, error: MillraceError | None) -> None:
        """Set the outcome; the first one counts."""
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)

    async def _part(self) -> None:
        """Say that nothing more will come, and wait until the other end has ended the stream too."""
        while not self._outgoing.empty():
            self._outgoing.get_nowait()  # it is not needed any more
        self._outgoing.put_nowait(None)
        done, _ = await asyncio.wait([self._reading], timeout=PARTING_SECONDS)
        if not done:
            log.warning("%s does not end a handoff that is over", self.caller.address)

    # ---- the stream --------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Take replies until the other end ends the stream."""
        try:
            with asking(self.caller.address):
                async for reply in self._call:
                    self._take(reply)
            self._over(WorkerLost(f"{self.caller.address} ended the handoff early"))
        except MillraceError as error:
            self._over(error if self._welcomed.done() else await self.caller.why(error))

    def _take(self, reply: pb.PushReply) -> None:
        part = reply.WhichOneof("part")
        if part == "welcome":
            self._welcomed.set_result(reply.welcome)
        elif part == "freed_buffer":
            self._buffers.freed(reply.freed_buffer)
        elif part == "error":
            self._over(error_from_pb(reply.error))
            self._welcomed.cancel()  # a refused hello gets no welcome: nothing is written any more
        elif part == "committed":
            self._over(None)
        elif part == "lacking" and not self._lacking.done():
            self._lacking.set_result(range(reply.lacking.start, reply.lacking.end))

    async def _write(self) -> None:
        """Greet, then write the messages in order until None."""
        with asking(self.caller.address):
            await self._greet()
            while (message := await self._outgoing.get()) is not None:
                if isinstance(message, _Written):
                    message = await self._announced(message)
                await self._call.write(message)
            await self._call.write(Frame(pb.PushMessage(settled=True)))
            await self._call.done_writing()

    async def _greet(self) -> None:
        """Nothing else is written before the other end answers: so a refused sender gets Unauthorized, not a reset."""
        await self._buffers.connect()
        lease = to_pb(self.fence, pb.LeaseId) if self.fence is not None else None
        hello = pb.PushHello(transport=self._buffers.kind, lease=lease, generation=self.generation)
        await self._call.write(Frame(pb.PushMessage(hello=hello)))
        welcome = await self._welcomed
        self._start = welcome.start
        await self._buffers.lent(welcome.buffers, welcome.buffer_size)
        self._ready.set_result(None)

    async def _announced(self, sent: _Written) -> PushFrame:
        """Waits until the bytes lie in their buffer; if they do not get there, they go along."""
        if await self._buffers.arrived(sent.written):
            return chunk_frame(sent.chunk, sent.buffer)
        return chunk_frame(await _by_the_stream(sent.chunk))

    def _written(self, writing: Task[None]) -> None:
        """A stream that cannot be written to is over: the reading half gets the reason."""
        if writing.cancelled() or writing.exception() is not None:
            self._call.cancel()


async def _by_the_stream(chunk: Chunk) -> Chunk:
    """The chunk with its bytes in host memory."""
    if isinstance(chunk.payload, bytes | memoryview):
        return chunk
    return replace(chunk, payload=await asyncio.to_thread(chunk.payload.to_host))
