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


def giving_way(order: LeaseOrder, leases: Iterable[Lease], blocks: int, now: float) -> list[Lease]:
    """Leases whose end makes `blocks` blocks available, one at least: none where all of them do not.

    They are no more important than the order, which goes on with a text or has time left for its first token; waiting
    raises them as it does in the queue. Of less important ones first, as few as can be, and no larger than it takes.
    What has begun, text or prompt, gives way to nobody. Of what ends with them reserved blocks count, not cached ones.
    """
    left = order.first_token_in
    if not order.generated and (left is None or not 0.0 < left < inf):
        return []
    able = [lease for lease in leases if _may_give_way(lease, order.request.priority, now)]
    able.sort(key=lambda lease: (-lease.seq.objectives.priority, -lease.seq.reserved))
    found, lacking = list[Lease](), blocks
    for place, lease in enumerate(able):
        if lease.seq.reserved < lacking:
            found.append(lease)
            lacking -= lease.seq.reserved
            continue
        priority = lease.seq.objectives.priority
        enough = [other for other in able[place:] if other.seq.reserved >= lacking]
        alike = [other for other in enough if other.seq.objectives.priority == priority]
        return [*found, min(alike, key=lambda other: other.seq.reserved)]
    return []


def _may_give_way(lease: Lease, priority: int, now: float) -> bool:
    seq = lease.seq
    late = now - LONGEST < seq.objectives.due < now
    return late and seq.reserved > 0 and not seq.order.generated and level_of(seq, now) >= priority
