"""What one tier holds, by name and size, and who has to go when it is full: quotas and pins around a policy.

Pure: `now` is handed in, the bytes themselves are somebody else's. Not thread-safe; the store's lock guards it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvcache.pool.eviction import POLICIES, EvictionPolicy
from kvcache.pool.links import TierStat


@dataclass(slots=True)
class Held:
    """A block as a tier counts it: bytes, when it came (seconds), and the number of its last use among all uses."""

    key: bytes
    namespace: str
    size: int
    stored_at: float
    used: int = 0


@dataclass(slots=True)
class Counters:
    """A tier's running totals: the fields of TierStat that only grow."""

    hits: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    corrupt: int = 0
    read_seconds: float = 0.0
    eviction_age_seconds: float = 0.0

    def add(self, other: Counters) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quotas:
    """Bytes that each namespace may call its own: the others' inserts never push it below.

    `scale` is the part of it that holds in this tier.
    """

    by_namespace: Mapping[str, int] = field(default_factory=dict)
    default: int = 0
    scale: float = 1.0

    def of(self, namespace: str) -> int:
        return int(self.by_namespace.get(namespace, self.default) * self.scale)


class Pins:
    """Keys that may not go before their time."""

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


class _Group:
    """Blocks that compete with one another under one policy: a namespace with a quota, or all those without."""

    def __init__(self, policy: EvictionPolicy, quota: int):
        self.policy = policy
        self.quota = quota
        self.bytes = 0

    def victim(self, pinned: Container[bytes]) -> bytes | None:
        """The policy's first choice that is not pinned."""
        return next((key for key in self.policy.victims() if key not in pinned), None)


class Shelf:
    """Never more than `capacity` bytes. A namespace within its quota loses nothing to another's inserts.

    What namespaces hold beyond their quotas competes: among the victims that their policies offer, the one that was
    used longest ago goes. Who finds no room that way makes it among its own blocks, or is refused.
    """

    def __init__(self, capacity: int, policy: str, quotas: Quotas):
        self.capacity = capacity
        self.bytes = 0
        self.counters = Counters()
        self._make_policy = POLICIES[policy]
        self._quotas = quotas
        self._held: dict[bytes, Held] = {}
        self._groups: dict[str, _Group] = {}
        self._uses = 0

    def get(self, key: bytes) -> Held | None:
        return self._held.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def touch(self, key: bytes) -> None:
        """Count a use, if the block is here. The blocks of a chain are touched last first, so that heads stay longest:
        without the blocks before it a block is of no use to anybody."""
        held = self._held.get(key)
        if held is not None:
            self._uses += 1
            held.used = self._uses
            self._group(held.namespace).policy.touch(key)

    def admit(
        self,
        key: bytes,
        namespace: str,
        size: int,
        *,
        stored_at: float,
        now: float,
        pinned: Container[bytes] = (),
        capacity: int | None = None,
    ) -> list[Held] | None:
        """Take a new block in; what had to go for it, or None, and nothing has gone, if that makes no room.

        `capacity` is what there is for once, where that is less than the shelf's own.
        """
        assert size > 0 and key not in self._held, "a block is admitted once"
        capacity = self.capacity if capacity is None else capacity
        if size > capacity:
            return None
        own = self._group(namespace)
        own.bytes += size  # the newcomer competes as part of what its namespace holds
        gone: list[Held] = []
        while self.bytes + size > capacity:
            victim = self._victim(own, pinned)
            if victim is None:
                own.bytes -= size
                self._tidy(namespace)
                for held in gone:
                    self._insert(held)
                return None
            self._take_out(victim, evicted=True)
            gone.append(victim)
        own.bytes -= size
        self._uses += 1
        self._insert(Held(key, namespace, size, stored_at, self._uses))
        self.counters.evictions += len(gone)
        self.counters.eviction_age_seconds += sum(now - held.stored_at for held in gone)
        return gone

    def remove(self, key: bytes) -> Held | None:
        """Take a block out for another reason than want of room."""
        held = self._held.get(key)
        if held is not None:
            self._take_out(held, evicted=False)
        return held

    def stat(self) -> TierStat:
        counters = self.counters
        return TierStat(
            capacity=self.capacity,
            bytes=self.bytes,
            blocks=len(self._held),
            hits=counters.hits,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            evictions=counters.evictions,
            corrupt=counters.corrupt,
            read_seconds=counters.read_seconds,
            eviction_age_seconds=counters.eviction_age_seconds,
        )

    def _victim(self, own: _Group, pinned: Container[bytes]) -> Held | None:
        stalest: Held | None = None
        for group in self._groups.values():
            key = group.victim(pinned) if group.bytes > group.quota else None
            if key is not None:
                held = self._held[key]
                if group.bytes - held.size >= group.quota and (stalest is None or held.used < stalest.used):
                    stalest = held
        if stalest is None:
            key = own.victim(pinned)
            return None if key is None else self._held[key]
        return stalest

    def _group(self, namespace: str) -> _Group:
        name = self._name(namespace)
        if name not in self._groups:
            self._groups[name] = _Group(self._make_policy(), self._quotas.of(namespace))
        return self._groups[name]

    def _name(self, namespace: str) -> str:
        """Namespaces without a quota share a group, under a name that no namespace can have."""
        return namespace if self._quotas.of(namespace) else ""

    def _insert(self, held: Held) -> None:
        group = self._group(held.namespace)
        group.policy.add(held.key, held.size)
        group.bytes += held.size
        self._held[held.key] = held
        self.bytes += held.size

    def _take_out(self, held: Held, *, evicted: bool) -> None:
        group = self._group(held.namespace)
        group.policy.remove(held.key, evicted=evicted)
        group.bytes -= held.size
        del self._held[held.key]
        self.bytes -= held.size
        self._tidy(held.namespace)

    def _tidy(self, namespace: str) -> None:
        """Namespaces may come and go by the thousand: forget a group that counts nothing."""
        name = self._name(namespace)
        if not self._groups[name].bytes:
            del self._groups[name]
