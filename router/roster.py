"""Who may take a request at all, kept between requests: what router.policy says, of hundreds of whom few have changed.

Pure. The lists that it gives are not to be changed, and never change themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.candidate import Candidate
from router.generations import Offer, Reach, offer
from router.kept import changed_places
from router.policy import Demand, able_to_decode, able_to_prefill


class Roster:
    """Of the workers of one list."""

    def __init__(self, workers: Sequence[Candidate]):
        self._workers = workers
        staying = [(place, worker) for place, worker in enumerate(workers) if not worker.draining]
        self._decoding = _Places([place for place, worker in staying if worker.decodes], workers)
        self._prefilling = _Places([place for place, worker in staying if worker.prefills], workers)
        self._one_generation = len({worker.generation for worker in workers}) <= 1
        self._shortest = min((worker.max_model_len for _, worker in staying), default=0)

    def follow(self, workers: Sequence[Candidate]) -> bool:
        """Read those that have changed; False where it is not the same workers any more."""
        known = self._workers
        if workers is known:
            return True
        if len(workers) != len(known):
            return False
        changed = changed_places(workers, known)
        if not all(_alike(workers[place], known[place]) for place in changed):
            return False
        self._workers = workers
        self._decoding.follow(changed, workers)
        self._prefilling.follow(changed, workers)
        return True

    def to_decode(self, demand: Demand) -> Sequence[Candidate]:
        """As able_to_decode."""
        if demand.build is None and demand.tokens < self._shortest:
            return self._decoding.workers
        return able_to_decode(demand, self._workers)

    def to_prefill(self, demand: Demand) -> Sequence[Candidate]:
        """As able_to_prefill, where none is to be avoided."""
        if demand.build is None and demand.tokens < self._shortest:
            return self._prefilling.workers
        return able_to_prefill(demand, self._workers)

    def offer(self, demand: Demand, reach: Reach, now: float, left: str = "") -> Offer:
        """As router.generations.offer, of those able: most of the time there is but one generation."""
        able, prefills, workers = self.to_decode(demand), self.to_prefill(demand), self._workers
        if self._one_generation:
            return Offer(reach.decoders(able, workers, now), prefills)
        return offer(demand, able, prefills, workers, reach, now, left)


class _Places:
    """Some workers of a list, by where they are in it."""

    def __init__(self, places: Sequence[int], workers: Sequence[Candidate]):
        self.workers = [workers[place] for place in places]
        self._at = {place: at for at, place in enumerate(places)}

    def follow(self, changed: Sequence[int], workers: Sequence[Candidate]) -> None:
        """In a new list, since the one before may still be in use."""
        listed = self.workers.copy()
        for place in changed:
            if place in self._at:
                listed[self._at[place]] = workers[place]
        self.workers = listed


def _alike(worker: Candidate, before: Candidate) -> bool:
    """True if it may take the same requests as before."""
    return (
        worker.instance == before.instance
        and worker.decodes == before.decodes
        and worker.prefills == before.prefills
        and worker.draining == before.draining
        and worker.generation == before.generation
        and worker.max_model_len == before.max_model_len
    )
