"""The few workers of hundreds whose placements are worth predicting, from numbers kept between requests.

What router.shortlist says, for the same workers and to the last bit. A worker's numbers are read when it has changed:
most have not since the request before, and their objects are long out of the caches. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress, count
from operator import is_not

from router.candidate import Candidate
from router.policy import Demand

MOST_KEPT = 4  # lists of workers: of those that decode, of those that prefill, the same of another generation


class WorkerColumns:
    """Of the workers of one list, by their places in it. `known` is False while one of them has no cost of its own."""

    def __init__(self, workers: Sequence[Candidate]):
        self.workers = list(workers)
        self.places = {worker.instance: place for place, worker in enumerate(workers)}
        self.prefilling = [place for place, worker in enumerate(workers) if worker.prefills]
        self.others = [place for place, worker in enumerate(workers) if not worker.prefills]
        self.all_decode = all(worker.decodes for worker in workers)
        self.known = all(worker.cost is not None for worker in workers)
        self.least_device = min((worker.device_tokens for worker in workers), default=0)
        self._left_at = array("d", [worker.prompts_left_at for worker in workers])
        self._token = array("d", [worker.token_seconds for worker in workers])
        self._step = array("d", [worker.step_seconds for worker in workers])
        self._room = bytearray(worker.load < 1.0 for worker in workers)

    def follow(self, workers: Sequence[Candidate]) -> bool:
        """Read those that have changed; False where it is not the same workers any more."""
        known = self.workers
        if len(workers) != len(known):
            return False
        for place in list(compress(count(), map(is_not, workers, known))):
            worker, before = workers[place], known[place]
            if not _alike(worker, before):
                return False
            known[place] = worker
            self._left_at[place], self._step[place] = worker.prompts_left_at, worker.step_seconds
            self._token[place], self._room[place] = worker.token_seconds, worker.load < 1.0
        return True

    def holds(self, worker: Candidate) -> bool:
        """True if this worker, as it is now, is one of them."""
        place = self.places.get(worker.instance)
        return place is not None and self.workers[place] is worker

    def roomy(self, demand: Demand) -> bool:
        """True if every worker's device holds the whole text, and some have room: those are the ones to look at."""
        return demand.tokens < self.least_device and 1 in self._room

    def prompts(self, demand: Demand, now: float, most: int) -> list[Candidate]:
        """As quickest_prompts, of all."""
        tokens, left_at, each = demand.tokens, self._left_at, self._token
        seconds = [
            (left - now if left > now else 0.0) + token * tokens for left, token in zip(left_at, each, strict=True)
        ]
        for place, cached in self._cached(demand):
            left = left_at[place]
            seconds[place] = (left - now if left > now else 0.0) + each[place] * (tokens - cached)
        return self._least(range(len(seconds)), seconds, most)

    def steps(self, most: int) -> list[Candidate]:
        """As quickest_steps, of those that have room and only decode."""
        return self._least(self._with_room(self.others), self._step, most)

    def texts(self, demand: Demand, now: float, most: int) -> list[Candidate]:
        """As quickest_texts, of those that have room and prefill."""
        tokens, output, left_at, each, steps = demand.tokens, demand.output, self._left_at, self._token, self._step
        seconds = [
            (left - now if left > now else 0.0) + token * tokens + output * step
            for left, token, step in zip(left_at, each, steps, strict=True)
        ]
        for place, cached in self._cached(demand):
            left = left_at[place]
            first = (left - now if left > now else 0.0) + each[place] * (tokens - cached)
            seconds[place] = first + output * steps[place]
        return self._least(self._with_room(self.prefilling), seconds, most)

    def _cached(self, demand: Demand) -> list[tuple[int, int]]:
        """The places of those that hold leading tokens, and how many."""
        places = self.places
        return [(places[each], cached) for each, cached in demand.cached.items() if each in places]

    def _with_room(self, places: Sequence[int]) -> Sequence[int]:
        room = self._room
        return [place for place in places if room[place]] if 0 in room else places

    def _least(self, places: Sequence[int], seconds: Sequence[float], most: int) -> list[Candidate]:
        """Of equal ones the first."""
        return [self.workers[place] for place in sorted(places, key=seconds.__getitem__)[:most]]


def _alike(worker: Candidate, before: Candidate) -> bool:
    """True if nothing has changed that columns are not made for."""
    return (
        worker.instance == before.instance
        and worker.prefills == before.prefills
        and worker.decodes == before.decodes
        and worker.device_tokens == before.device_tokens
        and (worker.cost is None) == (before.cost is None)
    )


class KeptColumns:
    """The columns of the lists of workers that were asked for last."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, int], WorkerColumns] = {}  # the ones used last at the end

    def of(self, workers: Sequence[Candidate]) -> WorkerColumns:
        if not workers:
            return WorkerColumns(workers)
        key = workers[0].instance, workers[-1].instance, len(workers)
        found = self._kept.pop(key, None)
        if found is None or not found.follow(workers):
            found = WorkerColumns(workers)
        self._kept[key] = found
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return found
