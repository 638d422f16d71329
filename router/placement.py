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
from router.leases import RouterLease, WorkerLease
from router.policy import Candidate, Demand, Policy, able_to_decode, able_to_prefill, choose_prefill, outgrown
from router.prefill_call import PrefillCall
from router.request_state import RequestState
from serving.errors import (
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
from serving.messages import Build, WorkerStatus

NO_PREFILL = "no prefill worker is ready; start one, or look at /health"
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
        full, workers = False, self.fleet.registry.candidates()
        demand = self._demand(state, workers, state.required_build)
        for worker in self.policy.decode_order(demand, able_to_decode(demand, workers)):
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
                    workers = self.fleet.registry.candidates()
                    demand = self._demand(state, workers, state.build)
                    begun, own = bool(state.generated), lease.fence.instance
                    found = choose_prefill(self.policy, demand, workers, own, avoid, begun=begun)
                    if found is not None:
                        return found
                    if lease.failed.done():
                        raise lease.failed.result()
                    avoid.clear()  # a worker that failed before is better than none
                    await self.fleet.change()
        except TimeoutError:
            raise Unavailable(NO_PREFILL, retry_after=2.0) from None

    def _outgrown(self, state: RequestState) -> bool:
        """True if a text has begun that no worker which prefills could go on with."""
        workers = self.fleet.registry.candidates()
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
        self._worker: Candidate | None = None  # that prefills
        self._avoid: set[str] = set()  # prefill workers that failed, by instance

    async def lease(self) -> RouterLease:
        """Room to decode: a new lease, or the one that is held, begun anew. Raises as Placer.open_lease; Retryable."""
        if self.held is None:
            self.held = await self.placer.open_lease(self.state)
            self.state.failed_prefills = 0
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

    def failed(self, error: Retryable) -> int:
        """The try has failed. Where the lease is not to blame it is kept; how many tries of this kind have failed."""
        lease = self.held
        if lease is None or lease.failed.done() or self._worker is None:
            self.drop_lease()
            self.state.failed_leases += not isinstance(error, Preempted)
            return self.state.failed_leases
        self._begun = True
        instance = self._worker.status.instance
        if isinstance(error, WorkerLost):
            self.placer.fleet.blame(instance, error)
        if isinstance(error, Draining):
            self.placer.fleet.registry.leaves(instance)
        if isinstance(error, WorkerLost | Draining):
            self._avoid.add(instance)
        self.state.failed_prefills += 1
        return self.state.failed_prefills

    def drop_lease(self) -> None:
        """Give the lease up, if one is held; its worker frees everything within a step."""
        lease, self.held = self.held, None
        if lease is not None:
            self.placer.fleet.close_lease(lease)


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
