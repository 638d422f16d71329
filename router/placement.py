"""One request's place: its lease and the prefill workers tried for it, and what is to blame when a try fails.

Where it goes is the placer's to say. No torch.
"""

from __future__ import annotations

from collections.abc import Callable

from router.candidate import Candidate
from router.expected_blocks import ExpectedBlocks
from router.leases import DECODE_LOST, RouterLease
from router.placer import Placer
from router.prefill_call import BROKEN_CALL, Placed, PrefillCall
from router.quarantine import PROGRESS
from router.registry import Reservation
from router.request_state import RequestState
from serving.errors import (
    LATE,
    CorruptChunk,
    Draining,
    Preempted,
    Retryable,
    StaleLease,
    WorkerLost,
)
from serving.messages import Delta, Prefilled

LINK_CODES = (
    DECODE_LOST,
    "generation",
    "layout",
    "range",
    "incomplete",
)  # of StaleLease, where the handoff itself fails


class Placement:
    """One request's place: its lease, and the prefill workers that have been tried for it. Drop the lease at last."""

    def __init__(self, placer: Placer, state: RequestState):
        self.placer = placer
        self.state = state
        self.quarantine = placer.quarantine
        self.alone: Callable[[], None] | None = None  # call it once the request has come on: others are held back
        self.held: RouterLease | None = None
        self._begun = False  # a prefill into the lease has failed: it has to begin anew
        self._placed: Placed | None = None  # what led to the lease, until its prefill is sent
        self._decodes = False  # its worker has decoded for it since it last began
        self._worker: Candidate | None = None  # that prefills
        self._reserved: Reservation | None = None  # for it
        self._avoid: set[str] = set()  # prefill workers that failed, by instance
        self._expected = ExpectedBlocks()  # of the prefill that runs, at its worker and the lease's

    async def lease(self) -> RouterLease:
        """Room to decode: a new lease, or the one that is held, begun anew. Raises as Placer.open_lease; Retryable."""
        if self.held is None:
            self.held, self._placed = await self.placer.open_lease(self.state)
            self.state.split_asked |= self._placed is not None and self._placed.decision.split
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
        if placed is None or not (placed.decision.mixed or self.placer.stands(placed.decision.prefill)):
            if placed is not None:
                placed.release()
            placed = await self.placer.choose_prefill(self.state, self.held, self._avoid)
        self._worker, self._reserved = placed.decision.prefill, placed.reserved
        call = self.placer.begin_prefill(placed, self.state, self.held)
        assert self._worker is not None
        self._expected = self.placer.expect_blocks(self.state, self._worker.status.instance, self.held.fence.instance)
        return call

    def prefilled(self, prefilled: Prefilled) -> Delta:
        """The prefill worker has done its work."""
        assert self._worker is not None
        self.state.attempts[-1].begin(prefilled)
        if self._reserved is not None:
            self._reserved.release(computed=True)  # what is left is its handoff
        self._expected.came(self._worker.status.instance)
        self.placer.fleet.breakers.succeeded(self._worker.status.instance, self.placer.fleet.clock())
        return prefilled.delta

    def decoded(self, delta: Delta) -> Delta:
        """The whole way works, from prefill to decode: the text is getting on."""
        if not self._decodes:
            assert self._worker is not None and self.held is not None
            self._decodes = True
            self.state.failures, self.state.waited = 0, 0.0
            self.placer.fleet.decoded(self._worker.status.instance, self.held.fence.instance)
            self._expected.came(self.held.fence.instance)
        if self.alone is not None and self.state.attempts[-1].tokens > PROGRESS:
            self.leave_isolation()
        return delta

    def leave_isolation(self) -> None:
        """The request has come on, has failed, or has ended. Safe to repeat."""
        leave, self.alone = self.alone, None
        if leave is not None:
            leave()

    def failed(self, error: Retryable) -> None:
        """The try has failed: whoever is to blame is, and where the lease is not it is kept."""
        self.state.fail(error)
        self._expected.give_up()
        lease, worker, fleet = self.held, self._worker, self.placer.fleet
        echo = self._begun and lease is None  # what the lease could not begin anew after has been counted
        self.state.failures += not (echo or isinstance(error, Preempted | Draining))
        if not isinstance(error, Preempted):
            self.state.waited = 0.0  # for who is lost another comes, and that may take as long
        self._decodes = False
        self.leave_isolation()
        if lease is not None and worker is not None:
            self.quarantine.tried(self.state)
            self._note_loss(lease, worker.status.instance, error)
        late = isinstance(error, Preempted) and error.code == LATE  # its class decides, where a place is looked for
        if lease is None or lease.failed.done() or worker is None or late:
            if lease is not None and isinstance(error, WorkerLost):
                fleet.lost_lease(lease.fence.instance, error)
            self.drop_lease()
            self.state.handed_back |= late
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
            if self.state.failures > 1 and not self.state.generated:
                self.drop_lease()  # nobody is known to be to blame: another generation may do better
            return
        self._avoid.add(instance)
        rolls = not self.state.generated and len({each.generation for each in fleet.candidates()}) > 1
        if rolls or (blames_link(error) and self.placer.better_elsewhere(self.state, lease)):
            self.drop_lease()

    def _note_loss(self, lease: RouterLease, prefill: str, error: Retryable) -> None:
        """Where the try has ended with the loss of a worker that may have computed it, that counts."""
        if not isinstance(error, WorkerLost) or error.code == BROKEN_CALL:
            return
        instance, now = lease.fence.instance, self.placer.fleet.clock()
        if not lease.failed.done():
            self.quarantine.lost(self.state, prefill, error, now, computing=True)
            return
        begun = instance == prefill or self.state.attempts[-1].first_at is not None
        self.quarantine.lost(self.state, instance, error, now, computing=begun)

    def drop_lease(self) -> None:
        """Give the lease up, if one is held; its worker frees everything within a step."""
        self._expected.give_up()
        lease, self.held = self.held, None
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.release()
        if lease is not None:
            self.placer.close_lease(lease)


def blames_link(error: Retryable) -> bool:
    """True if KV did not get from the prefill worker to the decode worker as it should: neither alone is to blame."""
    return isinstance(error, CorruptChunk) or (isinstance(error, StaleLease) and error.code in LINK_CODES)
