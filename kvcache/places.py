"""Where the KV of a sequence's tokens lies, on the device or in host memory, for whoever copies it in or out.

A sequence's oldest KV may move to the host while it is read. Nobody waits for that: what has moved is read once more.
It knows sequences and the memories they lie in, and nothing of chunks, leases or transports.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from kvcache.device import DevicePool
from kvcache.hostcells import Bytes
from kvcache.staging import HostKV
from serving.engine.sequence import Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Tokens start..end (exclusive) of a sequence in one memory: `blocks` is its table there, from token 0 on."""

    pool: DevicePool
    blocks: Seq[int]  # right for these tokens; what it says of others means nothing
    start: int
    end: int
    on_host: bool = False


class Places:
    """The memories of one worker: `device`, and `host` where it has one. `lock` guards its sequences."""

    def __init__(
        self, device: DevicePool, host: HostKV | None = None, lock: AbstractContextManager[object] | None = None
    ):
        self.device = device
        self.host = host
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock

    def read(self, seq: Sequence, start: int, end: int, copy: Callable[[Place], T]) -> list[T]:
        """What `copy` makes of the places where computed tokens start..end lie, in order; on any thread.

        It is called once more where the KV has moved while it copied, and returns bytes of the right tokens alone: a
        block is written again only after its move is told (Spill.settle), and that is looked at after each copy.
        """
        found = []
        while start < end:
            place = self._place(seq, start, end)
            self._wait(place)
            copied = copy(place)
            if not self._moved(seq, place):
                found.append(copied)
                start = place.end
        return found

    def write(self, seq: Sequence, layer: int, start: int, parts: Seq[Seq[Bytes]]) -> None:
        """Put KV that has come from elsewhere where it belongs in a sequence that computes none of its own. Locked.

        `parts[i]` are the planes of layer `layer + i`, uint8 [tokens, token_bytes] each, for tokens from `start` on.
        """
        if seq.spill is not None:
            seq.spill.arrive()
        begin, end = start, start + len(parts[0][0])
        while begin < end:
            place = self._place(seq, begin, end)
            self._wait(place)
            slots = place.pool.slots(place.blocks, place.start, place.end)
            rows = slice(place.start - start, place.end - start)
            for index, planes in enumerate(parts, layer):
                place.pool.write(index, slots, [plane[rows] for plane in planes])
            begin = place.end

    def _place(self, seq: Sequence, start: int, end: int) -> Place:
        """Where token `start` lies, and as many after it as lie in the same memory."""
        device = self.device.kept_as(seq.kv_dtype)
        if self.host is None or seq.spill is None:
            return Place(device, seq.blocks, start, end)
        with self.lock:
            spill = seq.spill
            if spill is None:  # it has just ended: whoever reads it is about to hear so
                return Place(device, seq.blocks, start, end)
            coming = list(spill.moves)
            there = spill.moved - len(coming)  # extents on the host
            border = there * self.host.plan.extent_tokens
            if start < border:
                memory = self.host.memory.kept_as(seq.kv_dtype)
                return Place(memory, list(spill.extents), start, min(end, border), on_host=True)
            absent = [0] * (there * spill.extent_blocks)
            leaving = [block for move in coming for block in move.blocks]
            return Place(device, [*absent, *leaving, *seq.blocks], start, end)

    def _wait(self, place: Place) -> None:
        """Until what has moved to the place is there."""
        if self.host is not None and place.on_host:
            self.host.wait_moves()

    def _moved(self, seq: Sequence, place: Place) -> bool:
        """Whether some of it has been copied to the host by now, so that its blocks may hold other tokens."""
        spill = seq.spill
        if spill is None or self.host is None or place.on_host:
            return False
        return spill.copied * self.host.plan.extent_tokens > place.start
