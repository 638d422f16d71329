"""The process of a leader's host that stands for another host: a rank without rows that has the experts of that one.

It takes the rows that the ranks here send to those experts out of memory that they share, sends each once over the
network, and puts what comes back where its senders read it. It has no model. Where the other host is lost it leaves,
and the ranks here find out as of any rank.

Shapes: N results, H hidden width, S slots.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from serving.channel import Channel
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import (
    ExchangeShape,
    ExchangeTraffic,
    ExchangeUnavailable,
    RankLost,
    Rows,
)
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.logs import set_part
from serving.rank_group.host_door import ComingHost, HostRefused, greeted
from serving.rank_group.host_line import HostGone, HostLine, ToldOnce, peer_of
from serving.rank_group.host_messages import AwaitHost, HostCame, TakeHost
from serving.rank_group.host_plan import HostPlace
from serving.rank_group.loading import ANSWER_SECONDS
from serving.rank_group.member import NEVER_ENDS
from serving.rank_group.messages import (
    BeginEpoch,
    EndEpoch,
    EpochBegun,
    EpochEnded,
    ExpertsHeld,
    HoldExperts,
    KVMapped,
    LoadShare,
    MapKV,
    Outcome,
    RankTotals,
    RunStep,
    ShareLoaded,
    StepDone,
    StepDropped,
    UsePlanes,
)
from serving.temporary import also_ours

log = logging.getLogger(__name__)

MOST_STRANGERS = 16  # that may be about to show who they are
ACCEPT_SECONDS = 0.2
LEAST_SECONDS = 0.01  # for what has come already
LOAD_SECONDS = 600.0  # as a leader gives a rank
LOADING_SECONDS = 60.0  # for experts that nobody holds any more
NO_ROWS = np.zeros(0, dtype=np.uint8)


def serve_bridge(channel: Channel, order: AwaitHost) -> None:
    """Let a host in, and stand for it until it is lost or the leader closes the channel. Raises ChannelClosed."""
    with socket.socket(fileno=order.listening) as listening:
        place, line = _admitted(channel, order, listening)
    set_part(str(place).replace(" ", "-"))
    bridge = HostBridge(line)
    try:
        while line.ready((channel.fileno(),)) is False:
            answer = bridge.does(channel.receive(None))
            if answer is not None:
                channel.send(answer, ANSWER_SECONDS)
            if isinstance(answer, EpochBegun) and answer.error is not None and not answer.lost:
                log.error("the host of %s leaves: %s", place, answer.error)
                return
        line.answer("nothing", ACCEPT_SECONDS)  # what it says unasked is why it is lost
    except HostGone as gone:
        log.error("the host of %s is lost: %s", place, gone)
    finally:
        bridge.leave()
        channel.close()
        line.close()


class Strangers:
    """Connections of those who have not shown yet who they are: MOST_STRANGERS of them, the oldest gives way."""

    def __init__(self) -> None:
        self._there: list[socket.socket] = []
        self._left = False
        self._lock = threading.Lock()

    @contextmanager
    def among(self, connection: socket.socket) -> Iterator[None]:
        """One more; whoever speaks to it is told that the connection has ended where it has to go. Raises OSError."""
        with connection.dup() as own:  # TLS takes the other one over
            with self._lock:
                self._there.append(own)
                if self._left or len(self._there) > MOST_STRANGERS:
                    self._shut(self._there.pop(0))
            try:
                yield
            finally:
                with self._lock:
                    self._there = [other for other in self._there if other is not own]

    def leave(self) -> None:
        """Nobody is spoken to any more: those who are there may knock again."""
        with self._lock:
            self._left = True
            for own in self._there:
                self._shut(own)

    def _shut(self, own: socket.socket) -> None:
        with suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)


def _refuse_all(coming: queue.SimpleQueue[ComingHost]) -> None:
    """Who has shown who they are while another host was taken in."""
    with suppress(queue.Empty):
        while True:
            host = coming.get_nowait()
            with suppress(HostGone):
                host.refuse("another host has come first", again=True)


def _admitted(channel: Channel, order: AwaitHost, listening: socket.socket) -> tuple[HostPlace, HostLine]:
    """The first host that the leader takes, and its place.

    Strangers are spoken to side by side, so that none keeps others waiting.
    """
    coming: queue.SimpleQueue[ComingHost] = queue.SimpleQueue()
    done, strangers, told = threading.Event(), Strangers(), ToldOnce()

    def greet(connection: socket.socket) -> None:
        peer = peer_of(connection)
        try:
            with strangers.among(connection):
                host = greeted(connection, order.security, order.identity)
            coming.put(host)  # no stranger any more
            if done.is_set():
                _refuse_all(coming)
        except (HostRefused, HostGone, OSError, ValueError) as error:  # a certificate's key that has a password now
            address = peer.rpartition(":")[0] or peer  # each connection has a port of its own
            if told.is_new((address, str(error).replace(peer, address))):
                log.warning("the host at %s is not taken in: %s", peer, error)

    def accept() -> None:
        listening.settimeout(ACCEPT_SECONDS)
        while not done.is_set():
            try:
                connection, _ = listening.accept()
                threading.Thread(target=greet, args=(connection,), name="stranger", daemon=True).start()
            except TimeoutError:
                continue
            except (OSError, RuntimeError) as error:  # no descriptor, no thread left
                if told.is_new(str(error)):
                    log.warning("a host is not spoken to: %s", error)
                done.wait(ACCEPT_SECONDS)

    accepting = threading.Thread(target=accept, name="door", daemon=True)
    accepting.start()
    while True:
        host = coming.get()
        try:
            channel.send(HostCame(host.place, host.line.where), ANSWER_SECONDS)
            word: TakeHost = channel.receive(None)
            if word.refused is None:
                done.set()
                accepting.join()
                strangers.leave()
                _refuse_all(coming)
                return host.place, host.take()
            host.refuse(word.refused, again=True)
        except HostGone as gone:
            log.warning("the host of %s has left as it was taken in: %s", host.place, gone)
            if done.is_set():
                raise


class HostBridge:
    """A rank of the leader's exchange, whose experts are behind `line`. What it raises is HostGone."""

    def __init__(self, line: HostLine) -> None:
        self._line = line
        self._kv: MapKV | None = None
        self._layers = 0
        self._experts = 0  # of each layer
        self._exchange: SharedMemoryExchange | None = None
        self._before = ExchangeTraffic()
        self._room = np.zeros(0, dtype=np.uint8)  # of rows that leave

    def does(self, word: Any) -> object:
        """The answer to one of the leader's words; None where it wants none."""
        match word:
            case RunStep():
                return self.run(word)
            case UsePlanes():
                return None
            case EndEpoch():
                return self.end()
            case HoldExperts():
                return self.hold(word)
            case BeginEpoch():
                return self.begin(word)
            case LoadShare():
                return self.load(word)
            case MapKV():
                return self.map(word)
        raise AssertionError(f"the leader says {word!r}")

    @property
    def deadline(self) -> float:
        assert self._kv is not None, "a host is told of deadlines before steps"
        return self._kv.deadline

    def load(self, order: LoadShare) -> ShareLoaded:
        self._line.send("load", {"ranks": order.ranks, "redundant": order.redundant}, ANSWER_SECONDS)
        word = self._line.answer("loaded", LOAD_SECONDS)
        error = word.facts.get("error")
        return ShareLoaded(word.number("bytes", 1 << 62)) if error is None else ShareLoaded(error=str(error))

    def map(self, order: MapKV) -> KVMapped:
        self._kv, shape = order, order.shape
        facts = {
            "rows": order.most_rows,
            "top_k": shape.top_k,
            "hidden": shape.hidden,
            "wire": name_of(shape.wire),
            "back": name_of(shape.back),
            "deadline": order.deadline,
            "compiled": None if order.compiled is None else asdict(order.compiled),
        }
        self._line.send("map", facts, ANSWER_SECONDS)
        error = self._line.answer("mapped", LOAD_SECONDS).facts.get("error")
        return KVMapped(None if error is None else str(error))

    def hold(self, order: HoldExperts) -> ExpertsHeld:
        held = [list(one.slots[order.rank]) for one in order.placements]
        self._layers, self._experts = len(held), order.placements[0].experts
        self._line.send("hold", {"experts": self._experts, "held": held}, ANSWER_SECONDS)
        word = self._line.answer("held", self.deadline + LOADING_SECONDS)
        if (lost := word.facts.get("lost")) is not None:
            return ExpertsHeld(lost={int(layer): of for layer, of in lost.items()}, reason=word.text("reason"))
        return ExpertsHeld(word.number("loaded", 1 << 31))

    def begin(self, order: BeginEpoch) -> EpochBegun:
        assert self._kv is not None
        also_ours(order.store.parent)
        self._line.send("begin", {"number": order.number, "meeting": order.meeting}, ANSWER_SECONDS)
        answer = self._joined(order, self._kv.shape)
        error = self._line.answer("begun", order.meeting + LOADING_SECONDS).facts.get("error")
        return answer if error is None else EpochBegun(str(error))

    def _joined(self, order: BeginEpoch, shape: ExchangeShape) -> EpochBegun:
        """Of the exchange with the ranks of this host."""
        others = {rank: process for rank, process in enumerate(order.processes) if rank != order.rank}
        shape = replace(shape, ranks=len(order.processes), slots=len(order.placements[0].slots[0]))
        try:
            self._exchange = SharedMemoryExchange.join(
                shape,
                order.rank,
                PrefixStore("exchange", FileStore(str(order.store), NEVER_ENDS)),
                deadline=self.deadline,
                meeting=order.meeting,
                processes=others,
            )
        except RankLost as lost:
            return EpochBegun(str(lost), lost=True)
        except (ExchangeUnavailable, StoreUnavailable, RuntimeError, ValueError, OSError) as error:
            return EpochBegun(str(error))
        return EpochBegun()

    def end(self) -> EpochEnded:
        """The experts are those that the host's ranks have: they may have met where the ranks here have not."""
        self.leave()
        self._line.send("end", {}, self.deadline)
        held = self._line.answer("ended", self.deadline).lists("held", self._experts - 1)
        if len(held) != self._layers:
            raise HostGone(f"it holds experts of {len(held)} layers, of {self._layers}")
        return EpochEnded(held)

    def leave(self) -> None:
        """Take part in no exchange any more: the ranks here find that out at once."""
        if self._exchange is not None:
            self._exchange.close()
            self._before += self._exchange.traffic
            self._exchange = None

    @property
    def totals(self) -> RankTotals:
        now = self._before if self._exchange is None else self._before + self._exchange.traffic
        return RankTotals(now, bytes_to_hosts=self._line.sent, bytes_from_hosts=self._line.received)

    # ---- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, step: RunStep) -> Outcome:
        exchange = self._exchange
        assert exchange is not None and step.part is None, "a step of an epoch, without rows of this rank"
        self._line.send("step", {"number": step.number}, self.deadline)
        try:
            for layer in range(self._layers):
                self._layer(exchange, layer)
        except RankLost as lost:
            exchange.close()  # others that still wait for this rank hear of it
            self._line.send("drop", {}, self.deadline)
            return StepDropped(step.number, lost.rank, lost.reason)
        return StepDone(step.number, NO_ROWS, self.totals)

    def _layer(self, exchange: SharedMemoryExchange, layer: int) -> None:
        """One round trip: none of the network's where no row goes there, but the other host is told so.

        The other host has the deadline for all of it.
        """
        shape = exchange.shape
        values = torch.empty(0, shape.hidden, dtype=shape.wire)
        scale = torch.empty(0) if shape.wire is torch.int8 else None
        exchange.begin_dispatch(Rows(values, scale), torch.empty(0, shape.top_k, dtype=torch.int32))
        received = exchange.finish_dispatch()
        count, results = int(received.counts.sum()), received.results
        assert results is not None, "results have a place in shared memory"
        scales = None if received.placed is None else received.placed.scale
        rows, parts = self._packed(shape, exchange.addresses(count), scales)
        facts, until = {"layer": layer, "rows": rows, "results": count}, time.monotonic() + self.deadline
        self._line.send("rows", facts, self.deadline, [bytes_of(received.counts), *parts])
        if count:
            word = self._line.answer("results", max(LEAST_SECONDS, until - time.monotonic()))
            self._line.bytes_into(word, bytes_of(results), max(LEAST_SECONDS, until - time.monotonic()))
        exchange.begin_combine(results)
        exchange.finish_combine(torch.empty(0, shape.top_k))

    def _packed(self, shape: ExchangeShape, addresses: Tensor, scales: Tensor | None) -> tuple[int, list[memoryview]]:
        """How many rows there are, and: which of them each result is of, their scales, and themselves, each once."""
        found, first, of_result = np.unique(addresses.numpy(), return_index=True, return_inverse=True)
        size = shape.hidden * shape.wire.itemsize
        if len(self._room) < len(found) * size:
            self._room = np.empty(len(found) * size, dtype=np.uint8)
        room = self._room[: len(found) * size]
        for begin, end in _runs(found, size):
            ctypes.memmove(room.ctypes.data + begin * size, int(found[begin]), (end - begin) * size)
        parts = [of_result.astype(np.int32).view(np.uint8).data]
        if scales is not None:
            parts.append(scales.numpy()[first].view(np.uint8).data)
        return len(found), [*parts, room.data]


def _runs(addresses: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, ascending, that lie one after the other."""
    ends = [*(np.flatnonzero(np.diff(addresses) != size) + 1).tolist(), len(addresses)]
    begin = 0
    for end in ends:
        if begin < end:
            yield begin, end
        begin = end


def bytes_of(tensor: Tensor) -> memoryview:
    """Of one that is contiguous, in host memory."""
    found: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
