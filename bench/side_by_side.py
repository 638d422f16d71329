"""Paced servers measured at the same time: each contender in a lane of its own, one run after the other.

Only servers that leave each other the cores can be (scripts.paced). Which runs are wanted is bench.race's matter.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from bench.contenders import Contender
from bench.endpoint import ServerError
from bench.progress import say
from bench.race import Race
from bench.referee import Comparison, Referee
from bench.sitting import OpenServer

T = TypeVar("T")


class LaneReferee(Referee):
    """`options.lanes` contenders at a time: none starts, which keeps all cores busy, while another is measured.

    A search begins near what its contender answered in a closed loop, at a power of `options.growth`, so that
    contenders are measured at the same rates. One whose server fails ends alone.
    """

    async def _compare(self, comparison: Comparison, until: float) -> None:
        say(f"── {comparison.name}, {comparison.mixture.name}: {comparison.mixture.describe()}")
        races = {
            one.name: self._race(comparison, one, self._first(comparison, one) or 1.0) for one in comparison.contenders
        }
        self.results.append(self._result(comparison, list(races.values())))
        try:
            left = [one for one in comparison.contenders if self._left(comparison, races[one.name])]
            for first in range(0, len(left), self.options.lanes):
                if not self._over(until):
                    await self._group(comparison, left[first : first + self.options.lanes], races, until)
        finally:
            self.results[-1] = self._result(comparison, list(races.values()))
        self._print()

    async def _group(
        self, comparison: Comparison, contenders: Sequence[Contender], races: dict[str, Race], until: float
    ) -> None:
        """Start these servers, then let them learn, then search with all of them at once."""
        async with AsyncExitStack() as stack:
            starts = [self._tried(one, self._start(comparison, one, stack)) for one in contenders]
            started = zip(contenders, await asyncio.gather(*starts), strict=True)
            servers = {one: server for one, server in started if server is not None}
            warming = [self._tried(one, self._warmed(comparison, one, server)) for one, server in servers.items()]
            warmed = zip(servers, await asyncio.gather(*warming), strict=True)
            searches = []
            for one, answered in warmed:
                if answered is not None:
                    race = races[one.name] = self._race(comparison, one, self._note_first(comparison, one, answered))
                    searches.append(self._tried(one, self._search(comparison, servers[one], race, until)))
            await asyncio.gather(*searches)

    async def _search(self, comparison: Comparison, server: OpenServer, race: Race, until: float) -> None:
        """All runs of one contender, one after the other. Raises ServerError."""
        while (key := self._next_unmeasured(race)) is not None and not self._over(until):
            if not await self._measure(server, comparison.mixture, race, key, until):
                return

    async def _tried(self, contender: Contender, work: Awaitable[T]) -> T | None:
        """What comes of it; None where the contender's server failed, which is told."""
        try:
            return await work
        except ServerError as error:
            self.failed = True
            say(f"bench.policies: {contender.name} is left as it is: {error}")
            return None

    def _over(self, until: float) -> bool:
        return self.interrupted.is_set() or time.monotonic() >= until

    def _left(self, comparison: Comparison, race: Race) -> bool:
        """True if the contender's search has not ended yet, by what is kept from before."""
        return self._first(comparison, race.contender) is None or self._next_unmeasured(race) is not None

    def _first(self, comparison: Comparison, contender: Contender) -> float | None:
        """The first rate, as given or as an earlier life of the comparison has found it."""
        if self.options.start is not None:
            return self.options.start
        kept = self.ledger.notes.get(_note(comparison, contender))
        return float(kept) if kept is not None else None

    def _note_first(self, comparison: Comparison, contender: Contender, answered: float) -> float:
        """The same, kept where it has only now been found."""
        first = self._first(comparison, contender)
        if first is None:
            first = on_grid(self.options.first_share * answered, self.options.growth)
            self.ledger.note(_note(comparison, contender), first)
        return first


def _note(comparison: Comparison, contender: Contender) -> str:
    return f"start of {comparison.case}, {contender.identity}"


def on_grid(rate: float, growth: float) -> float:
    """The nearest power of `growth`, to four digits, so that searches that begin elsewhere come to the same rates."""
    return float(f"{growth ** round(math.log(rate, growth)):.4g}")
