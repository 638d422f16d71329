"""Where a request goes: a lease on the best decode worker that has room, and a prefill worker for it, tried anew when
either fails.

The policy ranks, the fleet opens; this tries workers in that order and keeps to the request's patience. No torch.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from kvcache.blocks.prefix import extend_keys, root_key
from router.admission import CONTINUATION, AdmissionQueue, Claim
from router.candidate import Candidate, Dispatched
from router.fleet import Fleet
from router.leases import DECODE_LOST, RouterLease
from router.output_lengths import OutputLengths
from router.policy import (
    Decision,
    Demand,
    FleetView,
    Policy,
    able_to_decode,
    able_to_prefill,
    outgrown,
    view_for_prefill,
)
from router.predict import within
from router.prefill_call import PrefillCall
from router.registry import Reservation
from router.request_state import Attempt, RequestState
from serving.engine.objectives import DEADLINE_PASSED
from serving.errors import (
    CorruptChunk,
    DeadlineExceeded,
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
from serving.messages import TPOT_BINS_MS, Build, Delta, Prefilled, WorkerStatus
from serving.service_class import STANDARD, ServiceClass

HOPELESS = 0.1  # a chance to meet the TTFT objective below this counts as none
JITTER = 0.25  # of retry_after, either way: clients that are refused together do not come back together
MIN_RETRY = 0.1  # seconds
NO_PREFILL = "no prefill worker is ready; start one, or look at /health"
LINK_CODES = (DECODE_LOST, "layout", "range", "incomplete")  # of StaleLease, where the handoff itself fails
NO_DECODE = "no decode worker is ready; start one, or look at /health"


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision whose prefill has not been sent yet. Release it if it never is."""

    decision: Decision
    reserved: Reservation | None  # for the prefill; None where no worker was there to take it

    def release(self) -> None:
        if self.reserved is not None:
            self.reserved.release()


class Placer:
    """Places requests on a fleet by a policy."""

    def __init__(self, fleet: Fleet, policy: Policy):
        self.fleet = fleet
        self.policy = policy
        self.admission = AdmissionQueue(fleet.config.max_waiting, fleet.change)
        self.outputs = OutputLengths()
        self._lease_numbers = count(1)

    async def open_lease(self, state: RequestState) -> tuple[RouterLease, Placed | None]:
        """Room on the best decode worker that has it, and of the text's build, and what was decided with it.

        A request of a single token needs no room, and nothing is decided yet.
        Raises Overloaded or Unavailable once patience is over, DeadlineExceeded where the deadline comes first,
        InvalidRequest, ContextLengthExceeded.
        """
        lease_id = f"{state.request.request_id}/{next(self._lease_numbers)}"
        single = state.request.sampling.max_tokens - len(state.generated) == 1 and not self._outgrown(state)
        full: bool | None = None  # not known before it has looked
        patience, by_deadline = self._patience(state)
        try:
            async with asyncio.timeout(patience), self.admission.enter(self._claim(state)) as ticket:
                while True:
                    await self.admission.turn(ticket)
                    granted: bool | None = None  # a request that is refused, or leaves, has not found workers full
                    try:
                        if self.fleet.refused is not None:
                            raise self.fleet.refused
                        found = self._prefill_only(lease_id) if single else await self._try_all(lease_id, state)
                        granted = found[0] is not None
                    finally:
                        self.admission.looked(ticket, found=granted)
                    lease, placed, full = found
                    if lease is not None:
                        return lease, placed
        except TimeoutError:
            if full is None:  # it waited behind others that ask for the same
                full = self._anyone(state, single)
            if not full:
                raise Unavailable(NO_DECODE, retry_after=2.0) from None
            if by_deadline:
                raise DeadlineExceeded(DEADLINE_PASSED) from None
            waited = f"no worker had room within {patience:g} s"
            raise Overloaded(waited, code="no_room", retry_after=1.0) from None

    def _claim(self, state: RequestState) -> Claim:
        """What the request asks for, as far as it keeps others back that ask for as much."""
        request, build = state.request, state.required_build
        bin_ = bisect_left(TPOT_BINS_MS, request.slo.tpot_ms) if request.slo.tpot_ms is not None else None
        priority = CONTINUATION if state.generated else request.priority
        single = request.sampling.max_tokens - len(state.generated) == 1
        known = self.service_class(state).name  # classes wait for other things: one of them for shorter queues
        return Claim(priority, request.tenant, state.tokens, (build, bin_, single, known))

    def _anyone(self, state: RequestState, single: bool) -> bool:
        """True if there are workers for the request, though they may be full."""
        workers, demand = self.fleet.candidates(), Demand(tokens=state.tokens, build=state.required_build)
        return bool((able_to_prefill if single else able_to_decode)(demand, workers))

    def _prefill_only(self, lease_id: str) -> tuple[RouterLease | None, Placed | None, bool]:
        """A single token needs no decode worker, but workers compute so many prompts at a time as they may hold."""
        most = sum(worker.status.max_seqs for worker in self.fleet.candidates() if worker.prefills)
        if most and self.fleet.prefill_only_leases >= most:
            return None, None, True
        return self.fleet.prefill_only(lease_id), None, False

    async def _try_all(self, lease_id: str, state: RequestState) -> tuple[RouterLease | None, Placed | None, bool]:
        """A lease on the first trusted worker that grants one, in the policy's order; True if some were full."""
        workers, now = self.fleet.candidates(), self.fleet.clock()
        demand = self._demand(state, workers, state.required_build)
        trusted = self.fleet.trust.decoders(able_to_decode(demand, workers), workers, now)
        open_ = [worker for worker in trusted if not worker.full]  # to ask hundreds that are costs more than it brings
        view = FleetView(open_ or trusted, able_to_prefill(demand, workers), self.fleet.ways)
        full = len(open_) < len(trusted)
        while (decision := self.policy.choose(demand, view, self.fleet.clock())) and decision.decode is not None:
            if not state.generated and not self._worth(state, demand, decision):
                return None, None, True
            if decision.decode.full:
                break
            worker, placed, granted = decision.decode, self.placed(decision, demand), False
            try:
                lease = await self.fleet.open(worker, lease_id, state)
                state.build = Build(worker.status.fingerprint, worker.status.pairing)
                granted = True
                return lease, placed, False
            except NoRoom:
                full = True
            except Draining:
                pass  # its heartbeat will say so
            except (WorkerLost, StaleLease, Unauthorized) as error:  # gone, restarted meanwhile, or not one of ours
                self.fleet.blame(worker.status.instance, error)
            finally:
                if not granted:
                    placed.release()
            view = replace(view, decode=[other for other in view.decode if other is not worker])
            if not view.decode:
                break
        return None, None, full

    def _worth(self, state: RequestState, demand: Demand, decision: Decision) -> bool:
        """False if a request of this class waits here rather than in that worker's queue.

        Raises Overloaded if it is of a class that is shed, and late wherever it goes: this was the best placement.
        """
        predicted, known = decision.predicted, self.service_class(state)
        if predicted is None:
            return True
        left = demand.first_token_in
        if known.shed and left is not None and within(left, predicted.ttft, predicted.error) < HOPELESS:
            alone = predicted.ttft * predicted.prefill / max(1e-9, predicted.queue + predicted.prefill)
            spare = 1.0 + JITTER * (state.salt % 1000 / 500 - 1.0)
            given = left if state.request.slo.ttft_ms is None else state.request.slo.ttft_ms / 1e3  # if it comes anew
            raise Overloaded(
                f"the first token would come after about {predicted.ttft:.2g} s, {left:.2g} s are left of ttft_slo_ms",
                code="slo",
                retry_after=max(MIN_RETRY, (predicted.ttft - given) * spare) if alone <= given else None,
            )
        return known.backlog is None or predicted.queue <= known.backlog

    def service_class(self, state: RequestState) -> ServiceClass:
        """The request's; one that is not configured here is as the standard one."""
        classes = self.fleet.config.classes
        return classes.get(state.request.service_class) or classes.get(STANDARD) or ServiceClass(name=STANDARD)

    def placed(self, decision: Decision, demand: Demand) -> Placed:
        """What has been decided counts towards the load of the worker that will prefill."""
        if decision.prefill is None:
            return Placed(decision, None)
        seconds = decision.predicted.prefill if decision.predicted is not None else 0.0
        work = Dispatched(prompt_tokens=demand.uncached(decision.prefill), prompt_seconds=seconds)
        return Placed(decision, self.fleet.reserve(decision.prefill, work))

    async def choose_prefill(self, state: RequestState, lease: RouterLease, avoid: set[str]) -> Placed:
        """Who prefills for this lease; waits for a worker that can. Raises Unavailable, or what ends the lease."""
        try:
            async with asyncio.timeout(self._patience(state)[0]):
                while True:
                    placed = self._choose_prefill(state, lease.fence.instance, avoid)
                    if placed is not None:
                        return placed
                    if lease.failed.done():
                        raise lease.failed.result()
                    avoid.clear()  # a worker that failed before is better than none
                    await self.fleet.change()
        except TimeoutError:
            raise Unavailable(NO_PREFILL, retry_after=2.0) from None

    def _choose_prefill(self, state: RequestState, instance: str, avoid: set[str]) -> Placed | None:
        """The policy's choice of trusted workers for a lease at `instance`; or of those barred, the soonest free."""
        workers, trust, now = self.fleet.candidates(), self.fleet.trust, self.fleet.clock()
        demand, begun = self._demand(state, workers, state.build), bool(state.generated)
        entry = self.fleet.registry.get(instance)
        own = entry.candidate if entry is not None else None
        barred = trust.barred(instance, workers, now)
        for kept_out in (barred, barred - trust.soonest(instance, able_to_prefill(demand, workers))):
            view = view_for_prefill(demand, workers, self.fleet.ways, own, avoid | kept_out, begun=begun)
            decision = self.policy.choose(demand, view, now)
            if decision is not None and decision.prefill is not None:
                return self.placed(decision, demand)
            if not barred:
                break
        return None

    def better_elsewhere(self, state: RequestState, lease: RouterLease) -> bool:
        """True if no trusted prefill worker reaches the lease's worker, and one reaches another worker of its build."""
        now, trust, workers = self.fleet.clock(), self.fleet.trust, self.fleet.candidates()
        able = able_to_decode(self._demand(state, workers, state.required_build), workers)
        fed = [
            worker.status.instance for worker in trust.decoders(able, workers, now) if trust.fed(worker, workers, now)
        ]
        return bool(fed) and lease.fence.instance not in fed

    def stands(self, worker: Candidate | None) -> bool:
        """True if a worker that was chosen a moment ago can still be believed."""
        entry = self.fleet.registry.get(worker.status.instance) if worker is not None else None
        return entry is not None and not entry.suspect and not entry.status.draining

    def learn(self, state: RequestState) -> None:
        """Tokens have come: compare what the present attempt has brought with what was predicted of it."""
        if not state.attempts:
            return
        attempt, ended = state.attempts[-1], state.finished
        decision, prefill, decode = attempt.decision, attempt.decision.prefill, attempt.decision.decode
        if attempt.first_at == attempt.last_at:
            self.policy.observed(decision, ttft=attempt.first_at - attempt.began_at)
        elif attempt.second_at == attempt.last_at and prefill is not decode and prefill is not None is not decode:
            waited = attempt.second_at - (attempt.first_at or 0.0)
            step = decision.predicted.step if decision.predicted is not None else 0.0
            costs = self.fleet.link_costs
            costs.observed(prefill.status.instance, decode.status.instance, state.tokens, waited - step)
        if ended:
            self.policy.observed(decision, tpot=attempt.tpot)
            self.outputs.ended(state.request.service_class, len(state.generated))

    def _outgrown(self, state: RequestState) -> bool:
        """True if a text has begun that no worker which prefills could go on with."""
        workers = self.fleet.candidates()
        demand = Demand(tokens=state.tokens, build=state.required_build)
        return bool(state.generated) and outgrown(demand, able_to_prefill(demand, workers))

    def begin_prefill(self, placed: Placed, state: RequestState, lease: RouterLease) -> PrefillCall:
        """A prefill as decided. From now on the router counts on its blocks there, and on the lease's worker."""
        worker, reserved = placed.decision.prefill, placed.reserved
        assert worker is not None and reserved is not None
        state.attempts.append(Attempt(placed.decision, self.fleet.clock()))
        if self.fleet.prefixes is not None:
            decoding = self.fleet.registry.get(lease.fence.instance)
            for status in [worker.status, *([decoding.status] if decoding is not None else [])]:
                self.fleet.prefixes.stored(status.instance, block_keys(state, status))
        return self.fleet.prefill(worker, state, lease, reserved)

    def _demand(self, state: RequestState, workers: Sequence[Candidate], build: Build | None) -> Demand:
        cached: dict[str, int] = {}
        if self.fleet.prefixes is not None:
            kinds = {(each.status.fingerprint, each.status.block_size): each.status for each in workers}
            found = {kind: self.fleet.prefixes.match(block_keys(state, status)) for kind, status in kinds.items()}
            for status in (each.status for each in workers):
                blocks = found[status.fingerprint, status.block_size].get(status.instance, 0)
                cached[status.instance] = blocks * status.block_size
        request, now = state.request, self.fleet.clock()
        left = request.sampling.max_tokens - len(state.generated)
        return Demand(
            tokens=state.tokens,
            output=self.outputs.expected(request.service_class, len(state.generated), left),
            build=build,
            cached=cached,
            slo=request.slo,
            weight=self.service_class(state).weight,
            first_token_in=state.first_token_in(now),
            session=request.session,
            salt=state.salt,
        )

    def _patience(self, state: RequestState) -> tuple[float, bool]:
        """Seconds the request may wait; True if that is because of its deadline."""
        deadline, patience = state.request.deadline, self.service_class(state).patience
        if patience is None:
            patience = self.fleet.config.patience
        left = patience if deadline is None else deadline - self.fleet.clock()
        return (max(0.0, left), True) if left < patience else (patience, False)


class Placement:
    """One request's place: its lease, and the prefill workers that have been tried for it. Drop the lease at last."""

    def __init__(self, placer: Placer, state: RequestState):
        self.placer = placer
        self.state = state
        self.held: RouterLease | None = None
        self._begun = False  # a prefill into the lease has failed: it has to begin anew
        self._placed: Placed | None = None  # what led to the lease, until its prefill is sent
        self._decodes = False  # its worker has decoded for it since it last began
        self._worker: Candidate | None = None  # that prefills
        self._reserved: Reservation | None = None  # for it
        self._avoid: set[str] = set()  # prefill workers that failed, by instance

    async def lease(self) -> RouterLease:
        """Room to decode: a new lease, or the one that is held, begun anew. Raises as Placer.open_lease; Retryable."""
        if self.held is None:
            self.held, self._placed = await self.placer.open_lease(self.state)
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
        placed, self._placed, self._worker = self._placed, None, None
        if placed is None or not self.placer.stands(placed.decision.prefill):
            if placed is not None:
                placed.release()
            placed = await self.placer.choose_prefill(self.state, self.held, self._avoid)
        self._worker, self._reserved = placed.decision.prefill, placed.reserved
        return self.placer.begin_prefill(placed, self.state, self.held)

    def prefilled(self, prefilled: Prefilled) -> Delta:
        """The prefill worker has done its work."""
        assert self._worker is not None
        if self._reserved is not None:
            self._reserved.release(computed=True)  # what is left is its handoff
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
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.release()
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
