"""The only use of NIXL: an agent with registered memory, in a thread of its own, that writes from it to other agents'.

It moves bytes between addresses. What they mean and which memory is lent to whom is decided elsewhere.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvcache.transfer.lent_memory import TransferUnavailable
from kvcache.transfer.payload import Payload

log = logging.getLogger(__name__)

KIND = "nixl"
DRAM, VRAM = "DRAM", "VRAM"
FIRST = 0  # the number of the device, at either end: each computes on the first that it sees
POLL_SECONDS = 0.0002  # between looks at writes in progress
TURN_SECONDS = 0.001  # between turns given to writes that arrive; shared memory and RDMA need none, and do not wait
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- nothing is written there, only its room is looked at
LEAST_SHARED_BYTES = 32 << 20  # UCX takes four MiB there; it has been seen to crash the process with 16 left
MOST_PEERS = 64  # remote agents remembered; beyond, the one met longest ago is forgotten

T = TypeVar("T")


def installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


def require_shared_memory() -> None:
    """Raises TransferUnavailable where UCX would have too little of it to be safe."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else LEAST_SHARED_BYTES
    if free < LEAST_SHARED_BYTES:
        wanted = LEAST_SHARED_BYTES >> 20
        raise TransferUnavailable(
            f"NIXL wants {wanted} MiB free in {SHARED_MEMORY}, which has {free >> 20}; give the container more "
            "(--shm-size), or choose --kv-transport shm or grpc"
        )


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """Memory of this process that an agent registers: of a kind as NIXL names it, DRAM or VRAM."""

    address: int
    size: int
    kind: str


@dataclass(slots=True)
class _Write:
    """A payload on its way from this buffer's `offset`, or from where a device holds it, to an address of a peer's."""

    peer: str
    offset: int
    address: int
    payload: Payload
    there: str  # the kind of the peer's memory
    done: Future[None]
    handle: Any = None


class Agent:
    """One agent of NIXL over UCX with one buffer, `memory`, and maybe memory of a `device`. Raises TransferUnavailable
    if NIXL will not start, or moves no bytes of the device.

    NIXL makes progress only when it is called, so the thread calls it while writes are under way here or, as
    `expecting` says, may arrive from others. Otherwise it waits.
    """

    def __init__(self, size: int, device: AgentMemory | None = None):
        require_shared_memory()
        self.device = device
        self.name = f"millrace-{os.getpid()}-{uuid.uuid4().hex}"  # which it is written to by itself
        self.memory = np.zeros(size, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)
        self._news = threading.Condition()
        self._jobs: list[tuple[Callable[[], None], Future[Any]]] = []  # and what they are waited for by
        self._flying: list[_Write] = []
        self._expecting = 0
        self._stopping = False
        self.over = False  # its thread has ended, in whatever way: nothing is done any more
        self._peers: dict[bytes, str] = {}  # by their metadata, the one met last at the end
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()
        try:
            self.metadata = self.call(self._start).result()
        except TransferUnavailable:
            self.close()
            raise

    # ---- from any thread ---------------------------------------------------------------------------------------

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Have the agent's thread run this. It fails with TransferUnavailable where NIXL does."""
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # it cannot be cancelled any more

        def run() -> None:
            try:
                done.set_result(job())
            except self._errors as error:
                done.set_exception(TransferUnavailable(f"NIXL: {type(error).__name__}: {error}"))

        self._do(run, done)
        return done

    def meet(self, metadata: bytes) -> Future[str]:
        """Make a peer's memory reachable; the name to write to it by."""
        return self.call(lambda: self._meet(metadata))

    def write(self, peer: str, offset: int, address: int, payload: Payload, there: str = DRAM) -> Future[None]:
        """Write the payload to the peer's address, in memory of the kind `there`; done when it all lies there.

        From where a device holds it, or by way of `memory[offset:]`.
        """
        write = _Write(peer, offset, address, payload, there, Future())
        write.done.set_running_or_notify_cancel()
        self._do(lambda: self._post(write), write.done)
        return write.done

    def _do(self, job: Callable[[], None], done: Future[Any]) -> None:
        with self._news:
            if not self.over:
                self._jobs.append((job, done))
                self._news.notify()
                return
        done.set_exception(TransferUnavailable("NIXL has ended"))

    def expecting(self, more: int) -> None:
        """So many more transfers may write here from now on; fewer when negative."""
        with self._news:
            self._expecting += more
            self._news.notify()

    def close(self) -> None:
        """End the thread; what is under way fails."""
        with self._news:
            self._stopping = True
            self._news.notify()
        self._thread.join()

    # ---- in the agent's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        """Serve to the end. What breaks the thread is told by it, and to whoever waits."""
        jobs: list[tuple[Callable[[], None], Future[Any]]] = []
        try:
            self._serve(jobs)
        finally:
            with self._news:
                self.over = True
                left = [done for _, done in (*jobs, *self._jobs)] + [write.done for write in self._flying]
            for done in left:
                if not done.done():
                    done.set_exception(TransferUnavailable("NIXL has ended"))

    def _serve(self, jobs: list[tuple[Callable[[], None], Future[Any]]]) -> None:
        """`jobs` are those that have begun."""
        self._errors: tuple[type[Exception], ...] = (ImportError, RuntimeError, OSError)
        while True:
            with self._news:
                if not self._jobs and not self._stopping:
                    self._news.wait(self._pause())
                if self._stopping:
                    break
                jobs[:], self._jobs = self._jobs, []
            for job, _ in jobs:
                job()
            if self._flying:
                self._flying = [write for write in self._flying if not self._over(write, self._look)]
            elif self._expecting > 0:
                self._agent.get_new_notifs()  # none are sent: the call gives arriving writes their turn
        self._stop()

    def _pause(self) -> float | None:
        """Seconds until NIXL is to be called again where nothing else is to be done; None: not before that."""
        if self._flying:
            return POLL_SECONDS
        return TURN_SECONDS if self._expecting > 0 else None

    def _start(self) -> bytes:
        """Start NIXL and register the buffer; the metadata by which others can write to it."""
        os.environ.setdefault("UCX_LOG_FILE", "stderr")  # what is on standard output is ours
        strict = logging.raiseExceptions
        from nixl import _api as nixl
        from nixl import _bindings as bindings

        logging.raiseExceptions = strict  # importing NIXL clears it, for the whole process
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.propagate = True
        theirs.setLevel(logging.WARNING)
        kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type)]
        self._errors += tuple(kind for kind in kinds if issubclass(kind, Exception))
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl.nixl_agent(self.name, config)
        self._registered: list[Any] = []
        if self.memory.nbytes:
            self._register(AgentMemory(self.base, self.memory.nbytes, DRAM))
        if self.device is not None:
            moved = self._agent.get_backend_mem_types("UCX")
            if f"{self.device.kind}_SEG" not in moved:
                raise RuntimeError(f"its UCX moves {', '.join(moved) or 'nothing'}, and no {self.device.kind}")
            self._register(self.device)
        return bytes(self._agent.get_agent_metadata())

    def _register(self, memory: AgentMemory) -> None:
        described = [(memory.address, memory.size, FIRST, "")]
        self._registered.append(self._agent.register_memory(described, memory.kind))

    def _stop(self) -> None:
        if not hasattr(self, "_agent"):
            return
        for name in self._peers.values():
            self._agent.remove_remote_agent(name)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        del self._agent

    def _meet(self, metadata: bytes) -> str:
        name = self._peers.pop(metadata, None)
        if name is None:
            name = self._agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
        self._peers[metadata] = name
        if len(self._peers) > MOST_PEERS:
            self._forget(next(iter(self._peers.values())))
        return name

    def _forget(self, peer: str) -> None:
        self._peers = {metadata: name for metadata, name in self._peers.items() if name != peer}
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors as error:
            log.debug("NIXL does not let go of %s: %s", peer, error)

    def _post(self, write: _Write) -> None:
        if not self._over(write, self._begin):
            self._flying.append(write)

    def _begin(self, write: _Write) -> str:
        size = len(write.payload)
        if isinstance(write.payload, bytes | memoryview):
            np.copyto(self.memory[write.offset : write.offset + size], np.frombuffer(write.payload, dtype=np.uint8))
            here = self._agent.get_xfer_descs([(self.base + write.offset, size, FIRST)], DRAM)
        else:
            assert self.device is not None, "an agent without a device is given none of its payloads"
            here = self._agent.get_xfer_descs([(write.payload.address, size, FIRST)], self.device.kind)
        there = self._agent.get_xfer_descs([(write.address, size, FIRST)], write.there)
        write.handle = self._agent.initialize_xfer("WRITE", here, there, write.peer)
        return str(self._agent.transfer(write.handle))

    def _look(self, write: _Write) -> str:
        return str(self._agent.check_xfer_state(write.handle))

    def _over(self, write: _Write, state_of: Callable[[_Write], str]) -> bool:
        """True if the write is over; its future then has the result. After a failure its peer is met anew."""
        try:
            if (state := state_of(write)) == "PROC":
                return False
            self._agent.release_xfer_handle(write.handle)
            if state != "DONE":
                raise RuntimeError(f"a write ended as {state}")
        except self._errors as error:
            self._forget(write.peer)
            write.done.set_exception(TransferUnavailable(f"NIXL: {type(error).__name__}: {error}"))
        else:
            write.done.set_result(None)
        return True
