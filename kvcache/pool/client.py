"""The pool as a worker uses it: many nodes behind four calls that never fail, but find less.

RendezvousHash says which nodes own a key, Backoff which nodes are not asked, and Fetch merges the nodes' slabs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvcache.pool.backoff import Backoff
from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.fetch import Fetch
from kvcache.pool.links import BlockSelection, PoolLink
from kvcache.pool.rendezvous import RendezvousHash
from kvcache.pool.wire import batches
from serving.errors import MillraceError, Unauthorized, WorkerLost

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class ClientStats:
    """Running totals. A failure is counted by its reason."""

    stored: int = 0  # blocks that nodes took
    bytes_in: Counter[str] = field(default_factory=Counter)  # by transport
    bytes_out: int = 0
    corrupt: int = 0  # parts refused on arrival
    failures: Counter[str] = field(default_factory=Counter)


class PoolClient:
    """`make_link` reaches the node at an address; `timeout` seconds bound each wait for a node's answer.

    Each block is kept by `replication` nodes: every client of a pool must be told the same number.
    """

    def __init__(
        self,
        make_link: Callable[[str], PoolLink],
        *,
        replication: int = 1,
        timeout: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.make_link = make_link
        self.replication = replication
        self.timeout = timeout
        self.clock = clock
        self.stats = ClientStats()
        self.rendezvous = RendezvousHash()
        self._backoff = Backoff()
        self._links: dict[str, PoolLink] = {}
        self._retired: set[PoolLink] = set()  # no longer nodes of ours, but calls to them are in progress
        self._calls: Counter[PoolLink] = Counter()  # in progress
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses."""
        return self.rendezvous.nodes

    @property
    def calls(self) -> int:
        """Calls to nodes in progress."""
        return self._calls.total()

    def set_nodes(self, nodes: Iterable[str]) -> None:
        """These are the pool from now on, as `host:port` or `name@host:port` (see RendezvousHash).

        Calls in progress with others end by themselves.
        """
        self.rendezvous = RendezvousHash(nodes)
        for address in [known for known in self._links if known not in self.rendezvous.nodes]:
            self._backoff.answered(address)  # should it come back
            link = self._links.pop(address)
            self._retired.add(link)
            self._close_unused(link)

    # ---- the four calls ----------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> int:
        """How many of the leading keys some node has; those are kept at least so long. One round trip."""
        found = [False] * len(keys)

        async def ask(address: str, indices: list[int]) -> None:
            share = [keys[index] for index in indices]
            here = await self._ask(address, lambda link: link.lookup(share, pin_seconds))
            for index, yes in zip(indices, here or (), strict=False):
                found[index] = found[index] or yes

        await self._each_owner(keys, ask)
        return found.index(False) if False in found else len(found)

    async def get(
        self, keys: Sequence[bytes], first_part: int = 0, last_part: int = 0, *, parts: int
    ) -> AsyncGenerator[Slab, None]:
        """Parts first_part..last_part (exclusive; 0 as last_part: all) of blocks of `parts` parts, from all nodes.

        Indices are positions in `keys`. Of each key the parts come in ascending order; keys of different nodes
        overtake each other. A key that no node has is left out. Leave it early only through `aclose`.
        """
        owners = [self.rendezvous.owners(key, self.replication) for key in keys]
        fetch = Fetch(keys, owners, first_part, last_part or parts, parts, self._stream)
        try:
            async with aclosing(fetch.slabs()) as slabs:
                async for slab in slabs:
                    self.stats.bytes_in[slab.via] += len(slab.payload)
                    yield slab
        finally:
            self.stats.corrupt += fetch.corrupt

    async def put(self, blocks: Sequence[PoolBlock]) -> None:
        """Offer blocks to all their owners. What is not taken is counted, and lost to the pool."""

        async def offer(address: str, indices: list[int]) -> None:
            for batch in batches(blocks[index] for index in indices):
                taken = await self._ask(address, lambda link: link.put(batch))  # noqa: B023 - it is called at once
                if taken is None:
                    return
                self.stats.stored += taken
                self.stats.bytes_out += sum(len(block.payload) for block in batch)

        await self._each_owner([block.key for block in blocks], offer)

    async def evict(self, keys: Sequence[bytes]) -> bool:
        """Have all their owners drop these blocks; True if all of them have answered."""

        async def drop(address: str, indices: list[int]) -> bool:
            chosen = BlockSelection(keys=tuple(keys[index] for index in indices))
            return await self._ask(address, lambda link: link.evict(chosen)) is not None

        return all(await self._each_owner(keys, drop))

    # ---- nodes -------------------------------------------------------------------------------------------------

    async def _each_owner(
        self, keys: Sequence[bytes], call: Callable[[str, list[int]], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """What the call gives for each node that owns some of the keys, and their indices; all at a time."""
        shares: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            for address in self.rendezvous.owners(key, self.replication):
                shares.setdefault(address, []).append(index)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(call(*share), name=f"pool-{share[0]}") for share in shares.items()]
        return [made.result() for made in calls]

    async def _ask(self, address: str, call: Callable[[PoolLink], Awaitable[T]]) -> T | None:
        """The node's answer; None if it gives none, which is counted."""
        if not self._backoff.may_ask(address, self.clock()):
            return None
        try:
            with self._link(address) as link:
                async with asyncio.timeout(self.timeout):
                    answer = await call(link)
        except (MillraceError, OSError) as error:
            self._failed(address, error)
            return None
        self._backoff.answered(address)
        return answer

    async def _stream(self, address: str, keys: Sequence[bytes], first: int, last: int) -> AsyncGenerator[Slab, None]:
        """What the node sends, until it ends or fails; failing is counted."""
        if not self._backoff.may_ask(address, self.clock()):
            return
        try:
            with self._link(address) as link:
                async with aclosing(link.get(keys, first, last)) as slabs:
                    while True:
                        async with asyncio.timeout(self.timeout):
                            slab = await anext(slabs, None)
                        self._backoff.answered(address)
                        if slab is None:
                            return
                        yield slab
        except (MillraceError, OSError) as error:
            self._failed(address, error)

    def _failed(self, address: str, error: MillraceError | OSError) -> None:
        """Count it. A node that answered, if only to refuse, is not out of reach."""
        timed_out = isinstance(error, TimeoutError) or getattr(error, "code", None) == "DEADLINE_EXCEEDED"
        self.stats.failures["Timeout" if timed_out else type(error).__name__] += 1
        if isinstance(error, WorkerLost | Unauthorized | OSError):
            if self._backoff.failed(address, self.clock()):
                log.warning("pool node %s is left alone for a while: %s", address, error or "it does not answer")
        else:
            self._backoff.answered(address)

    @contextmanager
    def _link(self, address: str) -> Iterator[PoolLink]:
        if address not in self._links:
            self._links[address] = self.make_link(address)
        link = self._links[address]
        self._calls[link] += 1
        try:
            yield link
        finally:
            self._calls[link] -= 1
            self._close_unused(link)

    def _close_unused(self, link: PoolLink) -> None:
        """Close the link of a node that has left the pool once the last call has ended."""
        if link in self._retired and not self._calls[link]:
            self._retired.discard(link)
            del self._calls[link]
            task = asyncio.get_running_loop().create_task(link.close(), name="close-pool-link")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Calls in progress find their links closed."""
        links = [*self._links.values(), *self._retired]
        self._links.clear()
        self._retired.clear()
        self.rendezvous = RendezvousHash()
        await asyncio.gather(*(link.close() for link in links), *self._closing)
