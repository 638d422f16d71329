"""The lease table: who holds KV room on this decode worker, whose KV has arrived, and who may still write it.

A pure state machine: events in, state out, an illegal event raises. No torch, no clock, no I/O.

    open ──► FILLING ──commit──► RUNNING ──► (end)
               │ ▲                  │
               └─┘ advance          └── advance: back to FILLING, for another prefill try

A message must carry the lease's current fence (lease, epoch, instance); anything older, or for another instance of
the worker, raises StaleLease and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kvcache.connector.fetch_cost import HandoffMeter
from serving.engine.sequence import SequenceState
from serving.errors import CorruptChunk, InvalidRequest, StaleLease
from serving.messages import LeaseId, LeaseOrder


class LeaseState(Enum):
    FILLING = "filling"  # waits for KV from a prefill worker
    RUNNING = "running"  # decoding


@dataclass(slots=True)
class Lease:
    """`filled[layer]` is up to which token that layer's KV has been handed over, `limit` up to which it is to be.

    Tokens of `pooled` come from the KV pool meanwhile. Those that do not come are handed over after all, when the rest
    has been: then `filled` and `limit` speak of them.

        cached | pooled | handed over    tokens of the sequence; the first are here, the others may be none
    """

    fence: LeaseId
    session: str
    seq: SequenceState
    filled: list[int]
    state: LeaseState = LeaseState.FILLING
    pooled: range = range(0)
    limit: int = field(init=False)
    arriving: set[int] = field(default_factory=set)  # layers that a chunk is being written to
    meter: HandoffMeter = field(default_factory=HandoffMeter)

    def __post_init__(self) -> None:
        self.limit = self.seq.start

    def accept(self, first_layer: int, last_layer: int, start: int, end: int) -> None:
        """May this range be written? Chunks of a layer must come gapless, in order and once. Raises CorruptChunk."""
        if self.state is not LeaseState.FILLING:
            raise StaleLease("KV arrived for a lease that is already running", code="state")
        layers = range(first_layer, last_layer)
        if end > self.limit or any(self.filled[layer] != start for layer in layers) or self.arriving & set(layers):
            raise CorruptChunk(f"KV for tokens {start} to {end} arrived out of order", code="order")
        self.arriving |= set(layers)

    def fill(self, first_layer: int, last_layer: int, end: int) -> None:
        """The range just accepted has been written."""
        for layer in range(first_layer, last_layer):
            self.filled[layer] = end

    def over(self, first_layer: int, last_layer: int) -> None:
        """Nothing is written any more of the range just accepted."""
        self.arriving -= set(range(first_layer, last_layer))

    def leave_to_pool(self, tokens: range) -> bool:
        """These come from the KV pool, the handoff begins after them; False where it has begun, or they do not fit."""
        begun = bool(self.pooled or self.arriving or self.limit != self.seq.start)
        untouched = self.state is LeaseState.FILLING and not begun
        if not untouched or any(upto != tokens.start for upto in self.filled) or tokens.stop >= self.limit:
            return False
        self.pooled = tokens
        self.filled = [tokens.stop] * len(self.filled)
        return True

    def settle_pool(self, upto: int) -> range:
        """The pool has brought the tokens before `upto`, and brings no more. What it lacks is to be handed over now."""
        assert self.handed_over, "what the pool does not bring is handed over last"
        lacking, self.pooled = range(max(upto, self.pooled.start), self.pooled.stop), range(0)
        if lacking:
            self.filled = [lacking.start] * len(self.filled)
            self.limit = lacking.stop
        return lacking

    @property
    def handed_over(self) -> bool:
        """All that is to be handed over by now is here."""
        return all(upto == self.limit for upto in self.filled)

    @property
    def complete(self) -> bool:
        return self.handed_over and not self.pooled


@dataclass(slots=True)
class LeaseTable:
    """All leases of one worker instance; `layers` is the model's number of layers with KV."""

    instance: str
    layers: int
    leases: dict[str, Lease] = field(default_factory=dict)

    def open(self, order: LeaseOrder, session: str, seq: SequenceState) -> Lease:
        """Enter a lease whose sequence holds its blocks. Raises as `check_new`."""
        self.check_new(order)
        return self._enter(order, session, seq)

    def check_new(self, order: LeaseOrder) -> None:
        """May this lease be opened? Raises StaleLease, InvalidRequest."""
        if order.lease.instance != self.instance:
            raise StaleLease("the lease is for another instance of this worker", code="instance")
        if order.lease.lease in self.leases:
            raise InvalidRequest(f"lease {order.lease.lease} is already open", param="lease")

    def _enter(self, order: LeaseOrder, session: str, seq: SequenceState) -> Lease:
        lease = Lease(order.lease, session, seq, [seq.computed] * self.layers)
        self.leases[order.lease.lease] = lease
        return lease

    def check(self, fence: LeaseId) -> Lease:
        """The lease this fence opens. Raises StaleLease."""
        if fence.instance != self.instance:
            raise StaleLease("a message for another instance of this worker", code="instance")
        lease = self.leases.get(fence.lease)
        if lease is None:
            raise StaleLease(f"lease {fence.lease} is not open here", code="lease")
        if fence.epoch != lease.fence.epoch:
            raise StaleLease(
                f"epoch {fence.epoch} of lease {fence.lease} is over, {lease.fence.epoch} runs", code="epoch"
            )
        return lease

    def advance(self, order: LeaseOrder, seq: SequenceState) -> Lease:
        """Start a new epoch with a fresh sequence: what earlier epochs still send is refused from now on."""
        lease = self.leases.get(order.lease.lease)
        if lease is None or order.lease.instance != self.instance:
            raise StaleLease(f"lease {order.lease.lease} is not open here", code="lease")
        if order.lease.epoch <= lease.fence.epoch:
            raise StaleLease(f"epoch {order.lease.epoch} does not follow {lease.fence.epoch}", code="epoch")
        return self._enter(order, lease.session, seq)

    def commit(self, fence: LeaseId) -> Lease:
        """All KV is said to be here: from now on the lease decodes. Raises StaleLease, CorruptChunk."""
        lease = self._filling(fence)
        if not lease.complete:
            raise CorruptChunk("the handoff ended with KV missing", code="incomplete")
        lease.state = LeaseState.RUNNING
        return lease

    def adopt(self, fence: LeaseId) -> Lease:
        """A prefill in this same worker computes the lease's own blocks: nothing will be handed over."""
        lease = self._filling(fence)
        if lease.arriving:
            raise StaleLease("KV is being written to the lease, which is to be computed here", code="state")
        lease.state = LeaseState.RUNNING
        lease.pooled = range(0)
        return lease

    def _filling(self, fence: LeaseId) -> Lease:
        lease = self.check(fence)
        if lease.state is not LeaseState.FILLING:
            raise StaleLease("the lease is already running", code="state")
        return lease

    def end(self, lease_id: str) -> Lease | None:
        """Take the lease out; None if it is gone already."""
        return self.leases.pop(lease_id, None)

    def held(self, lease_id: str, session: str) -> Lease | None:
        """The lease of this name, if the session holds it: routers name theirs, and two may choose the same."""
        lease = self.leases.get(lease_id)
        return lease if lease is not None and lease.session == session else None

    def by_session(self) -> Counter[str]:
        """How many leases each session holds."""
        return Counter(lease.session for lease in self.leases.values())

    def of(self, session: str) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.session == session]
