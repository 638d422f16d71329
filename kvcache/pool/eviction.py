"""Which blocks leave a full tier: least recently used first, within quotas and around pins.

Pure: it counts blocks by name and size, and `now` is handed in. Not thread-safe; the store's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from serving.messages import TierStat


@dataclass(slots=True)
class BlockRecord:
    """A block as a tier counts it: bytes, when it came (seconds), and the number of its last use among all uses."""

    key: bytes
    namespace: str
    size: int
    stored_at: float
    used: int = 0


R = TypeVar("R", bound=BlockRecord)


@dataclass(slots=True)
class TierCounters:
    """A tier's running totals: the fields of TierStat that only grow."""

    hits: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    corrupt: int = 0
    read_seconds: float = 0.0
    eviction_age_seconds: float = 0.0

    def add(self, other: TierCounters) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Pins:
    """Keys that may not be evicted until a time, in seconds."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}
        self._queue: list[tuple[float, bytes]] = []  # a heap; a pin that was made longer leaves its old entry behind

    def pin(self, key: bytes, until: float) -> None:
        if until > self._until.get(key, float("-inf")):
            self._until[key] = until
            heappush(self._queue, (until, key))

    def release(self, key: bytes) -> None:
        self._until.pop(key, None)

    def expire(self, now: float) -> None:
        while self._queue and self._queue[0][0] <= now:
            _, key = heappop(self._queue)
            if self._until.get(key, float("inf")) <= now:
                del self._until[key]

    def __contains__(self, key: object) -> bool:
        return key in self._until

    def __len__(self) -> int:
        return len(self._until)


class _Group(Generic[R]):
    """Blocks that compete with one another: those of a namespace with a quota, or of all namespaces without one."""

    def __init__(self, quota: int):
        self.records: OrderedDict[bytes, R] = OrderedDict()  # least recently used first
        self.quota = quota
        self.bytes = 0

    def victim(self, pinned: Container[bytes]) -> R | None:
        """The block that was used longest ago and is not pinned."""
        return next((record for key, record in self.records.items() if key not in pinned), None)


class QuotaLru(Generic[R]):
    """Never more than `capacity` bytes. A namespace within its quota loses nothing to another's inserts. `quota_of` a
    namespace are bytes of this tier, 0 for none.

    Of what namespaces hold beyond their quotas, the block that was used longest ago is evicted. An insert that finds no
    room that way takes it from its own namespace, or is refused.
    """

    def __init__(self, capacity: int, quota_of: Callable[[str], int] = lambda namespace: 0):
        self.capacity = capacity
        self.quota_of = quota_of
        self.bytes = 0
        self.counters = TierCounters()
        self._records: dict[bytes, R] = {}
        self._groups: dict[str, _Group[R]] = {}
        self._uses = 0

    def get(self, key: bytes) -> R | None:
        return self._records.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        return iter(self._records.values())

    def touch(self, key: bytes) -> None:
        """Count a use, if the block is here. A chain's blocks are touched last first, so that its first stay longest:
        a block is useless without those before it."""
        record = self._records.get(key)
        if record is not None:
            self._uses += 1
            record.used = self._uses
            self._group(record.namespace).records.move_to_end(key)

    def admit(
        self, record: R, now: float, pinned: Container[bytes] = (), capacity: int | None = None
    ) -> list[R] | None:
        """Take a new block in; what had to go for it, or None, and nothing has gone, if that makes no room.

        The record is this tier's alone. `capacity` is what there is for once, where that is less than usual.
        """
        size = record.size
        assert size > 0 and record.key not in self._records, "a block is admitted once"
        capacity = self.capacity if capacity is None else capacity
        if size > capacity:
            return None
        own = self._group(record.namespace)
        own.bytes += size  # the newcomer competes as part of what its namespace holds
        gone: list[R] = []
        while self.bytes + size > capacity:
            victim = self._victim(own, pinned)
            if victim is None:
                own.bytes -= size
                self._tidy(record.namespace)
                for other in gone:
                    self._insert(other)
                return None
            self._take_out(victim)
            gone.append(victim)
        own.bytes -= size
        record.used = self._uses = self._uses + 1
        self._insert(record)
        self.counters.evictions += len(gone)
        self.counters.eviction_age_seconds += sum(now - other.stored_at for other in gone)
        return gone

    def remove(self, key: bytes) -> R | None:
        """Take a block out for another reason than want of room."""
        record = self._records.get(key)
        if record is not None:
            self._take_out(record)
        return record

    def stat(self) -> TierStat:
        return TierStat(capacity=self.capacity, bytes=self.bytes, blocks=len(self._records), **asdict(self.counters))

    def _victim(self, own: _Group[R], pinned: Container[bytes]) -> R | None:
        beyond = [
            record
            for group in self._groups.values()
            if group.bytes > group.quota
            and (record := group.victim(pinned)) is not None
            and group.bytes - record.size >= group.quota
        ]
        return min(beyond, key=lambda record: record.used) if beyond else own.victim(pinned)

    def _group(self, namespace: str) -> _Group[R]:
        name = self._name(namespace)
        if name not in self._groups:
            self._groups[name] = _Group(self.quota_of(namespace))
        return self._groups[name]

    def _name(self, namespace: str) -> str:
        """Namespaces without a quota share a group, under a name that no namespace can have."""
        return namespace if self.quota_of(namespace) else ""

    def _insert(self, record: R) -> None:
        group = self._group(record.namespace)
        group.records[record.key] = record
        group.bytes += record.size
        self._records[record.key] = record
        self.bytes += record.size

    def _take_out(self, record: R) -> None:
        group = self._group(record.namespace)
        del group.records[record.key]
        group.bytes -= record.size
        del self._records[record.key]
        self.bytes -= record.size
        self._tidy(record.namespace)

    def _tidy(self, namespace: str) -> None:
        """Forget a group without bytes: namespaces may come and go by the thousand."""
        name = self._name(namespace)
        if not self._groups[name].bytes:
            del self._groups[name]
