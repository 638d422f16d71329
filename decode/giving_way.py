"""Which leases give their room to a new one that can be in time: late ones of which nothing has been computed.

Pure: no torch, no clock, no I/O. A late prompt is computed when others leave time (prefill.ordering). Until then it
would keep room that prompts which are not late yet need, and these would be late before they find any.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from decode.leases import Lease
from serving.engine.ageing import level_of
from serving.messages import LeaseOrder

LONGEST = 30.0  # seconds after its first token was due that a lease may have to give way: then it has waited enough


def pressing(order: LeaseOrder) -> bool:
    """True if others may give way to it: it goes on with a text, or has time left for its first token."""
    left = order.first_token_in
    return bool(order.generated) or (left is not None and 0.0 < left < inf)


def yielding(order: LeaseOrder) -> bool:
    """True if it would give way to others: its first token is late, and has not been for long."""
    left = order.first_token_in
    return not order.generated and left is not None and -LONGEST < left <= 0.0


def giving_way(order: LeaseOrder, leases: Iterable[Lease], blocks: int, now: float) -> list[Lease]:
    """Leases whose end makes `blocks` blocks available, one at least: none where all of them do not.

    They are no more important than the order, which is `pressing`; waiting raises them as it does in the queue. Of less
    important ones first, then of those with the most blocks reserved, and none that is not needed. What has begun, text
    or prompt, gives way to nobody. Of what ends with them reserved blocks count, not cached ones.
    """
    if not pressing(order):
        return []
    able = [lease for lease in leases if _may_give_way(lease, order.request.priority, now)]
    able.sort(key=lambda lease: (-lease.seq.objectives.priority, -lease.seq.reserved))
    found, freed = list[Lease](), 0
    for lease in able:
        found.append(lease)
        freed += lease.seq.reserved
        if freed >= blocks:
            break
    else:
        return []
    for lease in found[-2::-1]:
        if freed - lease.seq.reserved >= blocks:
            found.remove(lease)
            freed -= lease.seq.reserved
    return found


def _may_give_way(lease: Lease, priority: int, now: float) -> bool:
    seq = lease.seq
    late = now - LONGEST < seq.objectives.due < now
    return late and seq.reserved > 0 and not seq.order.generated and level_of(seq, now) >= priority
