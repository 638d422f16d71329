"""Where a request goes: a lease on the best decode worker that has room, and a prefill worker for it, tried anew when
either fails.

The policy ranks, the fleet opens; this tries workers in that order and keeps to the request's patience. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

from kvcache.blocks.prefix import extend_keys, root_key
from router.admission import CONTINUATION, NEW, AdmissionQueue
from router.fleet import Fleet
from router.leases import DECODE_LOST, RouterLease, WorkerLease
from router.policy import Candidate, Demand, Policy, able_to_decode, able_to_prefill, choose_prefill, outgrown
from router.prefill_call import PrefillCall
from router.request_state import RequestState
from serving.errors import (
    CorruptChunk,
    Draining,
    NoRoom,
    Overloaded,
    Preempted,
    Retryable,
    StaleLease,
    Unauthorized,
    Unavailable,
    WorkerLost,
)
from serving.messages import Build, Delta, Prefilled, WorkerStatus

NO_PREFILL = "no prefill worker is ready; start one, or look at /health"
LINK_CODES = (DECODE_LOST, "layout", "range", "incomplete")  # of StaleLease, where the handoff itself fails
NO_DECODE = "no decode worker is ready; start one, or look at /health"


class Placer:
    """Places requests on a fleet by a policy."""

    def __init__(self, fleet: Fleet, policy: Policy):
        self.fleet = fleet
        self.policy = policy
        self.admission = AdmissionQueue(fleet.config.max_waiting)
        self._lease_numbers = count(1)
        self._full = False  # True if the last look for a place, of any request, found workers, but none with room

    async def open_lease(self, state: RequestState) -> RouterLease:
        """Room on the best decode worker that has it, and of the text's build; none for a request of a single token.

        Raises Overloaded or Unavailable once patience is over, InvalidRequest, ContextLengthExceeded.
        """
        lease_id = f"{state.request.request_id}/{next(self._lease_numbers)}"
        if state.request.sampling.max_tokens - len(state.generated) == 1 and not self._outgrown(state):
            return self.fleet.prefill_only(lease_id)
        try:
            async with asyncio.timeout(self._patience(state)):
                async with self.admission.turn(CONTINUATION if state.generated else NEW):
                    while True:
                        if self.fleet.refused is not None:
                            raise self.fleet.refused
                        lease, self._full = await self._try_all(lease_id, state)
                        if lease is not None:
                            return lease
                        await self.fleet.change()
        except TimeoutError:
            if not self._full:
                raise Unavailable(NO_DECODE, retry_after=2.0) from None
            waited = f"no decode worker had room within {self.fleet.config.patience:g} s"
            raise Overloaded(waited, code="no_room", retry_after=1.0) from None

    async def _try_all(self, lease_id: str, state: RequestState) -> tuple[WorkerLease | None, bool]:
        """A lease on the first worker that grants one, and True if some were full."""
        full, workers = False, self.fleet.candidates()
        demand = self._demand(state, workers, state.required_build)
        able = self.fleet.trust.decoders(able_to_decode(demand, workers), workers, self.fleet.clock())
        for worker in self.policy.decode_order(demand, able):
            try:
                lease = await self.fleet.open(worker, lease_id, state)
                state.build = Build(worker.status.fingerprint, worker.status.pairing)
                return lease, False
            except NoRoom:
                full = True
            except Draining:
                continue  # its heartbeat will say so
            except (WorkerLost, StaleLease, Unauthorized) as error:  # gone, restarted meanwhile, or not one of ours
                self.fleet.blame(worker.status.instance, error)
        return None, full

    async def prefill_worker(self, state: RequestState, lease: RouterLease, avoid: set[str]) -> Candidate:
        """The best worker to prefill for this lease; waits for one. Raises Unavailable, or what ends the lease."""
        try:
            async with asyncio.timeout(self._patience(state)):
                while True:
                    found = self._choose_prefill(state, lease.fence.instance, avoid)
                    if found is not None:
                        return found
                    if lease.failed.done():
                        raise lease.failed.result()
                    avoid.clear()  # a worker that failed before is better than none
                    await self.fleet.change()
        except TimeoutError:
            raise Unavailable(NO_PREFILL, retry_after=2.0) from None

    def _choose_prefill(self, state: RequestState, own: str, avoid: set[str]) -> Candidate | None:
        """The best of the trusted workers for a lease of the worker `own`; of those barred, the soonest that is not."""
        workers, trust = self.fleet.candidates(), self.fleet.trust
        demand, begun = self._demand(state, workers, state.build), bool(state.generated)
        barred = trust.barred(own, workers, self.fleet.clock())
        found = choose_prefill(self.policy, demand, workers, own, avoid | barred, begun=begun)
        if found is None and barred:
            barred -= trust.soonest(own, able_to_prefill(demand, workers))
            found = choose_prefill(self.policy, demand, workers, own, avoid | barred, begun=begun)
        return found

    def better_elsewhere(self, state: RequestState, lease: RouterLease) -> bool:
        """True if no trusted prefill worker reaches the lease's worker, and one reaches another worker of its build."""
        now, trust, workers = self.fleet.clock(), self.fleet.trust, self.fleet.candidates()
        able = able_to_decode(self._demand(state, workers, state.required_build), workers)
        fed = [
            worker.status.instance for worker in trust.decoders(able, workers, now) if trust.fed(worker, workers, now)
        ]
        return bool(fed) and lease.fence.instance not in fed

    def _outgrown(self, state: RequestState) -> bool:
        """True if a text has begun that no worker which prefills could go on with."""
        workers = self.fleet.candidates()
        demand = Demand(tokens=state.tokens, build=state.required_build)
        return bool(state.generated) and outgrown(demand, able_to_prefill(demand, workers))

    def begin_prefill(self, worker: Candidate, state: RequestState, lease: RouterLease) -> PrefillCall:
        """A prefill by this worker. From now on the router counts on its blocks there, and on the lease's worker."""
        cached = self._demand(state, [worker], state.build).cached.get(worker.status.instance, 0)
        if self.fleet.prefixes is not None:
            decoding = self.fleet.registry.get(lease.fence.instance)
            for status in [worker.status, *([decoding.status] if decoding is not None else [])]:
                self.fleet.prefixes.stored(status.instance, block_keys(state, status))
        return self.fleet.prefill(worker, state, lease, state.tokens - cached)

    def _demand(self, state: RequestState, workers: Sequence[Candidate], build: Build | None) -> Demand:
        cached: dict[str, int] = {}
        if self.fleet.prefixes is not None:
            kinds = {(each.status.fingerprint, each.status.block_size): each.status for each in workers}
            found = {kind: self.fleet.prefixes.match(block_keys(state, status)) for kind, status in kinds.items()}
            for status in (each.status for each in workers):
                blocks = found[status.fingerprint, status.block_size].get(status.instance, 0)
                cached[status.instance] = blocks * status.block_size
        return Demand(tokens=state.tokens, build=build, cached=cached)

    def _patience(self, state: RequestState) -> float:
        deadline, patience = state.request.deadline, self.fleet.config.patience
        return patience if deadline is None else max(0.0, min(patience, deadline - self.fleet.clock()))


class Placement:
    """One request's place: its lease, and the prefill workers that have been tried for it. Drop the lease at last."""

    def __init__(self, placer: Placer, state: RequestState):
        self.placer = placer
        self.state = state
        self.held: RouterLease | None = None
        self._begun = False  # a prefill into the lease has failed: it has to begin anew
        self._decodes = False  # its worker has decoded for it since it last began
        self._worker: Candidate | None = None  # that prefills
        self._avoid: set[str] = set()  # prefill workers that failed, by instance

    async def lease(self) -> RouterLease:
        """Room to decode: a new lease, or the one that is held, begun anew. Raises as Placer.open_lease; Retryable."""
        if self.held is None:
            self.held = await self.placer.open_lease(self.state)
            self._avoid = set()
        elif self._begun:
            try:
                await self.held.advance(self.state)
            except BaseException:
                self.drop_lease()
                raise
        self._begun = False
        return self.held

    async def prefill(self) -> PrefillCall:
        """A prefill into the lease, by the best worker. Raises Unavailable, or what ended the lease meanwhile."""
        assert self.held is not None
        self._worker = None
        self._worker = await self.placer.prefill_worker(self.state, self.held, self._avoid)
        return self.placer.begin_prefill(self._worker, self.state, self.held)

    def prefilled(self, prefilled: Prefilled) -> Delta:
        """The prefill worker has done its work."""
        assert self._worker is not None
        self.placer.fleet.breakers.succeeded(self._worker.status.instance, self.placer.fleet.clock())
        return prefilled.delta

    def decoded(self, delta: Delta) -> Delta:
        """The whole way works, from prefill to decode: the text is getting on."""
        if not self._decodes:
            assert self._worker is not None and self.held is not None
            self._decodes = True
            self.state.failures = 0
            self.placer.fleet.decoded(self._worker.status.instance, self.held.fence.instance)
        return delta

    def failed(self, error: Retryable) -> None:
        """The try has failed: whoever is to blame is, and where the lease is not it is kept."""
        lease, worker, fleet = self.held, self._worker, self.placer.fleet
        echo = self._begun and lease is None  # what the lease could not begin anew after has been counted
        self.state.failures += not (echo or isinstance(error, Preempted | Draining))
        self._decodes = False
        if lease is None or lease.failed.done() or worker is None:
            if lease is not None and isinstance(error, WorkerLost):
                fleet.lost_lease(lease.fence.instance, error)
            self.drop_lease()
            return
        self._begun = True
        instance, decode = worker.status.instance, lease.fence.instance
        if isinstance(error, WorkerLost):
            fleet.blame(instance, error)
        elif isinstance(error, Draining):
            fleet.registry.leaves(instance)
        elif blames_link(error):
            fleet.blame_link(instance, decode, error)
        else:
            return
        self._avoid.add(instance)
        if blames_link(error) and self.placer.better_elsewhere(self.state, lease):
            self.drop_lease()

    def drop_lease(self) -> None:
        """Give the lease up, if one is held; its worker frees everything within a step."""
        lease, self.held = self.held, None
        if lease is not None:
            self.placer.fleet.close_lease(lease)


def blames_link(error: Retryable) -> bool:
    """True if KV did not get from the prefill worker to the decode worker as it should: neither alone is to blame."""
    return isinstance(error, CorruptChunk) or (isinstance(error, StaleLease) and error.code in LINK_CODES)


def block_keys(state: RequestState, status: WorkerStatus) -> list[bytes]:
    """The keys of the blocks that such a worker could reuse: all full ones, but for one token left to compute."""
    request = state.request
    if request.prompt_logprobs is not None or status.block_size < 1:
        return []
    key = (status.fingerprint, status.block_size)
    keys = state.block_keys.setdefault(key, [])
    if len(keys) == (state.tokens - 1) // status.block_size:
        return keys
    longest = len(request.prompt) + request.sampling.max_tokens
    long_rope = bool(status.long_rope_after) and longest > status.long_rope_after
    root = root_key(status.fingerprint, request.tenant, long_rope)
    extend_keys(keys, root, state.text, status.block_size, upto=state.tokens - 1)
    return keys
