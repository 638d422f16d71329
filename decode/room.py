"""Room for a lease on a decode worker: a sequence, its blocks, and steps that stay short enough for everybody.

Called under the engine's lock. It knows neither routers' sessions nor how they are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from decode.giving_way import giving_way, pressing, yielding
from decode.leases import Lease, LeaseTable
from decode.tpot_bound import LeaseBound
from decode.turns import RouterTurns
from kvcache.worker_context import WorkerContext
from serving.engine.objectives import DEADLINE_PASSED
from serving.engine.sequence import SequenceState
from serving.errors import DeadlineExceeded, NoRoom
from serving.messages import LeaseOrder

SEQUENCES = "sequences"  # of NoRoom: it holds as many leases as it may; without a code, KV blocks are wanting


class DecodeRoom:
    """Holds the sequences of new leases, or says why there is no room.

    Blocks are left as many as are `wanted` for a prompt that is computed here for another worker. `give_way` ends
    leases that a new one takes the place of.
    """

    def __init__(
        self,
        context: WorkerContext,
        table: LeaseTable,
        bound: LeaseBound,
        wanted: Callable[[], int],
        give_way: Callable[[Sequence[Lease]], None],
    ):
        self.context = context
        self.table = table
        self.bound = bound
        self.wanted = wanted
        self.give_way = give_way
        self.turns = RouterTurns()
        self.not_granted: Counter[str] = Counter()  # leases refused, by what was wanting
        self.gave_way = 0  # leases ended so that others are in time

    def hold_new(self, order: LeaseOrder, session: str) -> SequenceState:
        """The sequence of a new lease, its blocks reserved. Raises NoRoom, DeadlineExceeded."""
        try:
            return self._hold_new(order, session)
        except NoRoom as error:
            self.not_granted[error.code or "blocks"] += 1
            if error.code in (None, SEQUENCES):
                priority = order.request.priority if yielding(order) else None
                self.turns.refused(session, self.context.engine.clock(), yielding=priority)
            raise

    def _hold_new(self, order: LeaseOrder, session: str) -> SequenceState:
        now, name = self.context.engine.clock(), self.context.identity.name
        held, leases = len(self.table.leases), self.table.leases.values()
        full = held >= self.context.engine.limits.max_num_seqs
        leaving = giving_way(order, leases, 0, now) if full else []
        if full and not leaving:
            raise NoRoom(f"{name} holds {held} sequences, its limit", code=SEQUENCES)
        self.bound.check(order, [lease.seq for lease in leases], now)
        if self.turns.claimed:
            by_session, priority = self.table.by_session(), order.request.priority if pressing(order) else None
            if self.turns.others_first(session, by_session, now, pressing=priority):
                raise NoRoom(f"{name} keeps its room for another router, which holds less", code="turn")
        seq = self.hold(order, self.wanted(), new=True)
        if full and len(leases) == held:
            self._end(leaving)
        return seq

    def hold(self, order: LeaseOrder, spare: int = 0, *, new: bool = False) -> SequenceState:
        """The order's sequence, while `spare` blocks stay available. For a `new` lease others may give way."""
        if order.ends_in is not None and not order.ends_in > 0.0:
            raise DeadlineExceeded(DEADLINE_PASSED)
        seq, kv = self.context.sequence(order, stays=True), self.context.kv
        try:
            kv.open(seq, headroom=len(self.table.leases) + spare, waits=True)
        except NoRoom:
            lacking = kv.lacking(seq, headroom=len(self.table.leases) + spare)
            if not new or not lacking or not self._make_way(order, lacking):
                raise
            kv.open(seq, headroom=len(self.table.leases) + spare, waits=True)
        return seq

    def _make_way(self, order: LeaseOrder, blocks: int) -> bool:
        """End leases that give way to the order, so that as many blocks come free; False if they would not do."""
        found = giving_way(order, self.table.leases.values(), blocks, self.context.engine.clock())
        self._end(found)
        return bool(found)

    def _end(self, leaving: Sequence[Lease]) -> None:
        if leaving:
            self.gave_way += len(leaving)
            self.give_way(leaving)
