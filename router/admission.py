"""Who looks for a place and in what order: a bounded queue by priority, and fair to tenants within one.

A request that found no place waits until something has changed. It keeps back those that ask for the same and at least
as much, and no others. It reads no clock; patience is kept by the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from router.changes import Changes
from serving.errors import Overloaded
from serving.fair_shares import FairShares

log = logging.getLogger(__name__)

CONTINUATION = -(1 << 31)  # the priority of a request the client already sees tokens of
MOST_LOOKS = 64  # at a time
LOOK_SECONDS = 0.02  # a look that takes longer (a worker is slow to answer) does not hold up the next one


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks for. Requests of one `kind` ask for the same, except for `tokens`."""

    priority: int
    tenant: str  # who shares fairly with others: an API key, or where none is required, a cache salt
    tokens: int
    kind: object = None
    service_class: str = ""  # for those who count what waits
    charge: int | None = None  # tokens that its tenant is charged for the place; None: `tokens`
    pressing: Callable[[], bool] | None = None  # True while others give their room to it; None: they never do
    again: bool = False  # it was let in before


class Ticket:
    """A request's place in the queue."""

    def __init__(self, claim: Claim, number: int):
        self.claim = claim
        self.number = number  # in order of arrival
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.looked: asyncio.Future[bool] | None = None  # done with True once the place was found
        self.round = -1  # of its last look
        self.overtaken = 0  # smaller claims of its kind that came later, and have found a place since it found none
        self.changes = -1  # that there had been when its last look began

    @property
    def idle(self) -> bool:
        """True if it waits for its turn: it neither looks nor is about to leave."""
        return not self.turn.done() and (self.looked is None or self.looked.done())


class _Failed:
    """Claims that have found no place, by kind: the fewest tokens, and the most important priority, of any of them.

    They keep back claims of as many tokens that are no more important.
    """

    def __init__(self) -> None:
        self._least: dict[object, tuple[int, int]] = {}

    def add(self, claim: Claim) -> None:
        tokens, priority = self._least.get(claim.kind, (claim.tokens, claim.priority))
        self._least[claim.kind] = min(tokens, claim.tokens), min(priority, claim.priority)

    def keep_back(self, claim: Claim) -> bool:
        if not self._least:
            return False
        found = self._least.get(claim.kind)
        return found is not None and claim.tokens >= found[0] and claim.priority >= found[1]


def _presses(claim: Claim) -> bool:
    return claim.pressing is not None and claim.pressing()


class AdmissionQueue:
    """`changes` are those that may have made room. `max_waiting` new requests may wait; more are refused at once.

    A request that is alone looks at once, and no task is beside it until it finds no place or another comes.
    """

    def __init__(self, max_waiting: int, changes: Changes):
        self.max_waiting = max_waiting
        self.changes = changes
        self.shares = FairShares()
        self._queues: dict[int, dict[str, deque[Ticket]]] = {}  # by priority and tenant, in order of arrival
        self._count = 0
        self._numbers = count()
        self._round = 0
        self._failed = _Failed()  # in this round
        self._failed_calm = _Failed()  # those of them that were not pressing
        self._passed: dict[Ticket, None] = {}  # those that have found no place, in order of their first look
        self._window = MOST_LOOKS  # looks at a time: one after a failure, twice as many after each success
        self._poked = False  # there is something new to look at
        self._watched: int | None = None  # changes there had been when the pump began to wait for one; None: not yet
        self._waiting: asyncio.Future[None] | None = None  # for that
        self._pump: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return self._count

    @property
    def waiting_tokens(self) -> int:
        """Tokens of their prompts, and of what those that were placed before have been answered."""
        return sum(ticket.claim.tokens for ticket in self._tickets())

    def waiting_by_class(self) -> Counter[str]:
        """The same, by service class."""
        return Counter(ticket.claim.service_class for ticket in self._tickets())

    def _tickets(self) -> Iterator[Ticket]:
        return (ticket for tenants in self._queues.values() for tickets in tenants.values() for ticket in tickets)

    @asynccontextmanager
    async def enter(self, claim: Claim) -> AsyncIterator[Ticket]:
        """Join the queue until the block is left. Raises Overloaded when too many new requests wait already."""
        if claim.priority != CONTINUATION and not claim.again and self._count > self.max_waiting:
            raise Overloaded(f"{self._count} requests wait for room already", code="queue_full", retry_after=1.0)
        ticket = Ticket(claim, next(self._numbers))
        self._add(ticket)
        try:
            yield ticket
        finally:
            self._remove(ticket)

    async def turn(self, ticket: Ticket) -> None:
        """Wait until the request may look for a place; say with `looked` what came of it."""
        await ticket.turn
        ticket.turn = asyncio.get_running_loop().create_future()

    def looked(self, ticket: Ticket, *, found: bool | None) -> None:
        """Its look has ended. None: with neither a place nor the lack of one, so that it says nothing of others.

        One that is not pressing finds no place where others may be given one: it says nothing of those.
        """
        if found:
            self._count_overtaken(ticket)
            charge = ticket.claim.charge
            self.shares.charge(ticket.claim.tenant, ticket.claim.tokens if charge is None else charge)
            self._window = min(MOST_LOOKS, 2 * self._window)
        elif found is not None:
            self._passed[ticket] = None
            claim, self._window = ticket.claim, 1
            if not self._missed(ticket):
                (self._failed if _presses(claim) else self._failed_calm).add(claim)
        if not found:
            self._look_again(ticket)
        if ticket.looked is not None and not ticket.looked.done():
            ticket.looked.set_result(bool(found))

    def _missed(self, ticket: Ticket) -> bool:
        """True if something has changed since its last look began that the pump does not wait for."""
        seen = self.changes.count if self._watched is None or self._resting else self._watched
        return 0 <= ticket.changes < seen

    def _look_again(self, ticket: Ticket) -> None:
        """It has found no place, and waits on: at once where something changed while it looked and nobody saw it."""
        if self._missed(ticket):
            if ticket.round == self._round:
                self._next_round()
            self._poke()
        if self._resting:
            self._start()

    def _next_round(self) -> None:
        """Everyone may look again."""
        self._round += 1
        self._failed, self._failed_calm = _Failed(), _Failed()

    def _count_overtaken(self, ticket: Ticket) -> None:
        """The claim found a place: it has overtaken larger ones of its kind that came before and matter as much.

        One whose tenant had been served less has not: that was its turn.
        """
        claim, served = ticket.claim, self.shares.served(ticket.claim.tenant)
        for other in self._passed:
            theirs = other.claim
            if (
                other.number < ticket.number
                and theirs.kind == claim.kind
                and theirs.tokens > claim.tokens
                and theirs.priority <= claim.priority
                and (theirs.tenant == claim.tenant or self.shares.served(theirs.tenant) <= served)
            ):
                other.overtaken += 1

    # ---- the queue -------------------------------------------------------------------------------------------------

    def _add(self, ticket: Ticket) -> None:
        tenants = self._queues.setdefault(ticket.claim.priority, {})
        self.shares.arrived(ticket.claim.tenant, set(tenants))
        tenants.setdefault(ticket.claim.tenant, deque()).append(ticket)
        self._count += 1
        if self._count == 1:
            self._next_round()
            self._look(ticket)  # there is none to wait for
        if not self._resting:
            self._poke()
        elif self._count > 1:
            self._start()

    @property
    def _resting(self) -> bool:
        """True if nobody waits for a change."""
        return self._pump is None or self._pump.done()

    def _start(self) -> None:
        self._watched = None
        self._pump = asyncio.create_task(self._run(), name="admission")
        self._pump.add_done_callback(self._ended)

    def _ended(self, pump: asyncio.Task[None]) -> None:
        """Requests that wait depend on it: should it break, it begins again."""
        if not pump.cancelled() and pump.exception() is not None:
            log.error("the admission queue broke", exc_info=pump.exception())
            if self._count and self._pump is pump:  # else a request that came just now has begun another
                self._start()

    def _remove(self, ticket: Ticket) -> None:
        """The request has its place, or has given up."""
        tenants = self._queues[ticket.claim.priority]
        tickets = tenants[ticket.claim.tenant]
        tickets.remove(ticket)
        self._passed.pop(ticket, None)
        self._count -= 1
        if not self._count:
            self._poke()
        if not tickets:
            del tenants[ticket.claim.tenant]
        if not tenants:
            del self._queues[ticket.claim.priority]
        ticket.turn.cancel()
        if ticket.looked is not None and not ticket.looked.done():
            ticket.looked.cancel()

    def _look(self, ticket: Ticket) -> asyncio.Future[bool]:
        ticket.round, ticket.changes = self._round, self.changes.count
        ticket.looked = asyncio.get_running_loop().create_future()
        ticket.turn.set_result(None)
        return ticket.looked

    def _next(self) -> Ticket | None:
        """The first that has not looked in this round and is not kept back by one that has.

        A look comes after each that is made, so this is what waiting requests cost, and they may be thousands.
        """
        now = self._round
        for priority in sorted(self._queues):
            tenants = self._queues[priority]
            for tenant in sorted(tenants, key=self.shares.served):
                for ticket in tenants[tenant]:
                    if ticket.round == now:
                        continue
                    if not self._kept_back(ticket.claim) and ticket.idle:
                        return ticket
        return None

    def _kept_back(self, claim: Claim) -> bool:
        """True if there was no place in this round for one that asks for the same and at most as much."""
        return self._failed.keep_back(claim) or (self._failed_calm.keep_back(claim) and not _presses(claim))

    async def _run(self) -> None:
        """Round after round, while requests wait: those that may look for a place, then wait for a change."""
        while self._count:
            self._watched = None
            changed = asyncio.ensure_future(self.changes.next())
            try:
                await asyncio.sleep(0)  # from here on no change is missed
                self._watched = self.changes.count
                if any(map(self._missed, self._tickets())):
                    self._next_round()  # looks have ended before anybody watched, and something has changed since
                while self._count and not changed.done():
                    self._poked = False
                    await self._look_around()
                    await self._wait(changed)
                if changed.done():
                    changed.result()
            finally:
                changed.cancel()
            self._next_round()

    async def _look_around(self) -> None:
        """Everyone who may looks once. A place that is found or not decides for how many of the others look at once."""
        looks: set[asyncio.Future[bool]] = set()
        while (ticket := self._next()) is not None or looks:
            if ticket is not None and len(looks) < self._window:
                looks.add(self._look(ticket))
                continue
            done, looks = await asyncio.wait(looks, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                looks = set()

    async def _wait(self, changed: asyncio.Future[None]) -> None:
        """Until there may be room, a request has come, or the last one has gone."""
        if self._poked:
            return
        poke = self._waiting = asyncio.get_running_loop().create_future()
        either: list[asyncio.Future[Any]] = [changed, poke]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            poke.cancel()

    def _poke(self) -> None:
        """There is something to look at for whoever waits."""
        self._poked = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
