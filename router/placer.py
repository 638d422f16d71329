"""Where requests go: a lease on the best decode worker that has room, and a prefill worker for it, by a policy.

The policy chooses, the fleet opens; this tries workers in that order and keeps to each request's patience. No torch.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from router.admission import CONTINUATION, AdmissionQueue, Claim
from router.block_keys import block_keys
from router.candidate import Candidate, Dispatched
from router.fleet import Fleet
from router.leases import RouterLease
from router.output_lengths import OutputLengths
from router.policy import (
    Decision,
    Demand,
    FleetView,
    Policy,
    able_to_decode,
    able_to_prefill,
    outgrown,
    split_only,
    view_for_prefill,
)
from router.prefill_call import PrefillCall
from router.refusals import NO_DECODE, NO_PREFILL, check_hope, deadline_passed, no_room, nobody_ready
from router.registry import Reservation
from router.request_state import Attempt, RequestState
from serving.errors import (
    Draining,
    MillraceError,
    NoRoom,
    StaleLease,
    Unauthorized,
    WorkerLost,
)
from serving.messages import TPOT_BINS_MS, Build
from serving.service_class import ServiceClass

TIMER_SECONDS = 0.001  # that a timer may be early


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
            raise self._waited(state, single, patience, by_deadline, full) from None

    def _claim(self, state: RequestState) -> Claim:
        """What the request asks for, as far as it keeps others back that ask for as much."""
        request, build = state.request, state.required_build
        bin_ = bisect_left(TPOT_BINS_MS, request.slo.tpot_ms) if request.slo.tpot_ms is not None else None
        priority = CONTINUATION if state.generated else request.priority
        single = request.sampling.max_tokens - len(state.generated) == 1
        known = self.service_class(state).name  # classes wait for other things: one of them for shorter queues
        return Claim(priority, request.tenant, state.tokens, (build, bin_, single, known), request.service_class)

    def _waited(
        self, state: RequestState, single: bool, patience: float, by_deadline: bool, full: bool | None
    ) -> MillraceError:
        """Why the request had no place in the end; `full` as it was found, None if it only waited behind others."""
        if full is None:
            workers, demand = self.fleet.candidates(), Demand(tokens=state.tokens, build=state.required_build)
            full = bool((able_to_prefill if single else able_to_decode)(demand, workers))
        if not full and (not by_deadline or self.fleet.clock() < (state.request.deadline or 0.0) - TIMER_SECONDS):
            return nobody_ready(NO_DECODE, strict=self.fleet.config.strict_disaggregation)
        return deadline_passed() if by_deadline else no_room(patience)

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
        view = self._allowed(FleetView(open_ or trusted, able_to_prefill(demand, workers), self.fleet.ways))
        full = len(open_) < len(trusted)
        while (decision := self.policy.choose(demand, view, self.fleet.clock())) and decision.decode is not None:
            if not state.generated and not self._worth(state, demand, decision):
                return None, None, True
            worker, granted = decision.decode, False
            if worker.full:
                break
            if state.generated and outgrown(demand, view.prefill):
                decision = replace(decision, prefill=None)  # the decode worker itself, unless others have come by then
            placed = self.placed(decision, demand)
            try:
                lease = await self.fleet.open(worker, lease_id, state)
                state.build = Build(worker.status.fingerprint, worker.status.pairing)
                granted = True
                return lease, placed, False
            except (NoRoom, Draining) as error:  # of a drain its heartbeat will say so
                full = full or isinstance(error, NoRoom)
                state.pass_over(worker.status.name, error)
            except (WorkerLost, StaleLease, Unauthorized) as error:  # gone, restarted meanwhile, or not one of ours
                state.pass_over(worker.status.name, error)
                self.fleet.blame(worker.status.instance, error)
            finally:
                if not granted:
                    placed.release()
            view = replace(view, decode=[other for other in view.decode if other is not worker])
            if not view.decode:
                break
        return None, None, full

    def _allowed(self, view: FleetView) -> FleetView:
        """Those placements that are allowed here, whatever the policy."""
        return split_only(view, self.fleet.clock()) if self.fleet.config.strict_disaggregation else view

    def _worth(self, state: RequestState, demand: Demand, decision: Decision) -> bool:
        """False if a request of this class waits here rather than in that worker's queue.

        Raises Overloaded if it is of a class that is shed, and late wherever it goes: this was the best placement.
        """
        predicted, known = decision.predicted, self.service_class(state)
        if predicted is None:
            return True
        if known.shed:
            check_hope(predicted, demand.first_token_in, state)
        return known.backlog is None or predicted.queue <= known.backlog

    def service_class(self, state: RequestState) -> ServiceClass:
        """The request's; one that is not configured here is as the default one."""
        classes, default = self.fleet.config.classes, self.fleet.config.default_class
        return classes.get(state.request.service_class) or classes.get(default) or ServiceClass(name=default)

    def placed(self, decision: Decision, demand: Demand) -> Placed:
        """What has been decided counts towards the load of the worker that will prefill."""
        if decision.prefill is None:
            return Placed(decision, None)
        seconds = decision.predicted.prefill if decision.predicted is not None else 0.0
        work = Dispatched(prompt_tokens=demand.uncached(decision.prefill), prompt_seconds=seconds)
        return Placed(decision, self.fleet.reserve(decision.prefill, work, demand.turn(self.fleet.clock())))

    async def choose_prefill(self, state: RequestState, lease: RouterLease, avoid: set[str]) -> Placed:
        """Who prefills for this lease; waits for a worker that can. Raises Unavailable, or what ends the lease."""
        patience, by_deadline = self._patience(state)
        try:
            async with asyncio.timeout(patience):
                while True:
                    placed = self._choose_prefill(state, lease.fence.instance, avoid)
                    if placed is not None:
                        return placed
                    if lease.failed.done():
                        raise lease.failed.result()
                    avoid.clear()  # a worker that failed before is better than none
                    await self.fleet.change()
        except TimeoutError:
            strict = self.fleet.config.strict_disaggregation
            raise (deadline_passed() if by_deadline else nobody_ready(NO_PREFILL, strict=strict)) from None

    def _choose_prefill(self, state: RequestState, instance: str, avoid: set[str]) -> Placed | None:
        """The policy's choice of trusted workers for a lease at `instance`; or of those barred, the soonest free."""
        workers, trust, now = self.fleet.candidates(), self.fleet.trust, self.fleet.clock()
        demand, begun = self._demand(state, workers, state.build), bool(state.generated)
        entry = self.fleet.registry.get(instance)
        own = entry.candidate if entry is not None else None
        barred = trust.barred(instance, workers, now)
        for kept_out in (barred, barred - trust.soonest(instance, able_to_prefill(demand, workers))):
            view = view_for_prefill(demand, workers, self.fleet.ways, own, avoid | kept_out, begun=begun)
            view = self._allowed(view) if own is not None else view
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
        attempt = Attempt(placed.decision, self.fleet.clock(), state.tokens - reserved.work.prompt_tokens)
        attempt.downgraded = placed.decision.mixed and state.split_asked
        state.attempts.append(attempt)
        state.split_asked |= placed.decision.split
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
            priority=request.priority,
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
