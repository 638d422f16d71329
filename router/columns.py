"""The few workers of hundreds whose placements are worth predicting, from numbers kept between requests.

What router.shortlist says, for the same workers and to the last bit. A worker's numbers are read when it has changed:
most have not since the request before, and their objects are long out of the caches. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress

from router.candidate import Candidate
from router.kept import Kept, changed_places
from router.policy import Demand

SAMPLED = 4  # one number in so many is looked at first


class WorkerColumns:
    """Of the workers of one list. `known` is False while one of them has no cost of its own.

    Numbers are kept apart for those that prefill and for the others, each in the order of the list.
    """

    def __init__(self, workers: Sequence[Candidate]):
        self.workers = list(workers)
        self.places = {worker.instance: place for place, worker in enumerate(workers)}
        self.prefilling = [place for place, worker in enumerate(workers) if worker.prefills]
        self.others = [place for place, worker in enumerate(workers) if not worker.prefills]
        self.all_decode = all(worker.decodes for worker in workers)
        self.known = all(worker.cost is not None for worker in workers)
        self.least_device = min((worker.device_tokens for worker in workers), default=0)
        self._slots = [0] * len(workers)  # where the numbers are of the one at a place
        for places in (self.prefilling, self.others):
            for slot, place in enumerate(places):
                self._slots[place] = slot
        prefilling = [workers[place] for place in self.prefilling]
        self._left_at = array("d", [worker.prompts_left_at for worker in prefilling])
        self._token = array("d", [worker.token_seconds for worker in prefilling])
        self._step = array("d", [worker.step_seconds for worker in prefilling])
        self._room = bytearray(worker.load < 1.0 for worker in prefilling)
        self._others_step = array("d", [workers[place].step_seconds for place in self.others])
        self._others_room = bytearray(workers[place].load < 1.0 for place in self.others)

    def follow(self, workers: Sequence[Candidate]) -> bool:
        """Read those that have changed; False where it is not the same workers any more."""
        known = self.workers
        if len(workers) != len(known):
            return False
        for place in changed_places(workers, known):
            worker, slot = workers[place], self._slots[place]
            if not _alike(worker, known[place]):
                return False
            known[place] = worker
            if worker.prefills:
                self._left_at[slot], self._step[slot] = worker.prompts_left_at, worker.step_seconds
                self._token[slot], self._room[slot] = worker.token_seconds, worker.load < 1.0
            else:
                self._others_step[slot], self._others_room[slot] = worker.step_seconds, worker.load < 1.0
        return True

    def holds(self, worker: Candidate) -> bool:
        """True if this worker, as it is now, is one of them."""
        place = self.places.get(worker.instance)
        return place is not None and self.workers[place] is worker

    def roomy(self, demand: Demand) -> bool:
        """True if every worker's device holds the whole text, and some have room: those are the ones to look at."""
        return demand.tokens < self.least_device and (1 in self._room or 1 in self._others_room)

    def prompts(self, demand: Demand, now: float, most: int) -> list[Candidate]:
        """As quickest_prompts, of those that prefill."""
        tokens = float(demand.tokens)  # floats multiply in half the time
        left_at, each = self._left_at, self._token
        seconds = [
            left - now + token * tokens if left > now else token * tokens
            for left, token in zip(left_at, each, strict=True)
        ]
        for slot, cached in self._cached(demand):
            left = left_at[slot]
            seconds[slot] = (left - now if left > now else 0.0) + each[slot] * (tokens - cached)
        return [self.workers[self.prefilling[slot]] for slot in least(seconds, most)]

    def steps(self, most: int) -> list[Candidate]:
        """As quickest_steps, of those that have room and only decode."""
        return [self.workers[self.others[slot]] for slot in least(self._others_step, most, self._others_room)]

    def texts(self, demand: Demand, now: float, most: int) -> list[Candidate]:
        """As quickest_texts, of those that have room and prefill."""
        tokens, output, steps = float(demand.tokens), float(demand.output), self._step
        left_at, each = self._left_at, self._token
        seconds = [
            (left - now + token * tokens if left > now else token * tokens) + output * step
            for left, token, step in zip(left_at, each, steps, strict=True)
        ]
        for slot, cached in self._cached(demand):
            left = left_at[slot]
            first = (left - now if left > now else 0.0) + each[slot] * (tokens - cached)
            seconds[slot] = first + output * steps[slot]
        return [self.workers[self.prefilling[slot]] for slot in least(seconds, most, self._room)]

    def _cached(self, demand: Demand) -> list[tuple[int, int]]:
        """Of those that prefill and hold leading tokens: where their numbers are, and how many tokens."""
        places, workers, slots = self.places, self.workers, self._slots
        found = [(places[each], cached) for each, cached in demand.cached.items() if each in places]
        return [(slots[place], cached) for place, cached in found if workers[place].prefills]


def _alike(worker: Candidate, before: Candidate) -> bool:
    """True if nothing has changed that columns are not made for."""
    return (
        worker.instance == before.instance
        and worker.prefills == before.prefills
        and worker.decodes == before.decodes
        and worker.device_tokens == before.device_tokens
        and (worker.cost is None) == (before.cost is None)
    )


def least(numbers: Sequence[float], most: int, wanted: bytearray | None = None) -> list[int]:
    """Where the least few are, in order, of equal ones the first; of those alone that are `wanted`, if it is given.

    Sorting them all takes longer than finding one beyond which none of the least can be: that of as many, of some.
    """
    places: Sequence[int] = range(len(numbers))
    if wanted is not None and 0 in wanted:
        places = list(compress(places, wanted))
    elif len(numbers) > 2 * SAMPLED * most > 0:
        bound = sorted(numbers[::SAMPLED])[most - 1]
        places = [place for place, number in enumerate(numbers) if number <= bound]
    return sorted(places, key=numbers.__getitem__)[:most]


class KeptColumns(Kept[WorkerColumns]):
    """The columns of the lists of workers that were asked for last."""

    def __init__(self) -> None:
        super().__init__(WorkerColumns)
