"""Where requests go: a lease on the best decode worker that has room, and a prefill worker for it, by a policy.

The policy chooses, the fleet opens; this tries workers in that order and keeps to each request's patience. No torch.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from router.admission import CONTINUATION, AdmissionQueue, Claim
from router.block_keys import block_keys
from router.candidate import Candidate, Dispatched
from router.expected_blocks import ExpectedBlocks
from router.fleet import Fleet
from router.generations import offer_prefills
from router.kept import Kept
from router.learner import Learner
from router.lease_room import MOST_ASKED, LeaseRoom, RoomLook, RoomSearch, tpot_bin
from router.leases import OUT_OF_REACH, RouterLease
from router.output_lengths import OutputLengths
from router.patience import patience_left
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
from router.prefill_call import BROKEN_CALL, Placed, PrefillCall
from router.quarantine import Quarantine
from router.refusals import NO_DECODE, NO_PREFILL, deadline_passed, no_room, nobody_ready
from router.request_state import Attempt, RequestState
from router.roster import Roster
from router.text_kinds import text_kinds
from router.worth import judged, sheddable, welcome, worth
from serving.errors import NEVER_SENT, Draining, MillraceError, NoRoom, StaleLease, Unauthorized, WorkerLost
from serving.fair_shares import tenant_of
from serving.messages import Build
from serving.service_class import ServiceClass

NOT_BEGUN = (OUT_OF_REACH, BROKEN_CALL, NEVER_SENT)  # losses of a worker that cannot have begun with the request
TIMER_SECONDS = 0.001  # that a timer may be early


class Placer:
    """Places requests on a fleet by a policy."""

    def __init__(self, fleet: Fleet, policy: Policy):
        self.fleet = fleet
        self.policy = policy
        self.admission = AdmissionQueue(fleet.config.max_waiting, fleet.changes)
        self.prefill_queue = AdmissionQueue(sys.maxsize, fleet.changes)  # leases that no worker prefills for just now
        self.room = LeaseRoom()
        self.rosters = Kept(Roster)
        self.outputs = OutputLengths()
        self.learner = Learner(fleet, self.outputs, self.service_class)
        self.quarantine = Quarantine(fleet.registry)
        self._lease_numbers = count(1)

    async def open_lease(self, state: RequestState) -> tuple[RouterLease, Placed | None]:
        """Room on the best decode worker that has it, and of the text's build, and what was decided with it.

        A request of a single token needs no room: it is prefilled, and that is all.
        Raises Overloaded or Unavailable once patience is over, DeadlineExceeded where the deadline comes first,
        InvalidRequest, ContextLengthExceeded; WorkerLost where the prompt may have broken a worker.
        """
        single = state.request.sampling.max_tokens - len(state.generated) == 1 and not self._outgrown(state)
        search, began = RoomSearch(single), self.fleet.clock()
        patience, by_deadline = self._patience(state, state.waited)
        try:
            async with asyncio.timeout(patience):
                while (found := await self._queue(search, state)) is None:
                    pass
                return found
        except TimeoutError:
            raise self._waited(state, search, patience, by_deadline) from None
        finally:
            state.waited += self.fleet.clock() - began
            if self.room.release(state):
                self.fleet.notify()

    async def _queue(self, search: RoomSearch, state: RequestState) -> tuple[RouterLease, Placed | None] | None:
        """Wait for a place in the queue. None: it asks for something else now, and has to queue up again."""
        degraded = state.degraded
        async with self.admission.enter(self._claim(state)) as ticket:
            state.admitted = True
            while state.degraded == degraded:
                await self.admission.turn(ticket)
                granted: bool | None = None  # a request that is refused, or leaves, has not found workers full
                try:
                    if self.fleet.refused is not None:
                        raise self.fleet.refused
                    found = self._prefill_only(search, state) if search.single else await self._try_all(search, state)
                    granted = found is not None if state.degraded == degraded else None
                finally:
                    self.admission.looked(ticket, found=granted)
                if found is not None:
                    state.charged = len(state.generated)
                    return found
                search.overtaken = ticket.overtaken
        return None

    def _claim(self, state: RequestState) -> Claim:
        """What the request asks for, as far as it keeps others back that ask for as much."""
        request, build, tenant = state.request, state.required_build, tenant_of(state.request)
        priority = CONTINUATION if state.generated else request.priority
        single = request.sampling.max_tokens - len(state.generated) == 1
        kind = build, tpot_bin(state), single, self.service_class(state).name  # one class waits for shorter queues
        charge = 0 if state.charged == len(state.generated) else state.tokens  # it has brought nothing since
        pressing = (lambda: state.pressing(self.fleet.clock())) if state.generated or request.slo.ttft_ms else None
        return Claim(priority, tenant, state.tokens, kind, request.service_class, charge, pressing, state.admitted)

    def _waited(self, state: RequestState, search: RoomSearch, patience: float, by_deadline: bool) -> MillraceError:
        """Why the request had no place in the end."""
        full, single = search.full, search.single
        if full is None:  # it only waited behind others
            workers, demand = self.fleet.candidates(), Demand(tokens=state.tokens, build=state.required_build)
            full = bool((able_to_prefill if single else able_to_decode)(demand, workers))
        if not full and (not by_deadline or self.fleet.clock() < (state.request.deadline or 0.0) - TIMER_SECONDS):
            why, strict = NO_PREFILL if single else NO_DECODE, self.fleet.config.strict_disaggregation
            return nobody_ready(why, strict=strict)
        return deadline_passed() if by_deadline else no_room(patience + state.waited)

    def _prefill_only(self, search: RoomSearch, state: RequestState) -> tuple[RouterLease, Placed | None] | None:
        """A single token needs no decode worker, but workers compute so many prompts at a time as they may hold."""
        most = sum(worker.status.max_seqs for worker in self.fleet.candidates() if worker.prefills)
        search.full = bool(most) and self.fleet.prefill_only_leases >= most
        if search.full:
            return None
        chosen = self._decide_prefill(state, "", set())
        if chosen is None:
            return None
        (decision, demand), known = chosen, self.service_class(state)
        if not worth(known, state, demand, decision):
            search.full = True
            return None
        state.sheddable = sheddable(known, state, decision)
        return self.fleet.prefill_only(self._next_lease(state)), self.placed(decision, demand)

    async def _try_all(self, search: RoomSearch, state: RequestState) -> tuple[RouterLease, Placed | None] | None:
        """A lease on the first trusted worker that grants one, in the policy's order; notes if some were full.

        Raises WorkerLost where a worker was lost that may have begun to compute the prompt.
        """
        look = self.look(state, search.overtaken)
        search.full, search.best = look.full, None
        widest, refused = look.wider or look.view, set[str]()
        known = self.service_class(state)
        if look.all_full and not judged(known, state) and not any(each.full and each.owing for each in widest.decode):
            return None
        if look.wider is not None:
            found = await self._try(search, state, look, look.view, refused)
            if found is not None:
                return found
        left = [each for each in widest.decode if each.instance not in refused] if refused else widest.decode
        return await self._try(search, state, look, replace(widest, decode=left), refused)

    async def _try(
        self, search: RoomSearch, state: RequestState, look: RoomLook, view: FleetView, refused: set[str]
    ) -> tuple[RouterLease, Placed | None] | None:
        """As `_try_all`, among the workers of a view; adds the instances of those that gave nothing to `refused`.

        Whether the best placement is worth waiting for is judged by the widest view alone.
        """
        demand, known, last = look.demand, self.service_class(state), view is not look.view or look.wider is None
        refusals = 0
        while (decision := self.policy.choose(demand, view, self.fleet.clock())) and decision.decode is not None:
            if search.waits(decision, demand) or not (last or welcome(known, state, demand, decision)):
                break
            if not worth(known, state, demand, decision):
                search.full = True
                break
            worker = decision.decode
            if refusals == MOST_ASKED or (look.all_full and not (worker.full and worker.owing)):
                break
            if state.generated and outgrown(demand, view.prefill):
                decision = replace(decision, prefill=None)  # the decode worker itself, unless others have come by then
            try:
                with search.asking():
                    return await self._open(state, demand, decision)
            except (NoRoom, Draining) as error:  # of a drain its heartbeat will say so
                if isinstance(error, NoRoom):
                    search.refused(decision, error)
                    refusals += 1
                    self.room.refused(worker, state, error, pressing=state.pressing(self.fleet.clock()))
                state.pass_over(worker.status.name, error)
            except (WorkerLost, StaleLease, Unauthorized) as error:  # gone, restarted meanwhile, or not one of ours
                state.pass_over(worker.status.name, error)
                self.fleet.blame(worker.status.instance, error)
                if decision.mixed and isinstance(error, WorkerLost) and error.code not in NOT_BEGUN:
                    now = self.fleet.clock()  # it may have begun with the prompt, and died of it
                    self.quarantine.lost(state, worker.status.instance, error, now, computing=True)
                    raise
            refused.add(worker.instance)
            view = replace(view, decode=[other for other in view.decode if other is not worker])
            if not view.decode or worker.full:
                break
        return None

    def look(self, state: RequestState, overtaken: int = 0) -> RoomLook:
        """What the request asks for, and whom it may ask now; it is `overtaken` as its ticket says."""
        workers, now = self.fleet.candidates(), self.fleet.clock()
        demand = self._demand(state, workers, state.required_build)
        offered = self.rosters.of(workers).offer(demand, self.fleet.trust, now, state.failed_generation)
        open_ = self.room.to_ask(state, offered.decodes, overtaken, now)
        view = self._allowed(FleetView(open_ or offered.decodes, offered.prefills, self.fleet.ways))
        own = view if offered.home is None else view.of_generation(offered.home)
        wider = view if own.decode and len(own.decode) < len(view.decode) else None
        return RoomLook(demand, own if wider else view, len(open_) < len(offered.decodes), not open_, wider)

    def _next_lease(self, state: RequestState) -> str:
        """A name that no try has had: a worker that never answered may still hold, or come to hold, the last one."""
        return f"{state.request.request_id}/{next(self._lease_numbers)}"

    async def _open(self, state: RequestState, demand: Demand, decision: Decision) -> tuple[RouterLease, Placed | None]:
        """A lease as decided, and its prefill reserved. Raises as Fleet.open."""
        worker = decision.decode
        assert worker is not None
        state.sheddable = sheddable(self.service_class(state), state, decision)
        placed = self.placed(decision, demand)
        if decision.mixed:
            placed = replace(placed, asked_at=self.fleet.clock())
        try:
            lease = await self.fleet.open(worker, self._next_lease(state), state, prefill=decision.mixed)
        except BaseException:
            placed.release()
            raise
        state.build = Build(worker.status.fingerprint, worker.status.pairing, worker.generation)
        return lease, placed

    def close_lease(self, lease: RouterLease) -> None:
        """Call once for each lease. Its worker may have room again."""
        self.room.forget(lease.fence.instance)
        self.fleet.close_lease(lease)

    def _allowed(self, view: FleetView) -> FleetView:
        """Those placements that are allowed here, whatever the policy."""
        return split_only(view, self.fleet.clock()) if self.fleet.config.strict_disaggregation else view

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
                placed = self._choose_prefill(state, lease, avoid)
                if placed is None:
                    avoid.clear()  # a worker that failed before is better than none
                    await self.fleet.change()
                    placed = await self._queue_for_prefill(state, lease)
                return placed
        except TimeoutError:
            strict = self.fleet.config.strict_disaggregation
            raise (deadline_passed() if by_deadline else nobody_ready(NO_PREFILL, strict=strict)) from None

    async def _queue_for_prefill(self, state: RequestState, lease: RouterLease) -> Placed:
        """Wait beside others for a worker that prefills: where one finds none, no other of its kind looks."""
        generation = state.build.generation if state.build is not None else None
        kind = generation, lease.fence.instance if self.fleet.config.strict_disaggregation else ""
        async with self.prefill_queue.enter(Claim(state.request.priority, "", 0, kind)) as ticket:
            while True:
                either: list[asyncio.Future[Any]] = [ticket.turn, lease.failed]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if lease.failed.done():
                    raise lease.failed.result()
                await self.prefill_queue.turn(ticket)
                placed = None
                try:
                    placed = self._choose_prefill(state, lease, set())
                finally:
                    self.prefill_queue.looked(ticket, found=placed is not None)
                if placed is not None:
                    return placed

    def _choose_prefill(self, state: RequestState, lease: RouterLease, avoid: set[str]) -> Placed | None:
        """None where nobody can. Raises Draining where nobody can for this lease, and somebody could for another."""
        chosen = self._decide_prefill(state, lease.fence.instance, avoid)
        if chosen is None and lease.grant is not None and self.better_elsewhere(state, lease):
            raise Draining("the prefill workers of its decode worker's generation are gone")
        return self.placed(*chosen) if chosen is not None else None

    def _decide_prefill(self, state: RequestState, instance: str, avoid: set[str]) -> tuple[Decision, Demand] | None:
        """The policy's choice of trusted workers for a lease at `instance`; or of those barred, the soonest free."""
        workers, trust, now = self.fleet.candidates(), self.fleet.trust, self.fleet.clock()
        demand, begun = self._demand(state, workers, state.build), bool(state.generated)
        entry = self.fleet.registry.get(instance)
        own = entry.candidate if entry is not None else None
        barred = trust.barred(instance, workers, now)
        for kept_out in (barred, barred - trust.soonest(instance, able_to_prefill(demand, workers))):
            view = view_for_prefill(demand, workers, self.fleet.ways, own, avoid | kept_out, begun=begun)
            left = state.failed_generation
            views = [self._allowed(view)] if own is not None else offer_prefills(demand, view, workers, left)
            for each in views:
                decision = self.policy.choose(demand, each, now)
                if decision is None or decision.prefill is None:
                    continue
                if each is views[-1] or welcome(self.service_class(state), state, demand, decision):
                    return decision, demand
            if not barred:
                break
        return None

    def better_elsewhere(self, state: RequestState, lease: RouterLease) -> bool:
        """True if no trusted prefill worker reaches the lease's worker, and one reaches another worker of its build."""
        now, trust, workers = self.fleet.clock(), self.fleet.trust, self.fleet.candidates()
        able = able_to_decode(self._demand(state, workers, state.required_build), workers)
        fed = {worker.status.instance for worker in trust.fed(trust.decoders(able, workers, now), workers, now)}
        return bool(fed) and lease.fence.instance not in fed

    def stands(self, worker: Candidate | None) -> bool:
        """True if a worker that was chosen a moment ago can still be believed."""
        entry = self.fleet.registry.get(worker.status.instance) if worker is not None else None
        return entry is not None and not entry.suspect and not entry.status.draining

    def _outgrown(self, state: RequestState) -> bool:
        """True if a text has begun that no worker which prefills could go on with."""
        workers = self.fleet.candidates()
        demand = Demand(tokens=state.tokens, build=state.required_build)
        return bool(state.generated) and outgrown(demand, able_to_prefill(demand, workers))

    def begin_prefill(self, placed: Placed, state: RequestState, lease: RouterLease) -> PrefillCall:
        """A prefill as decided."""
        worker, reserved = placed.decision.prefill, placed.reserved
        assert worker is not None and reserved is not None
        began = self.fleet.clock() if placed.asked_at is None else placed.asked_at
        attempt = Attempt(placed.decision, began, state.tokens - reserved.work.prompt_tokens)
        if lease.grant is not None and worker.status.instance != lease.fence.instance:
            attempt.leased_tokens = lease.grant.cached_tokens
        attempt.downgraded = placed.decision.mixed and state.split_asked
        state.attempts.append(attempt)
        state.split_asked |= placed.decision.split
        return self.fleet.prefill(worker, state, lease, reserved)

    def expect_blocks(self, state: RequestState, *instances: str) -> ExpectedBlocks:
        """From now on the router counts on the request's blocks at these workers, until it is told otherwise."""
        expected = ExpectedBlocks(self.fleet.prefixes)
        for entry in map(self.fleet.registry.get, dict.fromkeys(instances)) if self.fleet.prefixes is not None else ():
            if entry is not None:
                expected.expect(entry.status.instance, block_keys(state, entry.status))
        return expected

    def _demand(self, state: RequestState, workers: Sequence[Candidate], build: Build | None) -> Demand:
        cached = self._cached(state, workers) if self.fleet.prefixes is not None else {}
        request, now = state.request, self.fleet.clock()
        left = request.sampling.max_tokens - len(state.generated)
        output = self.outputs.expected(request.service_class, len(state.generated), left)
        return Demand(
            tokens=state.tokens,
            output=output,
            build=build,
            cached=cached,
            slo=request.slo,
            weight=self.service_class(state).weight,
            priority=request.priority,
            first_token_in=state.first_token_in(now),
            session=request.session,
            salt=state.salt,
            texts=text_kinds(request.service_class, output, state.repeats, tenant_of(request), request.session),
        )

    def _cached(self, state: RequestState, workers: Sequence[Candidate]) -> dict[str, int]:
        """Tokens of the request's leading blocks that workers hold, by instance; those that hold none are left out.

        Workers of another fingerprint or block size have other keys, so no answer is about one of them.
        """
        assert self.fleet.prefixes is not None
        kinds = {kind: next(alike).status for kind, alike in groupby(workers, attrgetter("kind"))}
        return {
            instance: blocks * status.block_size
            for status in kinds.values()
            for instance, blocks in self.fleet.prefixes.match(block_keys(state, status)).items()
        }

    def _patience(self, state: RequestState, waited: float = 0.0) -> tuple[float, bool]:
        """Seconds the request may wait, which has done so before; True if that is because of its deadline."""
        own = self.service_class(state).patience
        whole = self.fleet.config.patience if own is None else own
        return patience_left(whole, waited, state.request.deadline, self.fleet.clock())
