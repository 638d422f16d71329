"""How loaded the workers of a list are, kept between requests, and which of them are loaded least.

Pure. What a request asks for, beside its tokens, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from router.candidate import Candidate
from router.kept import changed_places

SLOW_LOAD = 0.25  # of its room, that a slow worker is ranked by as if it were taken


class WorkerLoads:
    """Of the workers of one list, in its order."""

    def __init__(self, workers: Sequence[Candidate]):
        self._workers = list(workers)
        self._loads = list(map(_load, workers))
        self._least_device = min((worker.device_tokens for worker in workers), default=0)

    def follow(self, workers: Sequence[Candidate]) -> bool:
        """Read those that have changed; False where it is not the same workers any more."""
        known = self._workers
        if len(workers) != len(known):
            return False
        for place in changed_places(workers, known):
            worker, before = workers[place], known[place]
            if worker.instance != before.instance or worker.device_tokens != before.device_tokens:
                return False
            known[place], self._loads[place] = worker, _load(worker)
        return True

    def least(self, tokens: int) -> list[Candidate]:
        """Those loaded least, of the ones whose device holds more than so many tokens; of all, where none does."""
        if tokens < self._least_device:
            workers, loads = self._workers, self._loads
        else:
            workers = [worker for worker in self._workers if tokens < worker.device_tokens] or self._workers
            loads = list(map(_load, workers))
        if not workers:
            return []
        least = min(loads)
        return list(compress(workers, map(least.__eq__, loads)))


def _load(worker: Candidate) -> float:
    return worker.load + SLOW_LOAD if worker.slow else worker.load
