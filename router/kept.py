"""What has been made of a list of workers, kept between requests: most of hundreds have not changed since the last.

Pure. What is made of them is not known here, only that it can follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import is_not
from typing import Generic, Protocol, TypeVar

from router.candidate import Candidate

MOST_KEPT = 4  # lists of workers: of those that decode, of those that prefill, the same of another generation


class Followed(Protocol):
    """Made of a list of workers."""

    def follow(self, workers: Sequence[Candidate]) -> bool:
        """Read those that have changed; False where it is not the same workers any more."""


F = TypeVar("F", bound=Followed)


class Kept(Generic[F]):
    """What was made of the lists that were asked for last."""

    def __init__(self, make: Callable[[Sequence[Candidate]], F]) -> None:
        self._make = make
        self._kept: dict[tuple[str, str, int], F] = {}  # the ones used last at the end

    def of(self, workers: Sequence[Candidate]) -> F:
        if not workers:
            return self._make(workers)
        key = workers[0].instance, workers[-1].instance, len(workers)
        found = self._kept.pop(key, None)
        if found is None or not found.follow(workers):
            found = self._make(workers)
        self._kept[key] = found
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return found


def changed_places(workers: Sequence[Candidate], known: Sequence[Candidate]) -> list[int]:
    """Where the workers of one list are others, or have changed, in another of its length."""
    return list(compress(count(), map(is_not, workers, known)))
