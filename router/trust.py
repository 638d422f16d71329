"""Which of the workers that could take a request are trusted with it: breakers of workers and links, stuck engines.

Pure; `now` comes in. It bars nobody for good: where all are barred, the one whose pause ends first is tried.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from router.breaker import BreakerConfig, Breakers, BreakerState, Links
from router.candidate import Candidate
from router.link_costs import LinkCosts
from router.slowness import SlowWatch
from router.stalls import StallWatch
from serving.messages import WorkerStatus


class Trust:
    """What a router has come to know of its workers, by instance, and of the ways between them."""

    def __init__(self, config: BreakerConfig, stall: float):
        self.workers: Breakers[str] = Breakers(config)
        self.links = Links(config)
        self.stalls = StallWatch(stall)
        self.slowness = SlowWatch()

    def heard(self, status: WorkerStatus, now: float) -> bool:
        """Take a worker's report in; True if it is stuck now and was not before."""
        self.slowness.heard(status, now)
        return self.stalls.heard(status, now)

    @property
    def untroubled(self) -> bool:
        """True if no breaker has opened for a while: nobody need be asked for."""
        return not len(self.workers) and not len(self.links.breakers)

    def decoders(self, able: Sequence[Candidate], workers: Sequence[Candidate], now: float) -> list[Candidate]:
        """Of those able to decode, the ones to offer: trusted, and reached by a trusted prefill worker.

        Where there are none, the trusted; where nobody is, the one whose pause ends first.
        """
        if self.untroubled:
            return list(able)
        trusted = [worker for worker in able if self.workers.allows(worker.status.instance, now)]
        fed = self.fed(trusted, workers, now)
        if fed or trusted:
            return fed or trusted
        return sorted(able, key=lambda worker: self.workers.retry_at(worker.status.instance))[:1]

    def prefillers(self, able: Sequence[Candidate], now: float) -> list[Candidate]:
        """Of those able to prefill, the trusted; where nobody is, all."""
        if self.untroubled:
            return list(able)
        return [worker for worker in able if self.workers.allows(worker.status.instance, now)] or list(able)

    def fed(self, decodes: Iterable[Candidate], workers: Iterable[Candidate], now: float) -> list[Candidate]:
        """Those for whose leases a prompt may be computed: by themselves, or by one that is trusted to get KV there."""
        prefills: dict[str, list[str]] = {}  # instances by generation, gone through once: there may be hundreds of both
        for worker in workers:
            if worker.prefills and not worker.status.draining and self.workers.allows(worker.status.instance, now):
                prefills.setdefault(worker.generation, []).append(worker.status.instance)

        def reached(decode: Candidate) -> bool:
            instance, others = decode.status.instance, prefills.get(decode.generation, ())
            return any(self.links.allows(other, instance, now) for other in others)

        return [decode for decode in decodes if decode.prefills or reached(decode)]

    def allows(self, prefill: str, decode: str, now: float) -> bool:
        """True if the prefill worker may be given a prompt for a lease of the decode worker."""
        return self.workers.allows(prefill, now) and self.links.allows(prefill, decode, now)

    def barred(self, decode: str, workers: Iterable[Candidate], now: float) -> set[str]:
        """The prefill workers not to be given a prompt for a lease of this worker; never itself."""
        if self.untroubled:
            return set()
        others = (worker.status.instance for worker in workers if worker.prefills)
        return {each for each in others if each != decode and not self.allows(each, decode, now)}

    def soonest(self, decode: str, able: Sequence[Candidate]) -> set[str]:
        """The one of these prefill workers whose pause ends first; empty where there are none."""

        def retry_at(worker: Candidate) -> float:
            instance = worker.status.instance
            return max(self.workers.retry_at(instance), self.links.retry_at(instance, decode))

        return {worker.status.instance for worker in sorted(able, key=retry_at)[:1]}

    def well(self, instance: str) -> bool:
        """True if nothing is held against the worker."""
        return not self.stalls.stuck(instance) and self.workers.state(instance) is BreakerState.CLOSED

    def replaceable(self, worker: Candidate, workers: Iterable[Candidate]) -> bool:
        """True if others of these, that nothing is held against, could do what this worker does."""
        status = worker.status
        staying = [each for each in workers if each.status.instance != status.instance and not each.status.draining]
        others = [each for each in staying if self.well(each.status.instance)]
        fed = {each.generation for each in others if each.prefills}
        alike = [each for each in others if each.decodes and each.status.fingerprint == status.fingerprint]
        if worker.decodes:
            return any(each.generation in fed for each in alike)
        return worker.generation in fed

    def retain(self, known: Container[str], now: float) -> None:
        """Forget workers that are gone."""
        self.workers.retain(lambda instance: instance in known, now)
        self.links.retain(lambda instance: instance in known, now)
        self.stalls.retain(known)
        self.slowness.retain(known)


class Ways:
    """The ways from prefill to decode workers as policies see them (router.policy.KVLinks): trusted, and at a cost."""

    def __init__(self, trust: Trust, costs: LinkCosts):
        self.trust = trust
        self.seconds = costs.seconds  # each choice asks for dozens

    @property
    def untroubled(self) -> bool:
        return self.trust.untroubled

    def allows(self, prefill: str, decode: str, now: float) -> bool:
        return self.trust.untroubled or self.trust.allows(prefill, decode, now)
