"""Where the KV of a sequence's tokens lies, on the device or in host memory, for copies in and out.

A sequence's oldest KV may move to the host while it is read. Reading does not wait for it: what has moved meanwhile is
read again. It knows sequences and the memories they lie in, and nothing of chunks, leases or transports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from kvcache.memory.device import DeviceKV
from kvcache.memory.device_room import DevicePayload
from kvcache.memory.host import HostKV
from kvcache.memory.host_copy import Bytes
from serving.engine.sequence import SequenceState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KVLocation:
    """Tokens start..end (exclusive) of a sequence in one memory: `blocks` is its table there, from token 0 on."""

    device_kv: DeviceKV
    blocks: Sequence[int]  # right for these tokens; what it says of others means nothing
    start: int
    end: int
    on_host: bool = False


class KVLocations:
    """The memories of one worker: `device`, and `host` where it has one. `lock` guards its sequences."""

    def __init__(
        self, device: DeviceKV, host: HostKV | None = None, lock: AbstractContextManager[object] | None = None
    ):
        self.device = device
        self.host = host
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock

    def read(self, seq: SequenceState, start: int, end: int, copy: Callable[[KVLocation], T]) -> list[T]:
        """What `copy` makes of the locations where computed tokens start..end lie, in order; on any thread.

        It is called once more where the KV has moved while it copied, and returns bytes of the right tokens alone: a
        block is written again only after its move is told (OffloadState.settle), and that is looked at after each copy.
        """
        found = []
        while start < end:
            location = self._located(seq, start, end)
            self._wait(location)
            copied = copy(location)
            if not self._moved(seq, location):
                found.append(copied)
                start = location.end
        return found

    def arriving(self, seq: SequenceState, start: int, end: int) -> list[KVLocation]:
        """Where KV of these tokens belongs, in order, of a sequence that computes none of its own. Under the lock."""
        if seq.offload is not None:
            seq.offload.arrive()
        found: list[KVLocation] = []
        while start < end:
            found.append(self._located(seq, start, end))
            start = found[-1].end
        return found

    def write(self, locations: Sequence[KVLocation], layers: range, parts: Sequence[Sequence[Bytes]]) -> None:
        """Put KV that has come from elsewhere where it belongs: not under the lock, for it may take a while.

        `parts[i]` are the planes of layer `layers[i]`, uint8 [tokens, token_bytes] each, for the tokens of `locations`.
        Their blocks are held meanwhile (KVCacheManager.keep).
        """
        for location in locations:
            self._wait(location)
            slots = location.device_kv.slots(location.blocks, location.start, location.end)
            rows = slice(location.start - locations[0].start, location.end - locations[0].start)
            location.device_kv.write_all(layers, slots, [[plane[rows] for plane in planes] for planes in parts])

    def unpack(self, locations: Sequence[KVLocation], layers: range, payload: DevicePayload) -> bool:
        """`write` of what lies on the device already; False where it does not belong to one place there."""
        if len(locations) != 1 or locations[0].on_host:
            return False
        [location] = locations
        slots = location.device_kv.slots(location.blocks, location.start, location.end)
        location.device_kv.unpack(layers, slots, payload)
        return True

    def _located(self, seq: SequenceState, start: int, end: int) -> KVLocation:
        """Where token `start` lies, and as many after it as lie in the same memory."""
        device = self.device.kept_as(seq.kv_dtype)
        if self.host is None or seq.offload is None:
            return KVLocation(device, seq.blocks, start, end)
        with self.lock:
            offload = seq.offload
            if offload is None:  # the sequence has just ended, which its reader finds out next
                return KVLocation(device, seq.blocks, start, end)
            coming = list(offload.moves)
            there = offload.moved - len(coming)  # extents on the host
            border = there * self.host.plan.extent_tokens
            if start < border:
                memory = self.host.memory.kept_as(seq.kv_dtype)
                return KVLocation(memory, list(offload.extents), start, min(end, border), on_host=True)
            absent = [0] * (there * offload.extent_blocks)
            leaving = [block for move in coming for block in move.blocks]
            return KVLocation(device, [*absent, *leaving, *seq.blocks], start, end)

    def _wait(self, location: KVLocation) -> None:
        """Until what has moved to the location is there."""
        if self.host is not None and location.on_host:
            self.host.wait_moves()

    def _moved(self, seq: SequenceState, location: KVLocation) -> bool:
        """True if some of it has been copied to the host by now, so that its blocks may hold other tokens."""
        offload = seq.offload
        if offload is None or self.host is None or location.on_host:
            return False
        return offload.copied * self.host.plan.extent_tokens > location.start
