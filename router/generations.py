"""Generations: sets of workers that hand KV to each other, of which a roll has an old and a new one side by side.

Pure. It says which of them may be given new requests, and in what share; which of their workers is not its matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import log
from operator import attrgetter
from typing import Protocol

from router.candidate import Candidate
from router.policy import Demand, FleetView


@dataclass(frozen=True, slots=True)
class Generation:
    """Ready workers by what they do; a mixed one does both. `share` is of the new requests, 0 while one is missing."""

    prefills: int
    decodes: int
    share: float = 0.0

    @property
    def complete(self) -> bool:
        return self.prefills > 0 and self.decodes > 0


def generations_of(decodes: Iterable[Candidate], prefills: Iterable[Candidate]) -> dict[str, Generation]:
    """Those of these workers, by name.

    A complete one is as large as its scarcer role: n(role) over the most that any complete one has of that role,
    whichever role is less. Shares are in proportion to that, and 1 in sum, so that a single new decode worker gets no
    more than each old one.
    """
    decoding, prefilling = (Counter(map(attrgetter("generation"), workers)) for workers in (decodes, prefills))
    found = {name: Generation(prefilling[name], decoding[name]) for name in sorted({*decoding, *prefilling})}
    whole = [generation for generation in found.values() if generation.complete]
    most_prefills = max((generation.prefills for generation in whole), default=1)
    most_decodes = max((generation.decodes for generation in whole), default=1)
    sizes = {
        name: min(generation.prefills / most_prefills, generation.decodes / most_decodes)
        for name, generation in found.items()
        if generation.complete
    }
    total = sum(sizes.values())
    return {
        name: Generation(generation.prefills, generation.decodes, sizes[name] / total if name in sizes else 0.0)
        for name, generation in found.items()
    }


def home_of(key: str, generations: Mapping[str, Generation]) -> str | None:
    """The generation of a request: equal keys have the same one while shares stand; None where none is complete.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", 2005): as a share
    grows, requests move to it and from nowhere else.
    """

    def draw(name: str) -> float:
        number = int.from_bytes(blake2b(f"{key}\0{name}".encode(), digest_size=8).digest(), "big")
        return -log((number + 1) / (2**64 + 1)) / generations[name].share

    return min((name for name, generation in generations.items() if generation.complete), key=draw, default=None)


class Reach(Protocol):
    """Which workers can be relied on (router.trust)."""

    def decoders(self, able: Sequence[Candidate], workers: Sequence[Candidate], now: float) -> list[Candidate]: ...
    def prefillers(self, able: Sequence[Candidate], now: float) -> list[Candidate]: ...


@dataclass(frozen=True, slots=True)
class Offer:
    """Workers that a request may be given to: those of `home`, and if they have no room, the others.

    `home` is None where there is but one generation, or none is complete.
    """

    decodes: Sequence[Candidate]
    prefills: Sequence[Candidate]
    home: str | None = None


def offer(
    demand: Demand,
    able: Sequence[Candidate],
    prefills: Sequence[Candidate],
    workers: Sequence[Candidate],
    reach: Reach,
    now: float,
    left: str = "",
) -> Offer:
    """Of the workers able to decode and to prefill. While a generation is complete, no other gets anything.

    A text that has begun stays in its generation while that is complete, and then goes to another of its fingerprint,
    where it is computed anew. One that has not is at home in `left`, where it has failed, only if no other is complete.
    Where none is complete, everyone who is able is offered: waiting there is all there is.
    """
    decodes = reach.decoders(able, workers, now)
    both = able if prefills == able else [*able, *prefills]  # the same workers, where all are mixed
    if len(set(map(attrgetter("generation"), both))) <= 1:
        return Offer(decodes, prefills)
    found = generations_of(decodes, reach.prefillers(prefills, now))
    if not any(generation.complete for generation in found.values()):
        found = generations_of(able, prefills)  # those in trouble, but whole, are better than a half
        whole = [worker for worker in able if found[worker.generation].complete]
        decodes = reach.decoders(whole, workers, now) if whole else decodes
    home = _home(demand, found, left)
    if home is None:
        return Offer(decodes, prefills)
    return Offer(_of_complete(decodes, found), _of_complete(prefills, found), home)


def offer_prefills(demand: Demand, view: FleetView, workers: Sequence[Candidate], left: str = "") -> list[FleetView]:
    """The views for a request that needs no decode, to be tried in turn: its home's prefill workers, all that may.

    Where no generation is complete, or there is but one, that is the view it came with.
    """
    if len(set(map(attrgetter("generation"), view.prefill))) <= 1:
        return [view]
    decodes = [worker for worker in workers if worker.decodes and not worker.status.draining]
    found = generations_of(decodes, view.prefill)
    home = _home(demand, found, left)
    if home is None:
        return [view]
    return [view.of_generation(home), replace(view, prefill=_of_complete(view.prefill, found))]


def _of_complete(workers: Sequence[Candidate], generations: Mapping[str, Generation]) -> Sequence[Candidate]:
    """Those of complete generations. One in trouble may be the last of its own, which is not among these then."""
    whole = {name for name, generation in generations.items() if generation.complete}
    return [worker for worker in workers if worker.generation in whole]


def _home(demand: Demand, generations: Mapping[str, Generation], left: str = "") -> str | None:
    if demand.build is not None:
        begun = generations.get(demand.build.generation)
        if begun is not None and begun.complete:
            return demand.build.generation
    key = demand.session or f"{demand.salt:08x}"
    others = {name: generation for name, generation in generations.items() if name != left}
    return home_of(key, others) or home_of(key, generations)


def ready_workers(workers: Collection[Candidate], reach: Reach, now: float) -> dict[str, Generation]:
    """The generations of all workers that stay, whatever a request asks for."""
    staying = [worker for worker in workers if not worker.status.draining]
    decodes = reach.decoders([worker for worker in staying if worker.decodes], staying, now)
    return generations_of(decodes, reach.prefillers([worker for worker in staying if worker.prefills], now))


def pairs_of(workers: Iterable[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """The prefill and decode workers that a request may be given to together; a mixed worker is a pair of its own."""
    staying = [worker for worker in workers if not worker.status.draining]
    prefills: dict[str, list[Candidate]] = {}
    for worker in staying:
        if worker.prefills:
            prefills.setdefault(worker.generation, []).append(worker)
    for decode in staying:
        if decode.decodes:
            for prefill in [decode] if decode.prefills else prefills.get(decode.generation, ()):
                yield prefill, decode
