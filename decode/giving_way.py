"""Which leases give their room to a new one that can be in time: late ones of which nothing has been computed.

Pure: no torch, no clock, no I/O. A late prompt is computed when others leave time (prefill.ordering). Until then it
would keep room that prompts which are not late yet need, and these would be late before they find any.
"""

from __future__ import annotations

from collections.abc import Iterable

from decode.leases import Lease
from serving.messages import LeaseOrder

LONGEST = 30.0  # seconds after its first token was due that a lease may have to give way: then it has waited enough


def giving_way(order: LeaseOrder, leases: Iterable[Lease], blocks: int, now: float) -> list[Lease]:
    """Leases whose end makes `blocks` blocks available, one at least: none where all of them do not.

    They are no more important than the order, which goes on with a text or has time left for its first token. Of less
    important ones first, then of those with the most blocks reserved, as few as can be. What has begun, text or prompt,
    gives way to nobody.
    """
    left = order.first_token_in
    if not order.generated and (left is None or not left > 0.0):
        return []
    able = [lease for lease in leases if _may_give_way(lease, order.request.priority, now)]
    able.sort(key=lambda lease: (-lease.seq.objectives.priority, -lease.seq.reserved))
    found, freed = list[Lease](), 0
    for lease in able:
        found.append(lease)
        freed += lease.seq.reserved
        if freed >= blocks:
            return found
    return []


def _may_give_way(lease: Lease, priority: int, now: float) -> bool:
    seq = lease.seq
    late = now - LONGEST < seq.objectives.due < now
    return late and seq.reserved > 0 and not seq.order.generated and seq.objectives.priority >= priority
