"""Which workers take a request: the rules about who may at all, and the policies that choose among those.

Pure: what is known of the workers comes in, a decision goes out. No torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, repeat
from math import inf
from operator import is_
from typing import ClassVar, Protocol
from zlib import crc32

from router.candidate import Candidate
from router.kept import Kept
from router.loads import SLOW_LOAD, WorkerLoads
from router.predict import Prediction
from serving.messages import Build, Slo

SLOW_FACTOR = 2.0  # that work weighs at a slow worker
IN_USE_WEIGHT = 1 / 8  # of a token of KV in use, which every decode step reads, against a prompt token to compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of workers. `tokens` are its prompt and its output so far, `output` what it may still need.

    `build` is what wrote the output so far, None while there is none: a text stays with its `fingerprint`, prefill with
    its `pairing`. `cached` are tokens of the leading blocks that a worker holds already, by worker instance.
    """

    tokens: int
    output: int = 1  # tokens expected
    build: Build | None = None
    cached: Mapping[str, int] = field(default_factory=dict)
    slo: Slo = field(default_factory=Slo)
    first_token_in: float | None = None  # seconds left of the TTFT objective; None without one
    weight: float = 1.0  # of its service class
    priority: int = 0  # smaller goes first in a worker's queue
    session: str = ""  # requests that name the same one belong together
    salt: int = 0  # of the request: spreads near ties
    texts: tuple[str, ...] = ()  # kinds that its text is of (router.text_kinds)

    def uncached(self, worker: Candidate) -> int:
        """Tokens this worker would have to compute."""
        return self.tokens - self.cached.get(worker.status.instance, 0)

    def turn(self, now: float) -> tuple[int, float]:
        """What a worker orders its queue by (prefill.ordering): the priority, and when the first token is due.

        That is infinite without an objective.
        """
        return self.priority, inf if self.first_token_in is None else now + self.first_token_in

    def streams(self, worker: Candidate) -> bool:
        """True if the worker's device cannot hold all tokens: every step would read some KV from host memory."""
        return self.tokens >= worker.device_tokens


class KVLinks(Protocol):
    """What is known of the ways from prefill to decode workers, by their instances."""

    @property
    def untroubled(self) -> bool:
        """True if all are allowed: none need be asked about."""

    def allows(self, prefill: str, decode: str, now: float) -> bool:
        """False while handoffs between these two are known to fail."""

    def seconds(self, prefill: str, decode: str, tokens: int) -> float:
        """Between the first token and the end of the handoff of so many tokens' KV."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Who may take a request. `decode` is empty if no decode is asked for, or none is able.

    A mixed worker's prompts are computed by itself or by prefill workers, and by other mixed workers only where there
    is nothing else: two that wait for each other's blocks wait until one gives up.
    """

    decode: Sequence[Candidate]
    prefill: Sequence[Candidate]
    links: KVLinks

    def prefills_for(self, worker: Candidate, now: float) -> list[Candidate]:
        """Who may compute the prompt for a decode by this worker; over a broken link if no other leads there."""
        instance, generation = worker.instance, worker.generation
        pairing = [other for other in self.prefill if other.generation == generation]
        apart = [other for other in pairing if not other.decodes or other is worker] if worker.prefills else pairing
        if apart and self.links.untroubled:
            return apart
        able = [other for other in apart if other is worker or self.links.allows(other.instance, instance, now)]
        return able or apart or pairing

    def of_generation(self, generation: str) -> FleetView:
        """Only its workers."""
        decode = [worker for worker in self.decode if worker.generation == generation]
        return replace(self, decode=decode, prefill=[each for each in self.prefill if each.generation == generation])


@dataclass(slots=True)
class Considered:
    """A placement that was looked at. `score` is in requests within their objectives, None where none was computed."""

    prefill: str  # names of workers; empty: none
    decode: str
    predicted: Prediction | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes. `decode` is None if it needs none, `prefill` None while no worker can take the prompt.

    `reason` is a word for metrics; `considered` are the best placements that were looked at, the chosen one first.
    """

    decode: Candidate | None
    prefill: Candidate | None
    reason: str
    predicted: Prediction | None = None
    considered: tuple[Considered, ...] = ()
    texts: tuple[str, ...] = ()  # as in the demand

    @property
    def split(self) -> bool:
        """True if one worker computes the prompt and another decodes."""
        return self.prefill is not None and self.decode is not None and not self.mixed

    @property
    def mixed(self) -> bool:
        """True if one worker computes the prompt and decodes."""
        prefill, decode = self.prefill, self.decode
        return prefill is not None and decode is not None and prefill.instance == decode.instance


class Policy(Protocol):
    """Chooses among the workers of a view. None where no worker in it could decode, or compute the one token asked."""

    needs_prefixes: ClassVar[bool]  # True: the router follows the workers' KV events and fills in Demand.cached

    def choose(self, demand: Demand, view: FleetView, now: float) -> Decision | None: ...

    def observed(
        self,
        decision: Decision,
        *,
        ttft: float | None = None,
        tpot: float | None = None,
        step_tokens: float | None = None,
    ) -> None:
        """What came of a decision: seconds from it to the first token, or seconds for each token after that.

        `step_tokens` are those that each decode step has brought the request.
        """


class RankingPolicy:
    """A policy that ranks decode workers first, then those that may prefill for the best. It predicts nothing.

    A worker that prefills computes the prompts of its own leases: the handoff costs nothing.
    """

    needs_prefixes: ClassVar[bool] = False
    reason: ClassVar[str]

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        """Every worker once, best first."""
        raise NotImplementedError

    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        """Every worker once, best first."""
        raise NotImplementedError

    def best_decode(self, demand: Demand, workers: Sequence[Candidate]) -> Candidate | None:
        """The first of `decode_order`, if there is one."""
        return next(iter(self.decode_order(demand, workers)), None)

    def choose(self, demand: Demand, view: FleetView, now: float) -> Decision | None:
        if (best := self.best_decode(demand, view.decode)) is None:
            prefills = self.prefill_order(demand, view.prefill)
            return self._decision(None, prefills) if prefills and not view.decode else None
        if best.prefills and any(map(is_, view.prefill, repeat(best))):
            return self._decision(best, [best])
        able = view.prefills_for(best, now)
        own = [worker for worker in able if worker.instance == best.instance]
        return self._decision(best, own or self.prefill_order(demand, able))

    def observed(
        self,
        decision: Decision,
        *,
        ttft: float | None = None,
        tpot: float | None = None,
        step_tokens: float | None = None,
    ) -> None:
        """Nothing was predicted."""

    def _decision(self, decode: Candidate | None, prefills: Sequence[Candidate]) -> Decision:
        return Decision(decode, prefills[0] if prefills else None, self.reason)


class LeastLoaded(RankingPolicy):
    """Decode where the smallest share of sequences and KV is taken, prefill where the fewest tokens wait."""

    reason = "least_loaded"

    def __init__(self) -> None:
        self._loads = Kept(WorkerLoads)

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        def cost(worker: Candidate) -> tuple[bool, float, int]:
            return demand.streams(worker), worker.load + SLOW_LOAD * worker.slow, spread(demand, worker)

        return sorted(workers, key=cost)

    def best_decode(self, demand: Demand, workers: Sequence[Candidate]) -> Candidate | None:
        """Only those that are loaded alike are told apart by the request, and there may be hundreds."""
        tied = self._loads.of(workers).least(demand.tokens)
        return min(tied, key=lambda worker: spread(demand, worker), default=None)

    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        def cost(worker: Candidate) -> tuple[bool, float, int]:
            work = (worker.queued_tokens + demand.tokens) * pace(worker)
            return demand.streams(worker), work, spread(demand, worker)

        return sorted(workers, key=cost)


class RoundRobin(RankingPolicy):
    """Every worker in turn, by name: the baseline that knows nothing but who is there and who is full."""

    reason = "round_robin"

    def __init__(self) -> None:
        self._decodes = count()
        self._prefills = count()

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        return self._turned(demand, workers, next(self._decodes))

    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        return self._turned(demand, workers, next(self._prefills))

    def _turned(self, demand: Demand, workers: Sequence[Candidate], turn: int) -> list[Candidate]:
        ordered = sorted(workers, key=lambda worker: worker.status.name)
        first = turn % len(ordered) if ordered else 0
        passed = bool(ordered) and turn // len(ordered) % 2 == 1  # a slow one is passed over every other time round

        def rank(worker: Candidate) -> tuple[bool, bool, bool]:
            return demand.streams(worker), worker.load >= 1.0, worker.slow and passed

        return sorted(ordered[first:] + ordered[:first], key=rank)


class SessionSticky(LeastLoaded):
    """The requests of a session go to one worker while that has room, by rendezvous hashing; others as least loaded.

    Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996): a worker that comes or goes moves only
    the sessions it takes or had.
    """

    reason = "session_sticky"
    best_decode = RankingPolicy.best_decode

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        order = super().decode_order(demand, workers)
        return self._stuck(demand, order, lambda worker: worker.load >= 1.0)

    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        return self._stuck(demand, super().prefill_order(demand, workers), lambda worker: False)

    def _stuck(self, demand: Demand, order: list[Candidate], full: Callable[[Candidate], bool]) -> list[Candidate]:
        if not demand.session:
            return order
        return sorted(
            order, key=lambda w: (demand.streams(w), full(w), -crc32(f"{demand.session} {w.status.name}".encode()))
        )


class PrefixAware(RankingPolicy):
    """The worker that has the least to compute before the first token: its queue and the tokens it has not cached.

    A worker that decodes much is charged for the KV its steps read, so that one popular prefix does not draw every
    request to one worker. The form of the cost is that of NVIDIA Dynamo's KV router (prefill blocks to compute plus
    active decode blocks), in tokens.
    """

    needs_prefixes: ClassVar[bool] = True
    reason = "prefix_aware"

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        def cost(worker: Candidate) -> tuple[bool, bool, float, float, int]:
            work = demand.uncached(worker) + worker.queued_tokens + IN_USE_WEIGHT * worker.kv_tokens_in_use
            return demand.streams(worker), worker.load >= 1.0, work * pace(worker), worker.load, spread(demand, worker)

        return sorted(workers, key=cost)

    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        def cost(worker: Candidate) -> tuple[bool, float, int]:
            work = (demand.uncached(worker) + worker.queued_tokens) * pace(worker)
            return demand.streams(worker), work, spread(demand, worker)

        return sorted(workers, key=cost)


def pace(worker: Candidate) -> float:
    """What a worker's work is multiplied by, where policies do not know how long it takes."""
    return SLOW_FACTOR if worker.slow else 1.0


def spread(demand: Demand, worker: Candidate) -> int:
    """Tells equal workers apart, for each request otherwise: several routers do not all choose the same one."""
    return ((demand.salt ^ worker.tag) * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF) >> 20


# ---- who may take a request at all, whatever the policy --------------------------------------------------------


def able_to_decode(demand: Demand, workers: Iterable[Candidate]) -> list[Candidate]:
    """Workers that decode, do not drain, and are of the text's build. Those that can hold it, while there are some."""
    decoding = [worker for worker in workers if worker.decodes and not worker.draining]
    if demand.build is not None:
        decoding = [worker for worker in decoding if worker.status.fingerprint == demand.build.fingerprint]
    return _holding(demand.tokens, decoding)


def able_to_prefill(demand: Demand, workers: Iterable[Candidate], avoid: Collection[str] = ()) -> list[Candidate]:
    """Workers that prefill, do not drain, are of the build's weights and not to be avoided (by instance)."""
    prefilling = [each for each in workers if each.prefills and not each.draining and each.instance not in avoid]
    if demand.build is not None:
        prefilling = [worker for worker in prefilling if worker.status.pairing == demand.build.pairing]
    return _holding(demand.tokens, prefilling)


def view_for_prefill(
    demand: Demand,
    workers: Sequence[Candidate],
    links: KVLinks,
    own: Candidate | None,
    avoid: Collection[str],
    *,
    begun: bool,
) -> FleetView:
    """Who may compute the prompt of a lease at the worker `own`; None where the request needs no lease.

    A mixed worker computes the prompts of its own leases even while it drains (prefill.worker). A text that has `begun`
    and has outgrown all workers that prefill is computed by its decode worker, whatever its role.
    """
    able = able_to_prefill(demand, workers, avoid)
    if own is None:
        return FleetView((), able, links)
    able = [worker for worker in able if worker.generation == own.generation]
    staying = able or any(
        worker.prefills and worker.generation == own.generation and not worker.status.draining for worker in workers
    )
    last_resort = begun and (not staying or outgrown(demand, able))
    if own.status.instance not in avoid and (own.prefills or last_resort):
        able = [own] if last_resort else [own, *(worker for worker in able if worker is not own)]
    return FleetView((own,), able, links)


def split_only(view: FleetView, now: float) -> FleetView:
    """The view without placements in which a worker computes the prompt of its own decode, whatever the policy.

    A worker that can do both does what fewer can: it prefills where no other does, or else decodes. Where the view has
    mixed workers alone there is no such placement, and `decode` is empty. Who can do what is told for each generation.
    """
    names = dict.fromkeys(worker.generation for worker in (*view.decode, *view.prefill))
    if len(names) > 1:
        parts = [split_only(view.of_generation(name), now) for name in names]
        decode, prefill = ([*chain(*lists)] for lists in ([p.decode for p in parts], [p.prefill for p in parts]))
        return replace(view, decode=decode, prefill=prefill)
    prefill = [worker for worker in view.prefill if not worker.decodes]
    decode = [worker for worker in view.decode if not worker.prefills]
    if not prefill and decode:
        prefill = list(view.prefill)
    elif prefill:
        decode = decode + [worker for worker in view.decode if worker.prefills]
    apart = FleetView(decode, prefill, view.links)
    return replace(apart, decode=[worker for worker in decode if apart.prefills_for(worker, now)])


def outgrown(demand: Demand, able: Collection[Candidate]) -> bool:
    """True if there are workers, and none of them can hold so many tokens."""
    return bool(able) and not any(demand.tokens < worker.status.max_model_len for worker in able)


def _holding(tokens: int, able: list[Candidate]) -> list[Candidate]:
    """Workers whose context leaves room to generate; all, if there is none: their refusal says why."""
    return [worker for worker in able if tokens < worker.max_model_len] or able
