"""The sending half of a `Push` stream, the transport between processes: chunks go with their bytes or beside them.

With a writer, bytes are written into slots the receiver lends, and the stream tells what lies where. Should the
writer fail, now or later, the bytes go over the stream as well; the receiver cannot tell the difference.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future, Task
from dataclasses import dataclass
from typing import Any

from kvcache.handoff.chunk import Chunk
from kvcache.handoff.commit import Commit
from kvcache.handoff.frames import PUSH, Frame, to_wire
from kvcache.handoff.messages import chunk_frame, commit_frame
from kvcache.transfer.lent_memory import NoBuffers, RemoteWriter, TransferUnavailable
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
    """A chunk whose bytes are on their way to a slot."""

    chunk: Chunk
    slot: int
    written: Future[None]


class GrpcHandoff:
    """One handoff over a stream (serving.links.HandoffLink). After a refusal the next call here raises it.

    Without a `fence` the other end is not asked what it brings itself: all is handed over.
    """

    def __init__(self, caller: Caller, writer: RemoteWriter | None = None, fence: LeaseId | None = None):
        self.caller = caller
        self.fence = fence
        self._carrier = writer
        self._addresses: list[int] = []  # of the slots, in the receiver's memory
        self._slot_size = 0
        self._start = 0  # the first token to hand over
        self._free: asyncio.Queue[int] = asyncio.Queue()  # slots nothing lies in
        self._outgoing: asyncio.Queue[Frame | _Written | None] = asyncio.Queue(WINDOW)
        loop = asyncio.get_running_loop()
        self._welcomed: Future[pb.PushWelcome] = loop.create_future()
        self._ready: Future[None] = loop.create_future()
        self._lacking: Future[range] = loop.create_future()  # what the last commit was answered with
        self._outcome: Future[None] = loop.create_future()  # the commit was accepted, or why all this is over
        push = caller.channel.stream_stream(PUSH, to_wire, pb.PushReply.FromString)
        self._call = push(metadata=caller.metadata)
        self._reading = asyncio.create_task(self._read(), name=f"push-replies-{caller.address}")
        self._writing = asyncio.create_task(self._write(), name=f"push-{caller.address}")
        self._writing.add_done_callback(self._written)

    # ---- what the handoff calls --------------------------------------------------------------------------------

    async def begin(self) -> int:
        await self._unless_over(self._ready)
        return self._start

    async def push(self, chunk: Chunk) -> None:
        if not self._ready.done():
            await self._unless_over(self._ready)
        if self._carrier is None or len(chunk.payload) > self._slot_size:
            await self._put(chunk_frame(chunk))
            return
        slot = await self._free_slot()
        await self._put(_Written(chunk, slot, self._carrier.write(slot, self._addresses[slot], chunk.payload)))

    async def commit(self, commit: Commit) -> range | None:
        self._lacking = asyncio.get_running_loop().create_future()
        await self._put(commit_frame(commit))
        answers: list[Future[Any]] = [self._lacking, self._outcome]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        return self._outcome.result() if self._outcome.done() else self._lacking.result()

    async def close(self) -> None:
        """One that was answered takes leave, and so does one with slots; any other is broken off."""
        if self._outcome.done() if self._carrier is None else await self._carrier.settle():
            await self._part()
        self._call.cancel()
        for task in (self._writing, self._reading):
            task.cancel()
        await asyncio.gather(self._writing, self._reading, return_exceptions=True)
        self._over(WorkerLost("the handoff was closed"))
        self._outcome.exception()  # whoever wanted to know has been told

    # ---- waiting -----------------------------------------------------------------------------------------------

    async def _put(self, message: Frame | _Written) -> None:
        if self._outgoing.full() or self._outcome.done():
            await self._unless_over(asyncio.ensure_future(self._outgoing.put(message)))
        else:
            self._outgoing.put_nowait(message)

    async def _free_slot(self) -> int:
        if self._free.empty():
            slot: int = await self._unless_over(asyncio.ensure_future(self._free.get()))
            return slot
        return self._free.get_nowait()

    async def _unless_over(self, wanted: Future[Any]) -> Any:
        """What it brings, unless the handoff ends first: then raise why."""
        try:
            await asyncio.wait([wanted, self._outcome], return_when=asyncio.FIRST_COMPLETED)
            if self._outcome.done():
                self._outcome.result()
            return wanted.result()
        finally:
            if isinstance(wanted, Task):
                wanted.cancel()  # does nothing to one that is done

    def _over(self, error: MillraceError | None) -> None:
        """The first to say how it ended is right."""
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)

    async def _part(self) -> None:
        """Say that nothing more will come, and wait until the other end has put everything away."""
        while not self._outgoing.empty():
            self._outgoing.get_nowait()  # of no use to anybody any more
        self._outgoing.put_nowait(None)
        done, _ = await asyncio.wait([self._reading], timeout=PARTING_SECONDS)
        if not done:
            log.warning("%s does not end a handoff that is over", self.caller.address)

    # ---- the stream --------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Take what the other end says until it ends the stream."""
        try:
            with asking(self.caller.address):
                async for reply in self._call:
                    self._hear(reply)
            self._over(WorkerLost(f"{self.caller.address} ended the handoff early"))
        except MillraceError as error:
            self._over(error)

    def _hear(self, reply: pb.PushReply) -> None:
        part = reply.WhichOneof("part")
        if part == "welcome":
            self._welcomed.set_result(reply.welcome)
        elif part == "freed":
            self._free.put_nowait(reply.freed)
        elif part == "error":
            self._over(error_from_pb(reply.error))
        elif part == "committed":
            self._over(None)
        elif part == "lacking" and not self._lacking.done():
            self._lacking.set_result(range(reply.lacking.start, reply.lacking.end))

    async def _write(self) -> None:
        """Greet, then write what is put, in order, until None."""
        with asking(self.caller.address):
            await self._greet()
            while (message := await self._outgoing.get()) is not None:
                if isinstance(message, _Written):
                    message = await self._announced(message)
                await self._call.write(message)
            await self._call.write(Frame(pb.PushMessage(settled=True)))
            await self._call.done_writing()

    async def _greet(self) -> None:
        """Nothing else is written before the other end answers: a stranger hears that he is one, not a broken call."""
        await self._connect()
        kind = self._carrier.kind if self._carrier is not None else ""
        lease = to_pb(self.fence, pb.LeaseId) if self.fence is not None else None
        await self._call.write(Frame(pb.PushMessage(hello=pb.PushHello(transport=kind, lease=lease))))
        welcome = await self._welcomed
        self._start = welcome.start
        self._addresses, self._slot_size = list(welcome.slots), welcome.slot_size
        for slot in range(len(self._addresses)):
            self._free.put_nowait(slot)
        if not self._addresses:
            await self._do_without_carrier()
        self._ready.set_result(None)

    async def _connect(self) -> None:
        if self._carrier is None:
            return
        try:
            await self._carrier.connect()
        except TransferUnavailable as error:
            level = logging.DEBUG if isinstance(error, NoBuffers) else logging.WARNING
            log.log(level, "KV goes to %s over gRPC: %s", self.caller.address, error)
            await self._do_without_carrier()

    async def _do_without_carrier(self) -> None:
        writer, self._carrier = self._carrier, None
        if writer is not None:
            await writer.settle()

    async def _announced(self, sent: _Written) -> Frame:
        """Waits until the bytes lie in their slot; should they not get there, they go along."""
        try:
            await sent.written
        except TransferUnavailable as error:
            if self._slot_size:
                log.warning("KV goes to %s over gRPC from now on: %s", self.caller.address, error)
            self._slot_size = 0
            return chunk_frame(sent.chunk)
        return chunk_frame(sent.chunk, sent.slot)

    def _written(self, writing: Task[None]) -> None:
        """A stream that cannot be written to is over: the reading half will hear why."""
        if writing.cancelled() or writing.exception() is not None:
            self._call.cancel()
