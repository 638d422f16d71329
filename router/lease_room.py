"""Whom a request that looks for room need not ask: workers that have just refused, and workers kept for another.

Pure; what workers answered comes in. It opens nothing, and knows neither queues nor policies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.candidate import AGE, Candidate
from router.policy import Decision, Demand, FleetView
from router.request_state import RequestState
from serving.errors import MillraceError, NoRoom
from serving.messages import TPOT_BINS_MS

MOST_ASKED = 8  # workers that one look asks in vain; where there are no more, all of them are asked each time
MOST_REMEMBERED = 4096  # workers that have refused
MOST_OVERTAKEN = 32  # smaller requests of its kind that may find room before one that came earlier
WAIT_SHARE = 0.25  # of its TTFT objective that a request waits for a better worker at most
WORSE = 0.1  # of a request's weight: a placement whose score is so much worse is waited for rather than left
KEPT_SHARE = 4  # one in so many workers is kept for such requests at most, or one


@dataclass(slots=True)
class RoomSearch:
    """A request on its way to a place; `full` as workers were found at its last look, None before it has looked."""

    single: bool  # a single token is wanted
    full: bool | None = None
    overtaken: int = 0  # as its ticket says
    best: float | None = None  # the score of the best placement whose worker's steps were full at this look

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A worker is asked: should patience end before it answers, it has not been shown to have room."""
        before, self.full = self.full, True
        try:
            yield
        except MillraceError:
            self.full = before
            raise

    def refused(self, decision: Decision, error: NoRoom) -> None:
        """The decision's worker had no room."""
        self.full = True
        if error.code == "tpot" and self.best is None and decision.considered:
            self.best = decision.considered[0].score

    def waits(self, decision: Decision, demand: Demand) -> bool:
        """True if it waits for the worker whose steps are full just now rather than take this, which is much worse.

        Steps have room again in less than a text's time. It waits for WAIT_SHARE of its TTFT objective at most, and one
        without takes what there is.
        """
        left, objective = demand.first_token_in, demand.slo.ttft_ms
        if self.best is None or left is None or objective is None or not decision.considered:
            return False
        if left * 1e3 < (1.0 - WAIT_SHARE) * objective:
            return False
        score = decision.considered[0].score
        return score is not None and self.best - score > WORSE * demand.weight


@dataclass(frozen=True, slots=True)
class RoomLook:
    """Whom a request may ask; `full` if some who could hold it are not among them, `all_full` if none is open.

    Where there are several generations `view` is of the request's own, and `wider` of all that may take it.
    """

    demand: Demand
    view: FleetView
    full: bool
    all_full: bool
    wider: FleetView | None = None


@dataclass(slots=True)
class _Refused:
    """What a worker has refused since a heartbeat: the fewest tokens, by what was wanting, pressing ones and others."""

    heard: float
    least: dict[tuple[int | None, bool], tuple[int, int]] = field(default_factory=dict)  # tokens, and priority


class LeaseRoom:
    """Which of the workers that could hold a request it asks: to ask hundreds that are full costs more than it brings.

    Those that are full are left out, those kept for others, and where there are many, those that have just refused.
    """

    def __init__(self) -> None:
        self.full = FullWorkers()
        self.kept = KeptWorkers()

    def to_ask(self, state: RequestState, able: Sequence[Candidate], overtaken: int, now: float) -> list[Candidate]:
        """Of those able to decode. `overtaken`: so many smaller requests that came later have found room before it.

        One that is not pressing finds no room where others do.
        """
        room = [worker for worker in able if not worker.full]
        if overtaken >= MOST_OVERTAKEN:
            self.kept.keep(state, able)
        if len(self.kept):
            room = [worker for worker in room if not self.kept.bars(worker.status.instance, state, now)]
        if len(room) <= MOST_ASKED or not len(self.full):
            return room
        asked = tpot_bin(state), state.tokens, state.pressing(now), state.request.priority
        return [each for each in room if not self.full.refuses(each.status.instance, each.made_at, *asked)]

    def refused(self, worker: Candidate, state: RequestState, error: NoRoom, *, pressing: bool = True) -> None:
        """The worker had no room for the request, which was `pressing` or not."""
        bin_ = tpot_bin(state) if error.code == "tpot" else None
        asked = bin_, state.tokens, pressing, state.request.priority
        self.full.refused(worker.status.instance, worker.made_at, *asked)

    def forget(self, instance: str) -> None:
        """A lease there has ended."""
        self.full.forget(instance)

    def release(self, state: RequestState) -> bool:
        """It looks no more; True if a worker was kept for it."""
        return self.kept.release(state)


class FullWorkers:
    """Leases that were refused for want of room, by the worker's instance: until its next heartbeat, or a lease's end.

    `heard` is when that heartbeat was made. `bin` is that of the TPOT objective where steps would become too long,
    None where blocks or sequences were wanting.
    """

    def __init__(self) -> None:
        self._refused: dict[str, _Refused] = {}

    def __len__(self) -> int:
        return len(self._refused)

    def refused(
        self, instance: str, heard: float, bin_: int | None, tokens: int, pressing: bool = True, priority: int = 0
    ) -> None:
        """It had no room for so many tokens of a request of this priority, which was `pressing` or not."""
        known = self._refused.get(instance)
        if known is None or known.heard != heard:
            known = self._refused[instance] = _Refused(heard)
            if len(self._refused) > MOST_REMEMBERED:
                del self._refused[next(iter(self._refused))]  # long gone, or soon known again
        least, most_important = known.least.get((bin_, pressing), (tokens, priority))
        known.least[bin_, pressing] = min(tokens, least), min(priority, most_important)

    def refuses(
        self, instance: str, heard: float, bin_: int | None, tokens: int, pressing: bool = True, priority: int = 0
    ) -> bool:
        """True if it has refused as much since it was heard, as important, and pressing where this request is."""
        known = self._refused.get(instance)
        if known is None:
            return False
        if known.heard != heard:
            del self._refused[instance]
            return False
        ways = [(wanting, was) for wanting in {None, bin_} for was in {True, pressing}]
        found = [known.least[way] for way in ways if way in known.least]
        return any(tokens >= least and priority >= most_important for least, most_important in found)

    def forget(self, instance: str) -> None:
        """It may have room again, or is gone."""
        self._refused.pop(instance, None)


class KeptWorkers:
    """Workers whose room is kept for a request that smaller ones have overtaken too often, by instance.

    Only what is more important goes there meanwhile, and texts that have begun: as the others end, its room comes.
    """

    def __init__(self) -> None:
        self._kept: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, state: RequestState, able: Sequence[Candidate]) -> None:
        """Keep the one of `able` that has the most room, unless one of them is kept for it already."""
        instances = {worker.status.instance for worker in able}
        mine = next((instance for instance, other in self._kept.items() if other is state), None)
        if mine in instances:
            return
        self.release(state)
        free = [worker for worker in able if worker.status.instance not in self._kept]
        if free and len(self._kept) < max(1, len(able) // KEPT_SHARE):
            self._kept[max(free, key=lambda worker: worker.free_tokens).status.instance] = state

    def release(self, state: RequestState) -> bool:
        """It has its place, or has given up; True if a worker was kept for it."""
        mine = [instance for instance, other in self._kept.items() if other is state]
        for instance in mine:
            del self._kept[instance]
        return bool(mine)

    def bars(self, instance: str, state: RequestState, now: float) -> bool:
        """True if the worker is kept for another request that is no less important.

        What is kept for a late one others as important may have who are pressing, for as long as late ones give them
        their room (decode.giving_way).
        """
        other = self._kept.get(instance)
        if other is None or other is state or state.generated:
            return False
        own, kept = state.request.priority, other.request.priority
        left = other.first_token_in(now)
        gives_way = other.late(now) and left is not None and left > -AGE
        return own > kept or (own == kept and not (gives_way and state.pressing(now)))


def tpot_bin(state: RequestState) -> int | None:
    """The bin of TPOT_BINS_MS that its objective is in; None without one."""
    tpot_ms = state.request.slo.tpot_ms
    return bisect_left(TPOT_BINS_MS, tpot_ms) if tpot_ms is not None else None
